"""torch's DistributedDataParallel and the modules built on it, compared with the same over gloo.

The sum of two gradients does not depend on their order, so two ranks agree bit for bit. Four ranks agree within a
tolerance. tests/ddp/test_table.py compares each argument, method and hook of the class.
"""

import pytest

pytestmark = pytest.mark.processes
NARROW = 2e-3


@pytest.mark.parametrize(
    "program",
    [
        "starts_from_rank_0", "in_a_subgroup", "custom_hook", "joined", "join_throws_on_early_termination",
        "joined_custom_joinable", "zero_redundancy",
    ],
)  # fmt: skip
def test_training(same_over_gloo, world, program):
    same_over_gloo("programs_ddp", program, close=world > 2)


def test_hooks_of_cpp(same_over_gloo):
    """gloo rounds narrow floats after every addition; asyncdist rounds them once."""
    same_over_gloo("programs_ddp", "hooks_of_cpp", close=NARROW)


@pytest.mark.parametrize(
    "program", ["where_buckets_lie", "exact_in_registered_buckets", "hook_power_sgd_of_several_buckets"]
)
def test_buckets(as_expected, program):
    as_expected("programs_ddp", program)
