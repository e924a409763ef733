"""torch's DistributedDataParallel and the modules built on it, compared with the same over gloo.

The sum of two gradients does not depend on their order, so two ranks agree bit for bit. Four ranks agree within a
tolerance.
"""

import pytest

pytestmark = pytest.mark.processes
NARROW = 2e-3


@pytest.mark.parametrize("name", ["plain", "one bucket", "static graph", "gradients are views"])
def test_variants_of_training(same_over_gloo, world, name):
    same_over_gloo("programs_ddp", "variant", name, close=world > 2)


@pytest.mark.parametrize(
    "program",
    [
        "starts_from_rank_0", "buffers_follow_rank_0", "unused_parameters", "without_synchronization",
        "in_a_subgroup", "custom_hook", "hook_power_sgd",
        "joined", "joined_averaging_over_remaining_ranks", "joined_with_unused_parameters",
        "join_throws_on_early_termination", "zero_redundancy",
    ],
)  # fmt: skip
def test_training(same_over_gloo, world, program):
    same_over_gloo("programs_ddp", program, close=world > 2)


def test_hook_of_torch(same_over_gloo, world):
    same_over_gloo("programs_ddp", "hook", "all-reduce", close=world > 2)


@pytest.mark.parametrize("name", ["float16", "wrapped"])
def test_hook_with_half_precision(same_over_gloo, name):
    """gloo rounds narrow floats after every addition; asyncdist rounds them once."""
    same_over_gloo("programs_ddp", "hook", name, close=NARROW)


@pytest.mark.exhaustive
def test_autocast(same_over_gloo):
    same_over_gloo("programs_ddp", "mixed_precision_of_autocast", close=NARROW)


def test_hooks_of_cpp(same_over_gloo):
    same_over_gloo("programs_ddp", "hooks_of_cpp", close=NARROW)


@pytest.mark.parametrize(
    "program", ["where_buckets_lie", "exact_in_registered_buckets", "hook_power_sgd_of_several_buckets"]
)
def test_buckets(as_expected, program):
    as_expected("programs_ddp", program)
