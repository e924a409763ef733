"""Threads that send large messages: what they send, when they exist, and everything that ends them early."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import GroupAbortedError, PeerLostError
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.faults import proxied_world
from asyncdist.transport.base import Outgoing
from asyncdist.transport.wire_format import HEADER_NBYTES, pack_key
from asyncdist_transports.byte_stream import Ended, Writer
from asyncdist_transports.tcp.sending_thread import LEAST_NBYTES, SendingThreads, ThreadedSend

ALWAYS = Config(send_threads=True)
COUNT = 3 * LEAST_NBYTES // 4


def sending():
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncdist-send")]


# -- in a world -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "lanes"), [(2, 1), (3, 1), (2, 3)])
async def test_collectives_whose_messages_threads_send(size, lanes, each):
    config = ALWAYS.with_(lanes=lanes, piece_nbytes=200_000)
    async with world_of(size, transport="tcp", config=config) as groups:
        for _ in range(2):
            tensors = [torch.arange(float(size * COUNT)) + group.rank() for group in groups]
            await each(groups, lambda group, tensors=tensors: group.all_reduce(tensors[group.rank()]))
            expected = size * torch.arange(float(size * COUNT)) + sum(range(size))
            assert all(tensor.equal(expected) for tensor in tensors)
            await each(groups, lambda group, tensors=tensors: group.broadcast(tensors[group.rank()], 1))
        assert sending()


def test_blocking_calls_whose_messages_threads_send(monkeypatch):
    monkeypatch.setenv("ASYNCDIST_SEND_THREADS", "1")

    def program(group):
        tensor = torch.full((2 * COUNT,), float(group.rank()))
        for _ in range(3):
            group.all_reduce(tensor, background=False).result()
        return tensor

    assert all(tensor.eq(4).all() for tensor in run_ranks(2, program, transport="tcp"))


async def test_messages_behind_the_one_that_a_thread_sends_keep_their_order():
    async with world_of(2, transport="tcp", config=ALWAYS) as (zero, one):
        sent = [torch.full((count,), float(number)) for number, count in enumerate((8 * COUNT, 5, COUNT, 1))]
        works = [zero.send(tensor, 1) for tensor in sent]
        received = [torch.empty_like(tensor) for tensor in sent]
        for tensor in received:
            await one.recv(tensor, 0)
        for work in works:
            await work
        assert all(map(torch.equal, received, sent))


@pytest.mark.parametrize(
    ("config", "count", "sends"),
    [(None, 2 * COUNT, False), (ALWAYS, LEAST_NBYTES // 8, False), (ALWAYS, 2 * COUNT, True)],
)
async def test_threads_send_large_messages_if_they_are_turned_on(config, count, sends):
    async with world_of(2, transport="tcp", config=config) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(count)) for group in groups))
        assert bool(sending()) is sends


async def test_abort_gives_the_memory_back_while_a_thread_sends(eventually):
    async with world_of(2, transport="tcp", config=ALWAYS) as (zero, one):
        work = zero.send(tensor := torch.ones(20 * COUNT), 1)
        await eventually(sending)
        zero.abort("on purpose")
        tensor.fill_(100.0)
        with pytest.raises(GroupAbortedError):
            await work
        # Both the message and the notice are on their way.
        received = torch.empty(20 * COUNT)
        with contextlib.suppress(GroupAbortedError):
            await one.recv(received, 0)
            assert received.eq(1).all()


def test_peer_that_vanishes_is_lost_to_a_rank_whose_thread_sends_to_it():
    with proxied_world(2, config=ALWAYS) as world:
        world.proxies[0, 1].cut_after(LEAST_NBYTES)
        works = [group.all_reduce(torch.ones(8 * COUNT)) for group in world.groups]
        for work in works:
            with pytest.raises(PeerLostError):
                work.wait()


def test_send_succeeds_if_the_peer_leaves_before_the_driver_knows_that_the_thread_has_sent_it(monkeypatch):
    monkeypatch.setenv("ASYNCDIST_SEND_THREADS", "1")
    run = ThreadedSend.run

    def run_silently(self):
        self._returned = lambda sender: None
        run(self)

    monkeypatch.setattr(ThreadedSend, "run", run_silently)

    def program(group):
        tensor = torch.full((COUNT,), float(group.rank()))
        (group.send(tensor, 0) if group.rank() else group.recv(tensor, 1)).wait()
        return tensor

    received, _ = run_ranks(2, program, transport="tcp")
    assert received.eq(1).all()


# -- one message ------------------------------------------------------------------------------------


class OneSend:
    """A message of which a thread has sent what fits into the connection, until the test reads from ``far``."""

    def __init__(self, nbytes=32 * LEAST_NBYTES):
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.body = bytearray(os.urandom(nbytes))
        self.message = Outgoing(1, pack_key(1, 2, 0), 7, memoryview(self.body), None)
        self.whole = self.message.header + bytes(self.body)
        self.queue = deque([self.message])
        self.writer = Writer(self.near, self.queue)
        self.posted = deque()
        self.ended = []
        host = SimpleNamespace(config=ALWAYS, post=self.posted.append)
        self.threads = SendingThreads(host)
        self.sender = self.threads.begin(self.writer, self.near, lambda sender: None, lambda: self.ended.append(True))

    def read(self, nbytes):
        """Read from the far end while the writer sends what is left."""
        received = bytearray()
        while len(received) < nbytes:
            if self.message.sender is None and self.queue:
                self.writer.flush()
            received += self.far.recv(1 << 20)
        return received

    def close(self):
        self.near.close()
        self.far.close()
        self.threads.close()


@pytest.fixture
def one_send():
    with contextlib.closing(OneSend()) as made:
        yield made


def test_thread_sends_the_message_and_the_driver_completes_it(one_send, until):
    assert one_send.read(len(one_send.whole)) == one_send.whole
    until(lambda: one_send.posted)
    assert not one_send.message.done
    one_send.posted.popleft()()
    assert one_send.ended == [True]
    assert one_send.writer.flush() is False
    assert one_send.message.done
    assert not one_send.queue


def test_abandoned_message_is_completed_from_a_copy_by_the_driver(one_send, until):
    until(lambda: one_send.message.sent > HEADER_NBYTES)
    one_send.message.abandon()
    sent = one_send.message.sent
    one_send.body[:] = bytes(len(one_send.body))
    assert one_send.message.sender is None
    assert one_send.read(len(one_send.whole)) == one_send.whole
    assert sent <= len(one_send.whole)
    assert not one_send.queue
    until(lambda: not one_send.posted)


def test_message_of_which_a_thread_has_sent_nothing_need_not_be_sent(until):
    sent = threading.Event()
    message = Outgoing(1, pack_key(1, 2, 0), 7, memoryview(bytearray(LEAST_NBYTES)), None)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        threads = SendingThreads(SimpleNamespace(config=ALWAYS, post=lambda action: sent.set()))
        assert threads.begin(Writer(near, deque([message])), near, lambda sender: None, lambda: None)
        message.abandon()
        threads.close()
        until(lambda: not sending())
    assert (message.sent, message.done, sent.is_set()) == (0, True, False)


def test_error_of_the_connection_returns_the_message_to_the_driver(one_send, until):
    one_send.far.close()
    until(lambda: one_send.posted)
    one_send.posted.popleft()()
    assert one_send.message.sender is None
    with pytest.raises(Ended):
        one_send.writer.flush()


@pytest.mark.parametrize(("nbytes", "pays"), [(LEAST_NBYTES // 2, True), (2 * LEAST_NBYTES, False)])
def test_driver_sends_messages_that_are_not_worth_a_thread(nbytes, pays):
    message = Outgoing(1, pack_key(1, 2, 0), 7, memoryview(bytearray(nbytes)), None)
    near, far = socket.socketpair()
    with near, far:
        threads = SendingThreads(SimpleNamespace(config=Config(send_threads=pays)))
        assert threads.begin(Writer(near, deque([message])), near, lambda sender: None, lambda: None) is None
    assert message.sender is None
    assert not sending()


def test_forked_child_does_not_wait_for_the_thread_of_its_parent(monkeypatch, one_send, until):
    until(lambda: one_send.message.sent > HEADER_NBYTES)
    held, release = threading.Event(), threading.Event()

    def send_some(message):
        held.set()
        release.wait()
        raise BlockingIOError

    monkeypatch.setattr(one_send.sender, "_writer", SimpleNamespace(send_some=send_some))
    held.wait()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        one_send.message.abandon()
    assert one_send.message.done
    release.set()
    one_send.sender.stop()
