"""torch's DistributedDataParallel and the modules built on it, compared with the same over gloo.

The sum of two gradients does not depend on their order, so two ranks agree bit for bit. Four ranks agree within a
tolerance.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes
NARROW = 2e-3


@pytest.mark.parametrize(
    "program",
    [
        "plain", "one_bucket", "starts_alike", "static_graph", "gradients_are_views", "double_precision",
        "buffers_follow_rank_0", "unused_parameters", "without_synchronization", "two_forwards_one_backward",
        "in_a_subgroup", "hook_all_reduce", "hook_of_ones_own", "hook_power_sgd", "post_local_sgd", "joined",
        "joined_by_as_many_as_are_left", "joined_with_unused_parameters", "join_refuses_when_told_to",
        "joining_of_ones_own", "zero_redundancy", "zero_redundancy_joined",
    ],
)  # fmt: skip
def test_training(same_over_gloo, world, program):
    same_over_gloo("programs_ddp", program, close=world > 2)


@pytest.mark.parametrize(
    "program", ["mixed_precision_of_autocast", "hook_half_precision", "hook_wrapped", "hooks_of_cpp"]
)
def test_half_precision_gradients(same_over_gloo, program):
    """gloo rounds narrow floats after every addition; asyncdist rounds them once."""
    same_over_gloo("programs_ddp", program, close=NARROW)


@pytest.mark.parametrize("program", ["where_buckets_lie", "exact_in_open_buckets"])
def test_buckets(as_it_should_be, program):
    as_it_should_be("programs_ddp", program)
