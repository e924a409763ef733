"""Interrupts at any moment of a blocking call leave a store that this thread and others can use."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import itertools
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import StoreConnectionError, UsageError
from asyncdist.net.connection import inbox, outbox, part_sender
from asyncdist.store import AsyncStore, FileStore, HashStore, TCPStore
from asyncdist.store.client import blocking, blocking_socket, link, pending
from asyncdist.store.protocol import client_protocol, long_messages
from asyncdist.store.protocol.long_messages import LONG_NBYTES
from asyncdist.store.state.machine import StoreState
from tests.conftest import LOOPS
from tests.support.stores import TOKEN

LONG, CONFIG = 10.0, Config(token=TOKEN)
FILES = {module.__file__ for module in (pending, blocking, blocking_socket, outbox)}
AWAITED = {module.__file__ for module in (link, client_protocol, inbox, long_messages, outbox, part_sender)}


@cache
def places(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions before which the interpreter checks for signals: those after calls."""
    instructions = list(dis.get_instructions(code))
    return frozenset(after.offset for call, after in itertools.pairwise(instructions) if call.opname.startswith("CALL"))


class Interrupt:
    """Raises KeyboardInterrupt in this thread at the ``place``-th moment at which the interpreter checks for signals."""

    def __init__(self, place: int, files: Collection[str | None] = FILES) -> None:
        self._left, self._files = place, files
        self._returned = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        self._returned = True  # if the function is not traced, its return raises no event
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if not self._is_callback(frame):
            self._pass(frame)
        return self._traced

    def _is_callback(self, frame: FrameType) -> bool:
        return False

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            if not self._returned and frame.f_lasti in places(frame.f_code):
                self._pass(frame)
            self._returned = False
        elif event == "return":
            self._returned = True
        return self._traced

    def _pass(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def pop(store: TCPStore, master: TCPStore) -> None:
    assert store.queue_pop("q", block=False) == b"item"


def set_a_long_value(store: TCPStore, master: TCPStore) -> None:
    store.set("long", bytes(300_000))


def get_a_later_value(store: TCPStore, master: TCPStore) -> None:
    store.delete_key("later")
    later = threading.Timer(0.002, master.set, ("later", "v"))
    later.start()
    try:
        assert store.get("later", timeout=LONG) == b"v"
    finally:
        later.join()


def get_over_another_connection(store: TCPStore, master: TCPStore) -> None:
    store.connection.sock.wake()
    store.set("k", b"v")
    assert store.get("k", timeout=LONG) == b"v"


CALLS = pytest.mark.parametrize("call", [pop, set_a_long_value, get_a_later_value, get_over_another_connection])


@CALLS
def test_store_works_after_an_interrupt_at_any_moment(call: Callable[[TCPStore, TCPStore], None], master):
    with ThreadPoolExecutor(1) as other_thread:
        assert master.server is not None
        server = master.server.server
        for place in itertools.count(1):
            master.queue_push("q", b"item")
            store = TCPStore("127.0.0.1", master.port, timeout=LONG, config=CONFIG)
            over = False
            with contextlib.suppress(KeyboardInterrupt), Interrupt(place):
                call(store, master)
                over = True
            try:
                assert other_thread.submit(store.add, "n", 1).result(LONG) > 0
                assert not store.connection.protocol.open_requests()
                assert server.state.num_open == 0  # the server holds no item for the interrupted call
            finally:
                other_thread.submit(store.close).result(LONG)
            if over:
                break
        assert place > 30


class Contended:
    """A lock whose ``place``-th acquisition by this thread is interrupted by a signal."""

    def __init__(self, lock: threading.Lock, place: int) -> None:
        self._lock, self._left, self._thread = lock, place, threading.get_ident()

    def __enter__(self) -> None:
        if threading.get_ident() == self._thread:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


@CALLS
def test_store_works_after_an_interrupt_during_the_wait_for_a_lock(call, monkeypatch, master):
    with ThreadPoolExecutor(1) as other_thread:
        for place in itertools.count(1):
            master.queue_push("q", b"item")
            with TCPStore("127.0.0.1", master.port, timeout=LONG, config=CONFIG) as store:
                over = False
                with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                    patch.setattr(store.connection, "lock", Contended(store.connection.lock, place))
                    call(store, master)
                    over = True
                assert other_thread.submit(store.add, "n", 1).result(LONG) > 0
                assert not store.connection.protocol.open_requests()
            if over:
                break
        assert place > 3


def test_call_of_a_signal_handler_during_a_send_is_refused(monkeypatch, master):
    store, connection = master, master.connection

    def interrupted(deadline: Deadline, pending: object) -> None:
        monkeypatch.undo()
        connection.sock.send(b"\0\0\0", deadline)
        store.set("k", "these bytes would be in the middle of another request")

    monkeypatch.setattr(connection.sock, "drain", interrupted)
    with pytest.raises(UsageError, match="signal handler"):
        store.set("k", "v")
    store.set("l", "w")
    assert store.list_keys() == ["l"]


def test_signal_handler_may_not_close_a_stream_during_a_call(monkeypatch):
    """The interrupted call holds the lock; the stream can be closed later."""
    execute = StoreState.execute

    def interrupted(*arguments):
        monkeypatch.undo()
        with pytest.raises(UsageError, match="signal handler"):
            stream.close()
        return execute(*arguments)

    with HashStore() as store, store.subscribe("news") as stream:
        monkeypatch.setattr(StoreState, "execute", interrupted)
        store.set("k", "v")
        assert store.publish("news", b"") == 1
        stream.close()
        assert store.publish("news", b"") == 0


@pytest.mark.parametrize("kind", [HashStore, FileStore])
def test_call_of_a_signal_handler_is_refused_by_stores_without_a_server(kind, monkeypatch, tmp_path):
    """The interrupted call holds a lock that the handler would wait for."""
    execute = StoreState.execute

    def interrupted(*arguments):
        monkeypatch.undo()
        for call in (lambda: store.set("k", "other"), store.close):
            with pytest.raises(UsageError, match="signal handler"):
                call()
        return execute(*arguments)

    with kind(*([tmp_path / "store"] if kind is FileStore else [])) as store:
        monkeypatch.setattr(StoreState, "execute", interrupted)
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_call_of_a_signal_handler_during_a_wait_is_refused(monkeypatch, master, other):
    """The handler would wait for an answer that only the interrupted call can read."""
    with master.subscribe("news") as news:

        def interrupts(connection: blocking.BlockingConnection, call: Callable[[], object]) -> None:
            wait = connection.sock.wait

            def interrupted(deadline: Deadline) -> None:
                patch.undo()
                with pytest.raises(UsageError, match="signal handler"):
                    call()
                master.set("k", "v") if connection is other.connection else master.publish("news", "v")
                wait(deadline)

            patch.setattr(connection.sock, "wait", interrupted)

        with monkeypatch.context() as patch:
            interrupts(other.connection, lambda: other.set("another", ""))
            assert other.get("k") == b"v"
        with monkeypatch.context() as patch:
            interrupts(news.client, news.get)
            assert news.get(LONG) == b"v"
        assert other.list_keys() == ["k"]


@pytest.mark.parametrize(("holder", "method"), [("protocol", "ask"), ("protocol", "receive"), ("sock", "drain")])
def test_signal_handler_may_close_the_store_during_a_call(holder, method, monkeypatch, other):
    store, closed = other, threading.Event()
    interrupted = getattr(getattr(store.connection, holder), method)

    def closes(*arguments: object) -> object:
        if not closed.is_set():
            closed.set()
            store.close()
        return interrupted(*arguments)

    def call() -> None:
        with contextlib.suppress(StoreConnectionError):
            while True:
                store.set("k", "v")

    monkeypatch.setattr(getattr(store.connection, holder), method, closes)
    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(LONG)
    assert not calling.is_alive()


def test_interrupted_close_can_be_repeated(monkeypatch, other):
    store = other
    with monkeypatch.context() as patch:
        patch.setattr(store.connection, "lock", Contended(store.connection.lock, 1))
        with pytest.raises(KeyboardInterrupt):
            store.close()
    store.close()
    with pytest.raises(StoreConnectionError, match="closed by this process"):
        store.get("k")


# -- the awaited client -------------------------------------------------------------------------------


async def results(adding, asked):
    """Wait for all; return the results of the first ones."""
    return (await asyncio.gather(*adding, *asked))[: len(adding)]


class LoopInterrupt(Interrupt):
    """Like `Interrupt`, but not before the first instruction of a callback: that is still code of the loop."""

    def _is_callback(self, frame: FrameType) -> bool:
        return frame.f_back is None or frame.f_back.f_code.co_filename not in AWAITED


@pytest.mark.parametrize("nbytes", [10, 3 * LONG_NBYTES])
@pytest.mark.parametrize("new_loop", list(LOOPS.values()), ids=list(LOOPS))
def test_loop_that_runs_on_after_an_interrupt_has_lost_no_request(master, new_loop, nbytes):
    """As in a notebook: the interrupt ends one cell, and the next one runs the same loop."""
    value = bytes(nbytes)
    for place in itertools.count(1):
        loop, asked, adding, over = new_loop(), [], [], False
        store = loop.run_until_complete(AsyncStore.connect("127.0.0.1", master.port, timeout=LONG, config=CONFIG))
        before = master.add("n", 0)

        async def work(store=store, asked=asked, adding=adding):
            for _ in range(3):
                adding.append(store.add("n", 1))
            asked.append(store.set("k", value))
            asked.append(store.get("k"))
            await asyncio.wait(adding + asked)

        try:
            with contextlib.suppress(KeyboardInterrupt), LoopInterrupt(place, AWAITED):
                loop.run_until_complete(work())
                over = True
            sums = loop.run_until_complete(results(adding, asked))
            assert len(set(sums)) == len(sums)
            assert loop.run_until_complete(store.add("n", 0)) <= before + 3
            loop.run_until_complete(store.close())
        finally:
            loop.close()
        if over:
            break
    assert place > 30
