"""Small calls over links that run in the calling thread, and everything that turns them into operations."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.errors import GroupAbortedError, MismatchError, OperationTimeoutError
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES
from asyncdist.testing.cluster import run_ranks, world_of

COUNT = 5
BODY = 4 * COUNT
PATIENCE = 60.0
WHOLE = HEADER_NBYTES + BODY


@contextlib.asynccontextmanager
async def connected_pair():
    """Run two ranks over TCP whose links exist, and whose calls do not poll."""
    async with world_of(2, transport="tcp") as groups:
        for _ in range(2):
            await asyncio.gather(*(group.all_reduce(torch.ones(COUNT)) for group in groups))
        for group in groups:
            group.endpoint.progress.waiting.configure(0.0, 0.0)
        yield groups


@pytest.fixture
def issued(monkeypatch):
    """Return the ranks of the calls that have become operations."""
    ranks: list[int] = []
    issue = Endpoint.issue

    def noting(self, *arguments, **options):
        ranks.append(self.rank)
        return issue(self, *arguments, **options)

    monkeypatch.setattr(Endpoint, "issue", noting)
    return ranks


class ShortWrites:
    """Lets the next message leave only in part: its socket takes the first bytes, and no more until `release`."""

    def __init__(self, monkeypatch):
        self.allowed: int | None = None
        self._full: socket.socket | None = None
        self._send, self._sendmsg = socket.socket.send, socket.socket.sendmsg
        monkeypatch.setattr(socket.socket, "send", lambda sock, data: self.send(sock, (data,)))
        monkeypatch.setattr(socket.socket, "sendmsg", lambda sock, buffers: self.send(sock, buffers))

    def send(self, sock, buffers):
        nbytes, self.allowed = self.allowed, None
        if nbytes is not None:
            self._full = sock
            if nbytes:
                return self._send(sock, b"".join(buffers)[:nbytes])
        if sock is self._full:
            raise BlockingIOError
        return self._sendmsg(sock, buffers)

    def release(self):
        self._full = None


@pytest.fixture
def short_writes(monkeypatch):
    return ShortWrites(monkeypatch)


async def test_call_whose_message_has_arrived_makes_no_operation(issued):
    async with connected_pair() as (zero, one):
        first = one.all_reduce(torch.full((COUNT,), 2.0))
        issued.clear()
        second = zero.all_reduce(tensor := torch.ones(COUNT))
        assert second.is_completed()
        assert issued == []
        assert tensor.eq(3).all()
        assert (await first).eq(3).all()


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_NBYTES - 1, HEADER_NBYTES, HEADER_NBYTES + 1, WHOLE - 1])
async def test_message_that_leaves_in_part_is_completed(short_writes, issued, nbytes):
    """The peer reads the first bytes of the message in its own call."""
    async with connected_pair() as (zero, one):
        issued.clear()
        short_writes.allowed = nbytes
        first = one.all_reduce(torch.arange(float(COUNT)))
        second = zero.all_reduce(torch.ones(COUNT))
        assert issued == [1, 0]
        short_writes.release()
        for work in (first, second):
            assert (await work).tolist() == [1, 2, 3, 4, 5]
        both = await asyncio.gather(*(group.all_reduce(torch.ones(COUNT)) for group in (zero, one)))
        assert all(tensor.eq(2).all() for tensor in both)


async def test_unsent_rest_comes_from_a_copy(short_writes):
    """A message that a call has given to its link does not read memory that its group has given back."""
    async with connected_pair() as (zero, one):
        short_writes.allowed = HEADER_NBYTES + 1
        failed = one.broadcast(sent := torch.ones(COUNT), 1)
        one.abort("on purpose")
        sent.fill_(100.0)
        short_writes.release()
        # The data arrives before the notice.
        work = zero.broadcast(received := torch.zeros(COUNT), 1)
        outcomes = await asyncio.gather(failed, work, return_exceptions=True)
        assert isinstance(outcomes[0], GroupAbortedError)
        assert received.eq(1).all()


def overwritten_when_freed(value):
    """Return a tensor whose memory is overwritten as soon as nothing refers to it."""
    memory = np.full(COUNT, value, np.float32)
    array = memory[:]
    weakref.finalize(array, memory.fill, 100.0)
    return torch.from_numpy(array)


async def test_unsent_rest_of_an_operation_is_copied_before_its_memory_is_freed(short_writes, issued):
    """When the group fails, nothing but the schedule of the call refers to the tensor that it sends."""
    async with connected_pair() as (zero, one):
        issued.clear()
        failed = [one.all_reduce(torch.ones(COUNT))]
        short_writes.allowed = HEADER_NBYTES + 1
        failed.append(one.gather(overwritten_when_freed(1.0), None, 0))
        assert issued == [1, 1]
        one.abort("on purpose")
        short_writes.release()
        # The data arrives before the notice.
        works = [
            zero.all_reduce(torch.ones(COUNT)),
            zero.gather(torch.ones(COUNT), out := list(torch.zeros(2, COUNT)), 0),
        ]
        await asyncio.gather(*failed, *works, return_exceptions=True)
        assert out[1].eq(1).all()


async def test_part_of_a_message_is_put_back_when_its_group_fails(short_writes, monkeypatch):
    """The group fails between the attempt of a call, which has read a part of a message, and its operation."""
    async with connected_pair() as (zero, one):
        source, issue, taken = zero.endpoint.inbox(1).source, Endpoint.issue, []

        def failing(self, channel, *arguments, **options):
            if self.rank == 0:
                taken.append(source.taken)
                with self.progress.turns.lock:
                    self.failures.fail(channel, GroupAbortedError("on purpose", peer=0))
                taken.append(source.taken)
            return issue(self, channel, *arguments, **options)

        monkeypatch.setattr(Endpoint, "issue", failing)
        short_writes.allowed = HEADER_NBYTES + 1
        works = [group.broadcast(torch.ones(COUNT), 1) for group in (one, zero)]
        assert taken == [HEADER_NBYTES + 1, 0]
        short_writes.release()
        errors = await asyncio.gather(*works, return_exceptions=True)
        assert [type(error) for error in errors] == [GroupAbortedError] * 2


async def test_messages_of_later_calls_do_not_disturb(issued):
    async with connected_pair() as (zero, one):
        works = [one.all_reduce(torch.full((count,), 1.0)) for count in (COUNT, 1, COUNT)]
        issued.clear()
        works += [zero.all_reduce(torch.full((count,), 2.0)) for count in (COUNT, 1, COUNT)]
        for work in works:
            assert (await work).eq(3).all()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_blocking_calls_make_no_operations_while_a_message_is_expected(issued, transport):
    def program(group):
        peer = 1 - group.rank()
        for _ in range(2):
            group.all_reduce(torch.ones(COUNT), background=False)
        expected = [group.recv(torch.zeros(1), peer, tag=1), group.recv(torch.zeros(1), tag=2)]
        group.barrier(background=False)
        few, values = torch.zeros(1), []
        # A thread that takes the lock, or a peer that gets no core, ends the attempt of a call: a busy machine tries again.
        while not few and len(values) < 1000:
            before = len(issued)
            values += [group.all_reduce(torch.ones(COUNT), background=False).result()[0].item() for _ in range(50)]
            few[0] = len(issued) - before < 25
            group.all_reduce(few, ReduceOp.MIN, background=False)
        for tag in (1, 2):
            group.send(torch.ones(1), peer, tag=tag, background=False)
        return bool(few), set(values) == {2}, [work.wait(PATIENCE) for work in expected]

    assert run_ranks(2, program, transport=transport) == [(True, True, [True, True])] * 2


@pytest.mark.parametrize(
    ("nbytes", "is_expected"),
    [(0, True), (BODY, True), (300, True), (1 << 20, True), (0, False), (BODY, False), (300, False)],
)
async def test_message_of_another_kind_may_arrive_before_that_of_a_call(nbytes, is_expected):
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    async with connected_pair() as (zero, one):
        expected = zero.recv(tensor, 1, tag=3) if is_expected else None
        sent = one.send(torch.full((nbytes,), 7, dtype=torch.uint8), 0, tag=3)
        for work in [one.all_reduce(torch.ones(COUNT)), zero.all_reduce(torch.ones(COUNT))]:
            assert (await work).eq(2).all()
        assert await (expected or zero.recv(tensor, 1, tag=3)) == 1
        await sent
        assert tensor.eq(7).all()


async def test_message_of_another_group_may_arrive_first():
    async with world_of(2, transport="tcp") as groups:
        others = [group._sibling("other") for group in groups]
        for pair in (groups, others):
            await asyncio.gather(*(group.all_reduce(torch.ones(COUNT)) for group in pair))
        works = [others[1].all_reduce(torch.ones(COUNT)), groups[1].all_reduce(torch.full((COUNT,), 2.0))]
        works += [groups[0].all_reduce(torch.full((COUNT,), 2.0)), others[0].all_reduce(torch.ones(COUNT))]
        values = [(await work)[0].item() for work in works]
        assert values == [2, 4, 4, 2]
        for group in others:
            group.close()


async def test_different_calls_are_reported_on_both_ranks():
    async with connected_pair() as (zero, one):
        works = [one.all_reduce(torch.ones(COUNT)), zero.all_reduce(torch.ones(COUNT), ReduceOp.MAX)]
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, MismatchError)


async def test_notice_in_place_of_the_message_fails_the_call():
    async with connected_pair() as (zero, one):
        one.abort("on purpose")
        with pytest.raises(GroupAbortedError, match="on purpose"):
            await zero.all_reduce(torch.ones(COUNT))


async def test_deadline_ends_a_call_whose_peer_stays_away():
    async with connected_pair() as (zero, _):
        with pytest.raises(OperationTimeoutError):
            await zero.all_reduce(torch.ones(COUNT), timeout=0.05)


async def test_calls_of_one_signature_may_overlap():
    """Only one of them uses the recorded steps."""
    async with connected_pair() as (zero, one):
        works = [group.all_reduce(torch.full((COUNT,), value)) for group in (zero, one) for value in (1.0, 2.0, 3.0)]
        values = [(await work)[0].item() for work in works]
        assert values == [2, 4, 6] * 2


async def test_average_of_recorded_steps_is_divided():
    async with connected_pair() as pair:
        for _ in range(3):
            works = [group.all_reduce(torch.full((COUNT,), 1.0 + group.rank()), ReduceOp.AVG) for group in pair]
            for work in works:
                assert (await work).eq(1.5).all()


@pytest.mark.parametrize("fails", [False, True])
async def test_recorded_steps_keep_no_tensor_alive(fails):
    async with connected_pair() as (zero, one):
        tensors = [torch.ones(COUNT), torch.ones(COUNT)]
        works = [one.all_reduce(tensors[1])]
        if fails:
            zero.abort("on purpose")
        works.append(zero.all_reduce(tensors[0]))
        for work in works:
            with contextlib.suppress(GroupAbortedError):
                await work
        del work
        alive = [weakref.ref(tensor) for tensor in tensors]
        tensors.clear()
        works.clear()
        gc.collect()
        assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("where", ["send", "recv_into"])
def test_interrupt_reaches_the_caller_and_fails_the_group(monkeypatch, where):
    """The stream is cut at an unknown byte, so the peer learns of it from the end of its connection."""
    original = getattr(socket.socket, where)
    interrupted = threading.Event()

    def interrupt(sock, *arguments):
        if threading.current_thread().name == "rank 0" and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return original(sock, *arguments)

    ready = threading.Barrier(2)

    def program(group):
        for _ in range(2):
            group.all_reduce(torch.ones(COUNT), background=False).result()
        if ready.wait() == 0:
            monkeypatch.setattr(socket.socket, where, interrupt)
        ready.wait()
        try:
            for _ in range(2):
                group.all_reduce(torch.ones(COUNT), background=False).result()
        except BaseException as error:
            return type(error).__name__, group.error is not None
        return "", False

    zero, one = run_ranks(2, program, transport="tcp")
    assert zero == ("KeyboardInterrupt", True)
    assert one[0] in ("PeerLostError", "GroupAbortedError")


def test_thread_that_needs_the_lock_ends_the_attempt():
    """Rank 0 waits in a call; another of its threads exchanges a message with rank 1, which calls only afterwards."""
    exchanged = threading.Event()

    def program(group):
        group.all_reduce(torch.ones(COUNT), background=False).result()
        group.endpoint.progress.waiting.configure(20.0, 0.0)
        if group.rank() == 1:
            group.recv(tensor := torch.zeros(1), 0, background=False).result()
            exchanged.set()
            assert tensor.item() == 7
            return group.all_reduce(torch.ones(COUNT), background=False).result()[0].item()
        sender = threading.Thread(target=lambda: group.send(torch.full((1,), 7.0), 1).wait())
        calling = group.all_reduce(torch.ones(COUNT))
        sender.start()
        calling.wait()
        sender.join()
        assert exchanged.is_set()
        return calling.result()[0].item()

    assert run_ranks(2, program, transport="tcp") == [2.0, 2.0]


def poll_without_end(progress):
    """Let the rank poll for its peers, also where other processes compete for its core."""
    progress.waiting.configure(20.0, 0.0)
    progress.waiting.look_at = math.inf


LARGE = 1 << 18
"""Elements of a call whose messages do not arrive at once."""


def test_long_messages_need_no_operation(issued):
    """Each rank reads the messages of the other one while they arrive."""

    def program(group):
        for _ in range(3):
            group.all_reduce(torch.ones(COUNT), background=False).result()
        poll_without_end(group.endpoint.progress)
        tensors = [torch.arange(float(LARGE)) + group.rank() for _ in range(10)]
        for tensor in tensors:
            group.all_reduce(tensor, background=False).result()
        return all(tensor.equal(2 * torch.arange(float(LARGE)) + 1) for tensor in tensors)

    assert run_ranks(2, program, transport="tcp") == [True, True]
    assert len(issued) < 20


@pytest.mark.parametrize("nbytes", [HEADER_NBYTES + 1, 100_000])
def test_operation_continues_after_a_part_of_a_long_message(short_writes, issued, nbytes):
    """The attempt of rank 0 ends while the message of rank 1 has arrived in part."""
    ready, has_begun, has_read = threading.Barrier(2), threading.Event(), threading.Event()

    def program(group):
        for _ in range(3):
            group.all_reduce(torch.ones(COUNT), background=False).result()
        progress = group.endpoint.progress
        poll_without_end(progress)
        tensor = torch.arange(float(LARGE)) + group.rank()
        ready.wait()
        if group.rank() == 1:
            short_writes.allowed = nbytes
            work = group.all_reduce(tensor)
            has_begun.set()
            has_read.wait()
            short_writes.release()
            return work.wait() and bool(tensor.equal(2 * torch.arange(float(LARGE)) + 1))
        has_begun.wait()  # only the message of rank 1 is cut
        # Another thread that needs the lock ends the attempt.
        source = group.endpoint.inbox(1).source
        watching = threading.Thread(target=end_attempt, args=(progress, source, nbytes, has_read))
        watching.start()
        group.all_reduce(tensor, background=False).result()
        watching.join()
        return bool(tensor.equal(2 * torch.arange(float(LARGE)) + 1))

    def end_attempt(progress, source, nbytes, has_read):
        while source.taken < nbytes and 0 not in issued:
            time.sleep(0.001)
        progress.submit(lambda: None)
        has_read.set()

    assert run_ranks(2, program, transport="tcp") == [True, True]
    assert 0 in issued
