"""Threads that send and receive large messages: what they move, when they exist, and everything that ends them early."""

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
from asyncdist.kernel.transport.base import MatchingQueue, Outgoing, Receive
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES, pack_header, pack_key
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist_transports.byte_stream import LENT_NBYTES, Ended, Reader, Writer
from asyncdist_transports.tcp.transfer_threads import Lender, TransferThreads
from tests.support.faults import proxied_world

ALWAYS = Config(tcp_threads="always")
NEVER = Config(tcp_threads="never")
COUNT = 3 * LENT_NBYTES // 4


def at_work():
    return [thread for thread in threading.enumerate() if thread.name.startswith("asyncdist-tcp")]


# -- in a world -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "lanes"), [(2, 1), (3, 1), (2, 3)])
async def test_collectives_whose_messages_threads_move(size, lanes, each):
    config = ALWAYS.with_(lanes=lanes, piece_nbytes=200_000)
    async with world_of(size, transport="tcp", config=config) as groups:
        for _ in range(2):
            tensors = [torch.arange(float(size * COUNT)) + group.rank() for group in groups]
            await each(groups, lambda group, tensors=tensors: group.all_reduce(tensors[group.rank()]))
            expected = size * torch.arange(float(size * COUNT)) + sum(range(size))
            assert all(tensor.equal(expected) for tensor in tensors)
            await each(groups, lambda group, tensors=tensors: group.broadcast(tensors[group.rank()], 1))
        assert at_work()


def test_blocking_calls_whose_messages_threads_move(monkeypatch):
    monkeypatch.setenv("ASYNCDIST_TCP_THREADS", "always")

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
    ("config", "compete", "count", "sends"),
    [
        pytest.param(NEVER, True, 2 * COUNT, False, id="turned off"),
        pytest.param(ALWAYS, False, LENT_NBYTES // 8, False, id="small messages"),
        pytest.param(ALWAYS, False, 2 * COUNT, True, id="turned on"),
        pytest.param(Config(), False, 2 * COUNT, False, id="no other programs"),
        pytest.param(Config(), True, 2 * COUNT, True, id="other programs compete"),
    ],
)
async def test_threads_move_large_messages_if_they_are_turned_on_or_other_programs_compete(
    config, compete, count, sends
):
    earlier = at_work()
    async with world_of(2, transport="tcp", config=config) as groups:
        for group in groups:
            group.endpoint.others_compete = lambda: compete
        await asyncio.gather(*(group.all_reduce(torch.ones(count)) for group in groups))
        assert bool(set(at_work()).difference(earlier)) is sends


async def test_abort_gives_the_memory_back_while_a_thread_sends(eventually):
    async with world_of(2, transport="tcp", config=ALWAYS) as (zero, one):
        work = zero.send(tensor := torch.ones(20 * COUNT), 1)
        await eventually(at_work)
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
        world.proxies[0, 1].cut_after(LENT_NBYTES)
        works = [group.all_reduce(torch.ones(8 * COUNT)) for group in world.groups]
        for work in works:
            with pytest.raises(PeerLostError):
                work.wait()


def test_send_succeeds_if_the_peer_leaves_before_the_driver_knows_that_the_thread_has_sent_it(monkeypatch):
    monkeypatch.setenv("ASYNCDIST_TCP_THREADS", "always")
    return_soon = Lender.return_soon

    def return_receives(self, turn, error):
        if isinstance(self.message, Receive):
            return_soon(self, turn, error)

    monkeypatch.setattr(Lender, "return_soon", return_receives)

    def program(group):
        tensor = torch.full((COUNT,), float(group.rank()))
        (group.send(tensor, 0) if group.rank() else group.recv(tensor, 1)).wait()
        return tensor

    received, _ = run_ranks(2, program, transport="tcp")
    assert received.eq(1).all()


# -- one message ------------------------------------------------------------------------------------


