"""Failures: peers that die, leave or never arrive, user mistakes, and process exit.

Every surviving rank raises an asyncdist error that names the rank and the operation. Every process exits without help,
with the status of a program that did not crash.
"""

import itertools
import signal

import pytest

pytestmark = pytest.mark.processes


@pytest.fixture
def start(start_world, transport):
    """Fork the ranks of a world that run a function of the program: ``start(world, function, *arguments)``."""

    def start(world, function, *arguments, ranks=None):
        return start_world(
            "programs_failures.py", function, world, *arguments, ranks=ranks, ASYNCDIST_TRANSPORT=transport
        )

    return start


def mostly(transport):
    """Leave the ranks with the other transport to the exhaustive tests: the transport matters little."""
    other = pytest.param({"shm": "tcp", "tcp": "shm"}[transport], marks=pytest.mark.exhaustive)
    return pytest.mark.parametrize("transport", [transport, other])


def check_failed(rank, kind, *words):
    """Check the failure that a rank sends: a class among those of the exception, and what its message contains."""
    kinds, text = rank.hear()
    assert kind in kinds, text
    assert all(word in text for word in words), text


DYING = {
    "ddp": ("dies_in_backward", {}),
    "unused parameters": ("dies_in_backward", {"find_unused_parameters": True}),
    "static graph": ("dies_in_backward", {"static_graph": True}),
    "views": ("dies_in_backward", {"gradient_as_bucket_view": True}),
    "fsdp": ("dies_in_backward_of_fsdp", {}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", DYING)
def test_peer_death_during_backward_is_raised(start, ended, what, world):
    program, options = DYING[what]
    *survivors, victim = start(world, program, options)
    ended(victim, status=-signal.SIGKILL)
    for rank in survivors:
        check_failed(rank, "RuntimeError", f"rank {world - 1} was lost")
        check_failed(rank, "GroupError")
    ended(*survivors)


def test_peer_death_fails_every_waiting_call(start, ended):
    *survivors, victim = start(3, "dies")
    assert [rank.hear() for rank in (*survivors, victim)] == ["waiting", "waiting", "here"]
    victim.kill()
    for rank in survivors:
        told = dict(rank.hear() for _ in range(9))
        assert len(told) == 9
        for call, (kinds, text) in told.items():
            assert ("RuntimeError" if call == "future" else "PeerLostError") in kinds, text
            assert "rank 2 was lost" in text
    assert [rank.hear() for rank in survivors] == [2.0, 2.0], "the survivors continue in a new group"
    ended(*survivors)


@mostly("shm")
def test_rendezvous_timeout_names_the_missing_rank(start, ended):
    ranks = start(3, "never_complete", ranks=2)
    for rank in ranks:
        check_failed(rank, "RendezvousTimeoutError", "missing 2")
        assert rank.hear() is False
    ended(*ranks)


@mostly("tcp")
def test_wait_timeout_leaves_the_operation_running(start, ended):
    waiting, late = start(2, "waits_briefly")
    check_failed(waiting, "WaitTimeoutError")
    late.say("come")
    waiting.say("wait again")
    assert [rank.hear() for rank in (waiting, late)] == [3.0, 3.0]
    ended(waiting, late)


@pytest.mark.parametrize("program", ["devices", "counts", "by_cpp", "features_of_later_releases"])
def test_user_mistake_is_refused(as_expected, program):
    as_expected("programs_refusals", program)


_WAYS = ["undestroyed", "pending", "from a thread", "in a callback"]
_ESSENTIAL = list(zip(_WAYS, ["shm", "tcp", "tcp", "shm"], strict=True))


@pytest.mark.parametrize(
    ("how", "transport"),
    [
        pair if pair in _ESSENTIAL else pytest.param(*pair, marks=pytest.mark.exhaustive)
        for pair in itertools.product(_WAYS, ["shm", "tcp"])
    ],
)
def test_exit_without_destroying_the_group(start, ended, how):
    ended(*start(2, "ends", how))


@mostly("shm")
def test_uncaught_exception_exits_with_status_1(start, ended):
    ranks = start(2, "ends", "raising")
    ended(*ranks, status=1)
    assert 'KeyError: "a user\'s mistake"' in ranks[0].output()


@mostly("shm")
@pytest.mark.parametrize("how", ["twice", "default first"])
def test_group_destroyed_twice_or_in_the_wrong_order_raises(start, ended, how):
    ranks = start(2, "ends", how)
    for rank in ranks:
        check_failed(rank, "Exception")
    ended(*ranks)


@mostly("tcp")
def test_process_group_is_initialized_again_after_destroy(start, ended):
    ranks = start(2, "ends", "again")
    assert [[rank.hear() for _ in range(3)] for rank in ranks] == [[[2.0] * 10] * 3] * 2
    ended(*ranks)


@mostly("tcp")
def test_abort_process_group_reaches_every_rank(start, ended):
    """The abort reaches peers without an open connection while the aborting process is still alive."""
    first, *others = start(3, "aborts")
    for kinds, text in [*first.hear(), *(rank.hear() for rank in others)]:
        assert "GroupAbortedError" in kinds
        assert "torch.distributed aborted the process group" in text
    # The aborting rank has no pending operations.
    assert first.hear() == []
    check_failed(first, "NotInitializedError")
    for rank in (first, *others):
        rank.say("go")
    ended(first, *others)
