"""Probes along chains of waiting ranks, with a fake clock and a simulated network."""

from __future__ import annotations

from collections import deque

import pytest

from asyncdist.base.timers import TimerTable
from asyncdist.errors import MismatchError, OperationTimeoutError
from asyncdist.kernel.engine.operation import Channel, Operation, Plan, Task
from asyncdist.kernel.engine.wait_probes import IDLE, MISMATCH, SILENT, Finding, WaitProbes, timeout_error
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.tracing.recorder import Entry
from asyncdist.kernel.transport.wire_format import PROBE, WAITING, pack_key

TIMEOUT, LEFT = 8.0, 1.0
GROUP, MESSAGES = 5, 6


class Rank:
    """A rank with its pending operations; its messages go into the network's queue."""

    def __init__(self, rank, network):
        self.rank, self.network = rank, network
        self.operations, self.timers, self.complete = {}, TimerTable(), set()
        self.probes = WaitProbes(self, lambda: network.now)

    def call(self, name, peers, sequence=1, number=GROUP):
        members = range(len(self.network.ranks))
        channel = Channel(number, "world", members, self.rank, point_to_point=name in ("send", "recv"))
        if channel.point_to_point:
            channel.sibling = Channel(GROUP, "world", members, self.rank)
        entry = Entry("world", name, sequence, 0, 0)
        operation = Operation(channel, Plan(), Work(), TIMEOUT, entry)
        for peer in peers:
            task = Task(operation, 0, iter(()), deque())
            task.awaits = peer
            operation.tasks.append(task)
        self.operations[operation.key] = operation
        return operation

    def assert_held(self):
        """Nothing else runs."""

    def pending_for(self, key):
        if key[:12] in self.complete:
            return None, True
        return self.operations.get(key[:12]) or next(iter(self.operations.values()), None), False

    def send_unordered(self, peer, kind, key, body):
        self.network.queue.append((self.rank, peer, kind, key, body))

    def receive(self, peer, kind, key, body):
        if kind == PROBE:
            self.probes.on_probe(peer, key, body)
        else:
            assert kind == WAITING
            self.probes.on_answer(peer, body)


class Network:
    """Ranks that exchange messages without delay; a stopped rank receives none."""

    def __init__(self, size):
        self.now = 100.0
        self.queue = deque()
        self.stopped = set()
        self.ranks = [Rank(rank, self) for rank in range(size)]

    def exchange(self, limit=10_000):
        """Deliver messages until no rank sends one; return their number."""
        for count in range(limit):
            if not self.queue:
                return count
            sender, peer, *message = self.queue.popleft()
            if peer not in self.stopped:
                self.ranks[peer].receive(sender, *message)
        raise AssertionError("the messages do not end")

    def wait(self, seconds):
        """Advance the clock, run the timers that are due, and deliver their messages."""
        self.now += seconds
        for rank in self.ranks:
            if rank.rank not in self.stopped:
                rank.timers.run_due(self.now)
        return self.exchange()

    def probe_and_wait(self, *askers):
        """Probe all operations of some ranks, and wait until just before the deadline."""
        for rank in askers:
            for operation in list(self.ranks[rank].operations.values()):
                self.ranks[rank].probes.begin(operation, LEFT)
        self.exchange()
        self.wait(0.6 * LEFT)
        self.wait(0.3 * LEFT)

    def findings(self, rank):
        """Return the findings of a rank for its only operation."""
        (operation,) = self.ranks[rank].operations.values()
        return self.ranks[rank].probes.findings(operation)


def ring(size):
    """Return a network in which each rank waits in one collective for the previous rank."""
    network = Network(size)
    for rank in network.ranks:
        rank.call("all_reduce", [(rank.rank - 1) % size])
    return network


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_all_ranks_of_a_ring_find_the_stopped_rank(size):
    network = ring(size)
    network.stopped = {1}
    network.probe_and_wait(*[rank for rank in range(size) if rank != 1])
    for rank in set(range(size)) - {1}:
        assert network.findings(rank) == (Finding(SILENT, 1),)


def test_ranks_without_a_deadline_of_their_own_pass_on_findings():
    network = ring(6)
    network.stopped = {1}
    network.probe_and_wait(0)
    assert network.findings(0) == (Finding(SILENT, 1),)


def test_rank_without_a_pending_call_is_found():
    network = ring(4)
    network.ranks[2].operations.clear()
    network.probe_and_wait(0, 1, 3)
    assert [network.findings(rank) for rank in (0, 1, 3)] == [(Finding(IDLE, 2),)] * 3


def test_all_ends_are_found_by_a_rank_that_waits_for_several():
    network = Network(5)
    network.ranks[0].call("gather", [1, 2, 3])
    network.ranks[3].call("gather", [4])
    network.stopped = {2}
    network.probe_and_wait(0)
    assert network.findings(0) == (Finding(IDLE, 1), Finding(SILENT, 2), Finding(IDLE, 4))


def test_rank_that_has_completed_the_collective_is_no_finding():
    network = Network(2)
    operation = network.ranks[0].call("broadcast", [1])
    network.ranks[1].complete.add(operation.key)
    network.probe_and_wait(0)
    assert network.findings(0) == ()


