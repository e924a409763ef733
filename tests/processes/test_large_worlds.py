"""Processes whose world counts as large, so that no rank knows all addresses, when rank 0 and its store are killed."""

import pytest

from tests.processes.conftest import Job

pytestmark = pytest.mark.processes
SIZE = 20
NEAR, FAR = 5, 14
"""Two ranks of which neither knows the address of the other at first."""


@pytest.mark.parametrize("face", ["awaiting", pytest.param("blocking", marks=pytest.mark.exhaustive)])
def test_survivors_of_rank_0_regroup_and_reach_ranks_that_they_have_never_dialled(nursery, tmp_path, all_do, face):
    job = Job(nursery, tmp_path, "tcp")
    ranks = job.start(SIZE, face)
    all_do(ranks, "be_large")
    job.meet(ranks)
    assert set(all_do(ranks, "all_reduce", None, 10)) == {float(SIZE)}
    ranks[0].process.kill()
    survivors = ranks[1:]
    assert {answer.kind for answer in all_do(survivors, "all_reduce", None, 10)} == {"PeerLostError"}
    ids = tuple(range(1, SIZE))
    assert all_do(survivors, "regroup") == [(rank, ids, 1) for rank in range(SIZE - 1)]
    assert set(all_do(survivors, "all_reduce", None, 10)) == {float(SIZE - 1)}
    ranks[NEAR].do("pend_send", None, FAR - 1)
    ranks[FAR].do("receive", None, NEAR - 1)