class OneSend:
    """A message of which a thread has sent what fits into the connection, until the test reads from ``far``."""

    def __init__(self, nbytes=32 * LENT_NBYTES):
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
        self.threads = TransferThreads(host)
        self.lender = Lender(self.threads, lambda: self.ended.append(True))
        assert self.lender.lends_send(self.writer, self.near)

    def read(self, nbytes):
        """Read from the far end while the writer sends what is left."""
        received = bytearray()
        while len(received) < nbytes:
            if self.message.transfer is None and self.queue:
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
    assert one_send.message.transfer is None
    assert one_send.read(len(one_send.whole)) == one_send.whole
    assert sent <= len(one_send.whole)
    assert not one_send.queue
    until(lambda: not one_send.posted)


def test_message_of_which_a_thread_has_sent_nothing_need_not_be_sent(until):
    sent = threading.Event()
    message = Outgoing(1, pack_key(1, 2, 0), 7, memoryview(bytearray(LENT_NBYTES)), None)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        threads = TransferThreads(SimpleNamespace(config=ALWAYS, post=lambda action: sent.set()))
        assert Lender(threads, lambda: None).lends_send(Writer(near, deque([message])), near)
        message.abandon()
        threads.close()
        until(lambda: not at_work())
    assert (message.sent, message.done, sent.is_set()) == (0, True, False)


def test_error_of_the_connection_returns_the_message_to_the_driver(one_send, until):
    one_send.far.close()
    until(lambda: one_send.posted)
    one_send.posted.popleft()()
    assert one_send.message.transfer is None
    with pytest.raises(Ended):
        one_send.writer.flush()


