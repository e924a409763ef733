"""A client of torch's TCPStore, at the server: translates its requests for the state machine.

Requests of torch's format have no ids, so the session numbers those that block. Their replies are sent when they are due,
possibly after those of later requests, as torch's server does. A failed request without a reply in the format (a value
that is too long, ``add`` to a value that is not an integer) ends the connection, and the log says why. It does not import
the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from asyncdist.config import Config
from asyncdist.errors import ProtocolError
from asyncdist.store.protocol import c10d
from asyncdist.store.protocol.c10d import I64, U32, U64, Answer, Code, Decoder, Request, vector
from asyncdist.store.protocol.operations import Reply
from asyncdist.store.server.connection import BATCH_NBYTES, ConnectionContext, ServerConnection
from asyncdist.store.server.fast_path import EpollFastPath
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import NO_REPLY, RequestRefused

_NOTHING: Final = vector(b"")


class C10dContext(ConnectionContext, Protocol):
    """What a session of torch's protocol needs of its server."""

    config: Config
    state: StoreState
    fast_path: EpollFastPath
    num_requests: int

    def deliver(self, replies: list[Reply], asking: ServerConnection | None) -> None:
        """Put replies into the connections that they are for."""


class C10dSession(ServerConnection):
    """One client that speaks torch's format."""

    __slots__ = ("_decoder", "_last", "_state", "_todo", "_waiting")

    _server: C10dContext

    def __init__(self, server: C10dContext, transport: asyncio.Transport, peer: str) -> None:
        super().__init__(server, server.fast_path.take(transport, self.hear), peer)
        self._state = server.state
        self._decoder = Decoder(server.config.store_max_value_nbytes, server.limit)
        self._todo: list[Request] = []
        self._waiting: set[int] = set()
        self._last = 0

    def hear(self, data: bytes) -> bool:
        """Take data that was not answered at once; return whether the next request may be."""
        self.take(data)
        return not (self.unfinished or self.paused) and self._server.durability is None

    def receive(self, data: bytes) -> None:
        try:
            self._decoder.decode(data, self._todo)
        finally:  # requests before a malformed one are executed
            self._work()

    def _work(self) -> None:
        """Execute what has been read, as long as the client takes the replies."""
        server, requests, todo = self._server, self._state.requests, self._todo
        done = 0
        try:
            for request in todo:
                if self.paused or self._transport is None:
                    break
                done += 1
                reply = ANSWERS[request[0]](self, request)
                if reply is not None:
                    self.put(reply)
                if requests.due:
                    server.deliver(requests.collect(), self)
                if self._out_nbytes >= BATCH_NBYTES:
                    self.flush()
        except RequestRefused as refused:
            raise ProtocolError(refused.text) from None
        finally:
            del todo[:done]
            server.num_requests += done
            self.flush()
        if todo and self._transport is not None:
            self._transport.pause_reading()

    def answer(self, reply: Reply) -> None:
        # The same byte releases a wait and a barrier.
        self._waiting.discard(reply.request)
        self.put(c10d.STOP_WAITING)

    def refuse(self, why: str) -> None:
        self._todo.clear()
        super().refuse(why)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()  # also at the fast path
        super().connection_lost(exc)

    @property
    def unfinished(self) -> bool:
        return self._decoder.pending or bool(self._todo)

    # -- requests: each returns its reply; None if it has none, or waits ---------------------------

    def _validate(self, request: Request) -> None:
        if request[1] != c10d.MAGIC:
            raise ProtocolError(f"a client of torch's TCPStore with another magic number: {request[1]:#x}")

    def _ping(self, request: Request) -> bytes:
        return U32.pack(request[1])

    def _set(self, request: Request) -> None:
        self._state.keys.set(request[1], request[2])

    def _multi_set(self, request: Request) -> None:
        self._state.keys.multi_set(request[1], request[2])

    def _append(self, request: Request) -> None:
        self._state.keys.append(request[1], request[2])

    def _add(self, request: Request) -> bytes:
        return I64.pack(self._state.keys.add(request[1], request[2]))

    def _compare_set(self, request: Request) -> bytes:
        return vector(self._state.keys.compare_set(*request[1:]))

    def _get(self, request: Request) -> bytes:
        value = self._state.keys.peek(request[1])
        return _NOTHING if value is None else U64.pack(len(value)) + value

    def _multi_get(self, request: Request) -> bytes:
        values = [self._state.keys.peek(key) or b"" for key in request[1]]
        # The size is checked before the reply is built: a request may repeat one key many times.
        if sum(map(len, values)) > self._server.limit:
            raise ProtocolError(f"a multi_get of more than the store's {self._server.limit} bytes: ask for fewer keys")
        return c10d.vectors(values)

    def _delete_key(self, request: Request) -> bytes:
        return I64.pack(self._state.keys.delete(request[1]))

    def _check(self, request: Request) -> bytes:
        return c10d.READY if self._state.check(request[1]) else c10d.NOT_READY

    def _num_keys(self, request: Request) -> bytes:
        return I64.pack(len(self._state.keys))

    def _list_keys(self, request: Request) -> bytes:
        keys = [c10d.raw_key(key) for key in self._state.keys.list_keys("")]
        return U64.pack(len(keys)) + c10d.vectors(keys)

    def _queue_push(self, request: Request) -> None:
        self._state.queues.push(request[1], request[2])

    def _queue_pop(self, request: Request) -> bytes:
        length, item = self._state.queues.take(self, request[1])
        return I64.pack(length) + vector(item) if length else I64.pack(0)

    def _queue_len(self, request: Request) -> bytes:
        return I64.pack(self._state.queues.length(request[1]))

    # -- requests that wait -----------------------------------------------------------------------

    def _wait(self, request: Request) -> bytes | None:
        if self._state.check(request[1]):
            return c10d.STOP_WAITING
        number = self._last = self._last + 1
        self._state.wait((self, number), request[1])
        self._waiting.add(number)
        return None

    def _barrier(self, request: Request) -> bytes | None:
        number = self._last = self._last + 1
        if self._state.barriers.join((self, number), request[1], request[2]) is not NO_REPLY:
            return c10d.STOP_WAITING
        self._waiting.add(number)  # the last one to arrive has its answer already
        return None

    def _cancel_wait(self, request: Request) -> bytes:
        """Cancel all blocked requests; wake-ups for queue items pass to other clients."""
        waiting, self._waiting = self._waiting, set()
        for number in waiting:
            self._state.requests.withdraw((self, number))
        self._state.queues.release_wakeups(self)
        return c10d.WAIT_CANCELED


