"""torch's DeviceMesh, DTensor, tensor parallelism and FSDP, compared with the same over gloo."""

import pytest

pytestmark = pytest.mark.processes
NARROW = 2e-2


@pytest.mark.parametrize("program", ["mesh_of_two_dimensions", "mesh_of_some_ranks", "mesh_from_a_group"])
def test_mesh(same_over_gloo, program):
    same_over_gloo("programs_mesh", program)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "program", ["redistribute", "redistribute_asynchronously_and_backward", "distributed_from_rank_0"]
)
def test_distributed_tensor(same_over_gloo, program):
    same_over_gloo("programs_mesh", program)


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", ["sequence_parallel", "sharded_losses"])
def test_tensor_parallel(same_over_gloo, world, program):
    same_over_gloo("programs_mesh", program, close=world > 2)


def test_reduce_scatter_averages(teams, transport, world):
    for mean in teams[transport, world].run("programs_sharded", "mean_of_shares"):
        assert mean.tolist() == [(world + 1) / 2] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["plain", "kept after forward", "resharded to smaller groups", "mixed precision", "offloaded"]
)
def test_variants_of_fsdp2(same_over_gloo, world, name):
    same_over_gloo("programs_sharded", "variant", name, close=world > 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "program", ["in_memory_of_the_group", "hybrid", "other_reductions", "whole_state", "above_tensor_parallel"]
)
def test_fsdp2(same_over_gloo, world, program):
    same_over_gloo("programs_sharded", program, close=world > 2)


@pytest.mark.parametrize(
    "name", ["plain", "original parameters", "gradients and optimizer", "not sharded", "mixed precision"]
)
def test_variants_of_fsdp1(same_over_gloo, world, name):
    same_over_gloo("programs_sharded", "first_version", name, close=world > 2)


def test_fsdp2_half_precision_sums(same_over_gloo):
    """gloo rounds narrow floats after every addition; asyncdist rounds them once."""
    same_over_gloo("programs_sharded", "variant", "bfloat16 sums", close=NARROW)