@pytest.mark.parametrize(("nbytes", "pays"), [(LENT_NBYTES // 2, True), (2 * LENT_NBYTES, False)])
def test_driver_sends_messages_that_are_not_worth_a_thread(nbytes, pays):
    message = Outgoing(1, pack_key(1, 2, 0), 7, memoryview(bytearray(nbytes)), None)
    earlier, (near, far) = at_work(), socket.socketpair()
    with near, far:
        threads = TransferThreads(SimpleNamespace(config=ALWAYS if pays else NEVER))
        assert not Lender(threads, lambda: None).lends_send(Writer(near, deque([message])), near)
    assert message.transfer is None
    assert not set(at_work()).difference(earlier)


def test_forked_child_does_not_wait_for_the_thread_of_its_parent(monkeypatch, one_send, until):
    until(lambda: one_send.message.sent > HEADER_NBYTES)
    held, release = threading.Event(), threading.Event()

    def move():
        held.set()
        release.wait()
        raise BlockingIOError

    monkeypatch.setattr(one_send.lender, "_move", move)
    held.wait()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        one_send.message.abandon()
    assert one_send.message.done
    release.set()
    one_send.lender.stop()


class OneReceive:
    """A message of which a thread has received the part that has been sent from ``far``."""

    def __init__(self, sent=8 * LENT_NBYTES, nbytes=16 * LENT_NBYTES, config=ALWAYS, piece=LENT_NBYTES):
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.posted, self.finished = deque(), []
        host = SimpleNamespace(config=config, post=self.posted.append, expects_anybody=False, unclaimed=lambda *_: None)
        self.inbox = MatchingQueue(1, host)
        self.reader = Reader(self.near, 1, host, self.inbox, self._lend)
        self.threads = TransferThreads(host)
        self.lender = Lender(self.threads, self.go_on)
        self.body = os.urandom(nbytes)
        self.receive = self.post(1, nbytes, piece)
        self.frame = pack_header(pack_key(1, 1, 0), 7, nbytes) + self.body
        self.rest = self.frame[sent:]
        self.sender = threading.Thread(target=self.far.sendall, args=(self.frame[:sent],))
        self.sender.start()
        while not self.lender.message and config is ALWAYS and not self.receive.done:
            self.reader.read()

    def post(self, number, nbytes, piece):
        owner = SimpleNamespace(transferred=lambda: self.finished.append(number))
        receive = Pieces(1, pack_key(1, number, 0), 7, memoryview(bytearray(piece)), owner)
        receive.nbytes = receive.left = nbytes
        self.inbox.post(receive)
        return receive

    def _lend(self):
        return self.lender.lends_receive(self.reader, self.near)

    def go_on(self):
        self.reader.read()

    def send(self, data):
        """Send after what is being sent."""
        self.sender.join()
        self.far.sendall(data)

    def close(self):
        self.lender.stop()
        self.near.close()
        self.sender.join()
        self.far.close()
        self.threads.close()


class Pieces(Receive):
    """Keeps piece after piece, as a reduction does, and the threads that have brought them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.content, self.left, self.by, self.fails = bytearray(), 0, set(), False

    def filled(self):
        if self.fails:
            raise MemoryError("on purpose")
        self.by.add(threading.current_thread().name.partition("_")[0])
        self.content += self.room
        self.left -= len(self.room)
        self.room = self.room[: self.left]
        return self.room or None


@pytest.fixture
def one_receive():
    with contextlib.closing(OneReceive()) as made:
        yield made


def test_thread_receives_and_reduces_the_message_and_the_driver_finishes_it(one_receive, until):
    assert one_receive.receive.transfer is one_receive.lender
    one_receive.send(one_receive.rest)
    until(lambda: one_receive.posted)
    assert not one_receive.finished
    one_receive.posted.popleft()()
    assert (one_receive.finished, one_receive.receive.transfer) == ([1], None)
    assert one_receive.receive.content == one_receive.body
    assert one_receive.receive.by == {"asyncdist-tcp"}


def test_message_behind_the_one_that_a_thread_receives_waits_for_its_own_receive(one_receive, until):
    one_receive.send(one_receive.rest + pack_header(pack_key(1, 2, 0), 7, 4) + b"next")
    until(lambda: one_receive.posted)
    one_receive.posted.popleft()()
    assert one_receive.finished == [1]
    assert not one_receive.inbox.aside
    following = one_receive.post(2, 4, 4)
    one_receive.reader.read()
    assert (one_receive.finished, bytes(following.content)) == ([1, 2], b"next")


def test_memory_of_an_abandoned_receive_is_not_touched_and_the_rest_is_dropped(one_receive, until):
    until(lambda: len(one_receive.receive.content) >= 7 * LENT_NBYTES)
    one_receive.receive.abandon()
    before = len(one_receive.receive.content)
    assert (one_receive.receive.transfer, one_receive.lender.message) == (None, None)
    following = one_receive.post(2, 4, 4)
    rest = one_receive.rest + pack_header(pack_key(1, 2, 0), 7, 4) + b"next"
    with_rest = threading.Thread(target=one_receive.send, args=(rest,))
    with_rest.start()

    def arrived():
        if one_receive.lender.message is None:
            one_receive.reader.read()
        while one_receive.posted:
            one_receive.posted.popleft()()
        return one_receive.finished

    until(arrived)
    with_rest.join()
    assert (one_receive.finished, bytes(following.content)) == ([2], b"next")
    assert len(one_receive.receive.content) == before


def test_receive_that_is_abandoned_after_its_last_byte_is_not_finished(one_receive, until):
    one_receive.send(one_receive.rest)
    until(lambda: one_receive.posted)
    one_receive.receive.abandon()
    one_receive.posted.popleft()()
    one_receive.send(pack_header(pack_key(1, 2, 0), 7, 4) + b"next")
    following = one_receive.post(2, 4, 4)
    while not one_receive.finished:
        one_receive.reader.read()
    assert (one_receive.finished, bytes(following.content)) == ([2], b"next")


def test_driver_finds_the_end_of_the_connection_that_a_thread_has_met(one_receive, until):
    one_receive.sender.join()
    one_receive.far.close()
    until(lambda: one_receive.posted)
    with pytest.raises(Ended, match="connection closed"):
        one_receive.posted.popleft()()
    assert not one_receive.finished


def test_error_of_a_reduction_in_a_thread_reaches_the_driver(one_receive, until):
    until(lambda: len(one_receive.receive.content) >= 7 * LENT_NBYTES)
    one_receive.receive.fails = True
    one_receive.send(one_receive.rest[:HEADER_NBYTES])
    until(lambda: one_receive.posted)
    with pytest.raises(MemoryError, match="on purpose"):
        one_receive.posted.popleft()()
    assert one_receive.lender.message is None


def test_driver_receives_without_threads():
    with contextlib.closing(OneReceive(config=NEVER)) as made:
        sender = threading.Thread(target=made.send, args=(made.rest,))
        sender.start()
        while not made.finished:
            made.reader.read()
        sender.join()
        assert made.receive.content == made.body
        assert made.receive.by == {"MainThread"}