ANSWERS: Final[dict[int, Callable[[C10dSession, Request], bytes | None]]] = {
    Code.VALIDATE: C10dSession._validate,
    Code.SET: C10dSession._set,
    Code.COMPARE_SET: C10dSession._compare_set,
    Code.GET: C10dSession._get,
    Code.ADD: C10dSession._add,
    Code.CHECK: C10dSession._check,
    Code.WAIT: C10dSession._wait,
    Code.GETNUMKEYS: C10dSession._num_keys,
    Code.DELETE_KEY: C10dSession._delete_key,
    Code.APPEND: C10dSession._append,
    Code.MULTI_GET: C10dSession._multi_get,
    Code.MULTI_SET: C10dSession._multi_set,
    Code.CANCEL_WAIT: C10dSession._cancel_wait,
    Code.PING: C10dSession._ping,
    Code.QUEUE_PUSH: C10dSession._queue_push,
    Code.QUEUE_POP: C10dSession._queue_pop,
    Code.QUEUE_LEN: C10dSession._queue_len,
    Code.LIST_KEYS: C10dSession._list_keys,
    Code.BARRIER: C10dSession._barrier,
}


# -- cached replies to short requests that were seen before, without a session -----------------------


def at_once(state: StoreState) -> dict[int, Callable[..., Answer]]:
    """Return by code a function of a request's arguments that returns the function that answers this request.

    If that returns None or raises, it has had no effect, and the session executes the request.
    """
    peek, increase, pack = state.keys.peek, state.keys.add, I64.pack

    def get(key: str) -> Answer:
        def answer() -> bytes | None:
            value = peek(key)
            return None if value is None else U64.pack(len(value)) + value

        return answer

    def add(key: str, amount: int) -> Answer:
        return lambda: pack(increase(key, amount))

    def wait(keys: list[str]) -> Answer:
        (key,) = keys
        return lambda: None if peek(key) is None else c10d.STOP_WAITING

    def check(keys: list[str]) -> Answer:
        return lambda: c10d.READY if state.check(keys) else c10d.NOT_READY

    return {Code.GET: get, Code.ADD: add, Code.WAIT: wait, Code.CHECK: check}