def test_ranks_that_wait_in_a_circle_stop_exchanging_messages():
    network = ring(7)
    network.probe_and_wait(*range(7))
    assert network.exchange() == 0
    assert all(network.findings(rank) == () for rank in range(7))


def test_answer_after_half_the_time_replaces_the_finding():
    network = ring(3)
    network.stopped = {1}
    network.ranks[2].probes.begin(next(iter(network.ranks[2].operations.values())), LEFT)
    delayed = list(network.queue)
    network.wait(0.6 * LEFT)
    assert network.findings(2) == (Finding(SILENT, 1),)
    network.stopped = set()
    network.queue.extend(delayed)
    network.exchange()
    assert network.findings(2) == ()


@pytest.mark.parametrize("message", ["recv", "send"])
def test_collective_and_message_that_wait_for_each_other_are_found_on_all_ranks(message):
    """Rank 1 waits in a message for rank 0, which waits behind ranks 3 and 2 in a collective for rank 1."""
    network = ring(4)
    network.ranks[1].operations.clear()
    network.ranks[1].call(message, [0], sequence=7, number=MESSAGES)
    network.probe_and_wait(0, 2, 3)
    for rank in range(4):
        (finding,) = network.findings(rank)
        assert finding[:3] == (MISMATCH, 1, 0)
        assert finding.text == f"rank 1 waits in {message} with tag 7 for rank 0, which waits in all_reduce #1"


def test_receive_from_any_rank_and_collective_wait_for_each_other():
    network = Network(2)
    network.ranks[0].call("all_reduce", [1])
    network.ranks[1].call("recv", [-1], number=MESSAGES)
    network.probe_and_wait(0)
    (finding,) = network.findings(0)
    assert finding.kind == MISMATCH


def test_message_of_a_rank_that_has_called_the_collective_is_no_mismatch():
    network = Network(2)
    network.ranks[0].call("all_reduce", [1])
    network.ranks[1].call("all_reduce", [0])
    receive = network.ranks[1].call("recv", [0], number=MESSAGES)
    network.ranks[1].probes.begin(receive, LEFT)
    network.exchange()
    assert network.ranks[1].probes.findings(receive) == ()


def test_message_of_another_group_is_no_mismatch():
    network = Network(2)
    network.ranks[0].call("all_reduce", [1])
    network.ranks[1].call("recv", [0], number=77).channel.sibling = None
    network.probe_and_wait(0)
    assert network.findings(0) == ()


def test_operation_that_makes_progress_forgets_the_ranks_that_it_waited_for():
    network = Network(3)
    operation = network.ranks[0].call("all_reduce", [1])
    network.probe_and_wait(0)
    assert network.findings(0) == (Finding(IDLE, 1),)
    operation.tasks[0].awaits = 2
    assert network.findings(0) == ()


def test_later_probe_of_the_same_operation_asks_again():
    network = Network(2)
    network.ranks[0].call("all_reduce", [1])
    network.probe_and_wait(0)
    network.ranks[1].call("all_reduce", [0])
    network.wait(10.0)
    network.probe_and_wait(0)
    assert network.findings(0) == ()


@pytest.mark.parametrize("body", [b"", b"\x00", b"\xc1", b"\x93\x01\x02\x03"])
def test_malformed_message_is_ignored(body):
    network = ring(2)
    network.ranks[0].receive(1, PROBE, pack_key(GROUP, 1, 0), body)
    network.ranks[0].receive(1, WAITING, pack_key(GROUP, 1, 0), body)
    network.exchange()
    assert network.findings(0) == ()


@pytest.mark.parametrize(
    ("found", "trouble", "peers", "says"),
    [
        ([], "", (1,), "timed out after 8 s, waiting for data from rank 1; check"),
        ([Finding(SILENT, 2)], "", (2,), "waiting for data from rank 1 (rank 2 does not answer); check"),
        (
            [Finding(IDLE, 3), Finding(SILENT, 2), Finding(IDLE, 4)],
            "",
            (2, 3, 4),
            "waiting for data from rank 1 (ranks 3-4 have no pending call, rank 2 does not answer); check",
        ),
        ([Finding(SILENT, 1)], "rank 0 has no connection", (1,), "from rank 1 (rank 0 has no connection); check ASYNC"),
    ],
)
def test_timeout_names_the_ranks_at_the_end_of_the_chain(found, trouble, peers, says):
    error = timeout_error(ring(2).ranks[0].call("all_reduce", [1]), found, trouble)
    assert isinstance(error, OperationTimeoutError)
    assert error.peers == peers
    assert says in str(error)


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (1, 0), (2, 1)])
def test_timeout_with_a_mismatch_is_a_mismatch_error(rank, peer):
    found = [
        Finding(SILENT, 3),
        Finding(MISMATCH, 1, 0, "rank 1 waits in recv for rank 0, which waits in all_reduce #1"),
    ]
    error = timeout_error(ring(4).ranks[rank].call("all_reduce", [3]), found, "")
    assert isinstance(error, MismatchError)
    assert error.peer == peer
    assert "rank 1 waits in recv for rank 0, which waits in all_reduce #1" in str(error)
