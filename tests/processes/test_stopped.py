"""A stopped rank (SIGSTOP): timeouts of the others name it, and after SIGCONT it receives their errors.

The ranks do not beat: `test_heartbeat` has the cases in which a stopped rank is lost before a timeout.
"""

import pytest

pytestmark = pytest.mark.processes


def test_stopped_rank_is_named_at_the_timeout_and_fails_when_continued(job, all_do, face):
    patient, frozen, brief = ranks = job.met(3, face, ASYNCDIST_HEARTBEAT="0")
    for told, timeout in ((patient, 60.0), (frozen, 60.0), (brief, 0.5)):
        told.do("new_group", "all", [0, 1, 2], timeout)
    frozen.process.stop()
    patient.tell("all_reduce", "all", 100_000)
    brief.tell("all_reduce", "all", 100_000)

    timed_out = brief.hear()
    assert timed_out.kind == "OperationTimeoutError"
    assert 1 in timed_out.peers
    assert "timed out after 0.5 s, waiting for" in timed_out.text
    assert "rank 1" in timed_out.text or "ranks 0-1" in timed_out.text
    assert timed_out.at - brief.told_at > 0.4

    aborted = patient.hear()
    assert (aborted.kind, aborted.peer) == ("GroupAbortedError", 2)
    assert "rank 2 timed out after 0.5 s, waiting for data from rank" in aborted.text

    frozen.process.resume()
    frozen.tell("all_reduce", "all", 100_000)
    aborted = frozen.hear()
    assert (aborted.kind, aborted.peer) == ("GroupAbortedError", 2)
    assert "rank 2 timed out" in aborted.text
    # Only the group with the deadline has failed.
    assert all_do(ranks, "all_reduce", "world", 10) == [3.0, 3.0, 3.0]


def test_rank_stopped_during_an_operation_fails_too(job, face):
    ranks = job.met(2, face, ASYNCDIST_HEARTBEAT="0")
    for told, timeout in zip(ranks, (0.5, 60.0), strict=True):
        told.do("new_group", "both", [0, 1], timeout)
    ranks[1].tell("all_reduce", "both", 3_000_000)
    ranks[1].process.stop()
    ranks[0].tell("all_reduce", "both", 3_000_000)
    timed_out = ranks[0].hear()
    assert (timed_out.kind, timed_out.peers) == ("OperationTimeoutError", (1,))
    ranks[1].process.resume()
    aborted = ranks[1].hear()
    assert (aborted.kind, aborted.peer) == ("GroupAbortedError", 0)
    assert "rank 0 timed out" in aborted.text


def test_rank_continued_before_the_timeout_causes_no_failure(job, face):
    ranks = job.met(3, face, ASYNCDIST_HEARTBEAT="0")
    for told in ranks:
        told.tell("all_reduce", "world", 300_000, 10)
    ranks[2].process.stop()
    ranks[0].process.stop()
    ranks[2].process.resume()
    ranks[0].process.resume()
    assert [told.hear() for told in ranks] == [3.0**10] * 3


@pytest.mark.parametrize("state", ["does not answer", "has no pending call"])
def test_timeouts_of_all_ranks_name_the_stopped_or_idle_rank_instead_of_their_neighbours(job, all_do, face, state):
    ranks = job.world(4, face, timeout=3.0, ASYNCDIST_HEARTBEAT="0")
    all_do(ranks, "all_reduce", "world", 100_000)
    if state == "does not answer":
        ranks[2].process.stop()
    failures = all_do([ranks[0], ranks[1], ranks[3]], "all_reduce", "world", 100_000)
    assert "OperationTimeoutError" in [failed.kind for failed in failures]
    for failed in failures:
        assert "timed out after 3 s, waiting for" in failed.text
        assert f"(rank 2 {state})" in failed.text
        assert failed.kind == "GroupAbortedError" or failed.peers == (2,)


def test_collective_and_receive_that_wait_for_each_other_are_a_mismatch(job, face):
    ranks = job.met(3, face, timeout=3.0)
    for told in (ranks[0], ranks[2]):
        told.tell("all_reduce", "world", 100_000)
    ranks[1].tell("receive", "world", 0)
    for told in ranks:
        failed = told.hear()
        assert failed.kind == "MismatchError"
        assert "rank 1 waits in recv with tag 0 for rank 0, which waits in all_reduce #2" in failed.text
