"""Gloo's words in errors of timeouts, lost peers, missing ranks: programs that match gloo's messages match asyncdist's."""

import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from asyncdist.errors import GroupError, OperationTimeoutError, PeerLostError
from asyncdist.testing.cluster import run_ranks
from asyncdist.torch_backend import ProcessGroup
from asyncdist.torch_backend.torch_work import add_monitored_barrier, add_words

SHORT, LONG = timedelta(milliseconds=300), timedelta(minutes=1)
REACHED = (
    "Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
    "Please check rank 0 logs for faulty rank."
)


def messages(world, missing, call, ranks=None):
    """Return the messages of the error of each rank that makes the call, None of each rank that does not.

    They call together, ``call(group, limit)``, and the limit is short on rank 0 of the group alone.
    """
    others = threading.Barrier(len(ranks or range(world)) - len(missing))

    def program(world_group):
        group = world_group.world.new_group(ranks or range(world))
        message = None
        if group is not None and group.rank() not in missing:
            others.wait(LONG.total_seconds())
            with pytest.raises(GroupError) as caught:
                call(ProcessGroup(group, None), SHORT if group.rank() == 0 else LONG)
            message = str(caught.value)
        # Ranks that leave before the others have an error would be lost to them.
        world_group.barrier().wait()
        return message

    return run_ranks(world, program)


@pytest.mark.parametrize(("wait_all_ranks", "named"), [(False, "Rank 1"), (True, "Ranks 1, 3")])
def test_monitored_barrier_names_missing_ranks_in_gloos_words(wait_all_ranks, named):
    reporting, _, waiting, _ = messages(4, {1, 3}, lambda group, limit: group.monitored_barrier(limit, wait_all_ranks))
    assert f"[Rank 0]: {named} failed to pass monitoredBarrier in 300 ms" in reporting
    assert "timed out after 0.3 s, waiting for data from ranks 1, 3" in reporting
    assert REACHED.format(2) in waiting
    assert "rank 0 timed out" in waiting
    assert "failed to pass" not in waiting


def test_monitored_barrier_of_a_subgroup_says_that_gloo_numbers_ranks_within_the_group():
    _, reporting, _ = messages(3, {1}, lambda group, limit: group.monitored_barrier(limit), ranks=[1, 2])
    assert "waiting for data from rank 2" in reporting
    assert "with the group's own rank numbers, [Rank 0]: Rank 1 failed to pass monitoredBarrier in 300 ms" in reporting


def test_monitored_barrier_without_time_times_out_on_rank_0():
    reporting, _ = messages(2, {1}, lambda group, _: group.monitored_barrier(timedelta(0)))
    assert "Rank 0 timed out in monitoredBarrier after 0 ms" in reporting


def test_monitored_barrier_names_a_lost_rank():
    error = PeerLostError(7, "its connection was closed", group="pair", rank=5, op="monitored_barrier", seq=1)
    add_monitored_barrier(error, (5, 7), 0, False)
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier" in str(error)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_timeout_of_a_barrier_has_gloos_words_once(asynchronous):
    def barrier(group, limit):
        options = c10d.BarrierOptions()
        options.timeout, options.asyncOp = limit, asynchronous
        work = group.barrier(options)
        for observe in (work.wait, work.result):
            with pytest.raises(
                OperationTimeoutError, match=" Timed out waiting 300ms for recv operation to complete; "
            ):
                observe()
        assert str(work.exception()).count("Timed out waiting") == 1
        work.result()

    reporting, _ = messages(2, {1}, barrier)
    assert "barrier #1 on group" in reporting


def test_timeout_of_a_send_has_gloos_words():
    error = OperationTimeoutError("timed out after 2 s", peers=[1], timeout=2.0, group="pair", rank=0, op="send", seq=0)
    add_words(error)
    assert "Timed out waiting 2000ms for send operation to complete" in str(error)


def test_lost_peer_has_gloos_words_once():
    """The libraries above torch look for them, as torchft's tests do."""
    met = threading.Barrier(2)

    def program(group):
        met.wait(LONG.total_seconds())
        if group.rank() == 1:
            return
        work = ProcessGroup(group, None).allreduce([torch.ones(1)])
        for observe in (work.wait, work.result):
            with pytest.raises(PeerLostError, match="Connection closed by peer"):
                observe()
        assert str(work.exception()).count("Connection closed by peer") == 1

    run_ranks(2, program)
