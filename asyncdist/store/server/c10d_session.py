"""A client of torch's TCPStore, at the server: translates its requests for the state machine.

Requests of torch's format have no ids, so the session numbers those that block. Their replies are sent when they are due,
possibly after those of later requests, as torch's server does. A failed request without a reply in the format (a value
that is too long, ``add`` to a value that is not an integer) ends the connection, and the log says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from asyncdist.errors import ProtocolError
from asyncdist.net.host_watch import tune_strict
from asyncdist.store.protocol import c10d
from asyncdist.store.protocol.c10d import I64, U32, U64, Answer, Code, Decoder, Request, vector
from asyncdist.store.protocol.operations import Reply
from asyncdist.store.server.connection import BATCH_NBYTES, Handler, ServerConnection, ServerContext
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import NO_REPLY, Place, RequestRefused


class C10dSession(ServerConnection):
    """One client that speaks torch's format."""

    __slots__ = ("_decoder", "_last_request", "_state", "_todo")

    def __init__(self, server: ServerContext, transport: asyncio.Transport, peer: str) -> None:
        super().__init__(server, server.fast_path.take(transport, self.hear), peer)
        tune_strict(transport.get_extra_info("socket"))
        self._state = server.state
        self._decoder = Decoder(server.config.store_max_value_nbytes, server.limit)
        self._todo: list[Request] = []
        self._last_request = 0

    def hear(self, data: bytes) -> bool:
        """Execute the requests in data that the fast path did not answer; return whether it may answer the next one."""
        self.take(data)
        return not (self.unfinished or self.paused) and self._server.durability is None

    def receive(self, data: bytes) -> None:
        try:
            self._decoder.decode(data, self._todo)
        finally:  # requests before a malformed one are executed
            self._work()

    def _work(self) -> None:
        server, requests, todo = self._server, self._state.requests, self._todo
        handlers = server.c10d_handlers
        done = 0
        try:
            for code, *arguments in todo:
                if self.paused or self._transport is None:
                    break
                done += 1
                handler = handlers.get(code)
                reply = handler(*arguments) if handler is not None else _OF_SESSION[code](self, *arguments)
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
        self.put(c10d.STOP_WAITING)  # it releases a wait and a barrier

    def refuse(self, why: str) -> None:
        self._todo.clear()
        super().refuse(why)

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort()  # also at the fast path
        super().connection_lost(exc)

    @property
    def unfinished(self) -> bool:
        return self._decoder.pending or bool(self._todo)

    # -- requests that concern the session ---------------------------------------------------------

    def _validate(self, magic: int) -> None:
        if magic != c10d.MAGIC:
            raise ProtocolError(f"a client of torch's TCPStore with another magic number: {magic:#x}")

    def _multi_get(self, keys: list[str]) -> bytes:
        values = [self._state.keys.peek(key) or b"" for key in keys]
        # The size is checked before the reply is built: a request may repeat one key many times.
        if sum(map(len, values)) > self._server.limit:
            raise ProtocolError(f"a multi_get of more than the store's {self._server.limit} bytes: ask for fewer keys")
        return c10d.vectors(values)

    def _queue_pop(self, key: str) -> bytes:
        length, item = self._state.queues.take(self, key)
        return I64.pack(length) + vector(item) if length else I64.pack(0)

    def _wait(self, keys: list[str]) -> bytes | None:
        return None if self._state.wait(self._next_place(), keys) is NO_REPLY else c10d.STOP_WAITING

    def _barrier(self, key: str, world_size: int) -> bytes | None:
        opened = self._state.barriers.join(self._next_place(), key, world_size)
        return None if opened is NO_REPLY else c10d.STOP_WAITING

    def _next_place(self) -> Place:
        self._last_request += 1
        return self, self._last_request

    def _cancel_wait(self) -> bytes:
        """Cancel all blocked requests; wake-ups for queue items pass to other clients."""
        for place in self._state.requests.places_of(self):
            self._state.requests.withdraw(place)
        self._state.queues.release_wakeups(self)
        return c10d.WAIT_CANCELED


_OF_SESSION: Final[dict[int, Handler]] = {
    Code.VALIDATE: C10dSession._validate,
    Code.MULTI_GET: C10dSession._multi_get,
    Code.QUEUE_POP: C10dSession._queue_pop,
    Code.WAIT: C10dSession._wait,
    Code.BARRIER: C10dSession._barrier,
    Code.CANCEL_WAIT: C10dSession._cancel_wait,
}


# -- requests that concern only the state -----------------------------------------------------------


def handlers_of(state: StoreState) -> dict[int, Handler]:
    keys, queues = state.keys, state.queues
    no_value = vector(b"")

    def get(key: str) -> bytes:
        value = keys.peek(key)
        return no_value if value is None else U64.pack(len(value)) + value

    def list_keys() -> bytes:
        names = [c10d.raw_key(key) for key in keys.list_keys("")]
        return U64.pack(len(names)) + c10d.vectors(names)

    return {
        Code.PING: U32.pack,
        Code.SET: keys.set,
        Code.MULTI_SET: keys.multi_set,
        Code.APPEND: keys.append,
        Code.ADD: lambda key, amount: I64.pack(keys.add(key, amount)),
        Code.COMPARE_SET: lambda *arguments: vector(keys.compare_set(*arguments)),
        Code.GET: get,
        Code.DELETE_KEY: lambda key: I64.pack(keys.delete(key)),
        Code.CHECK: lambda names: c10d.READY if state.check(names) else c10d.NOT_READY,
        Code.GETNUMKEYS: lambda: I64.pack(len(keys)),
        Code.LIST_KEYS: list_keys,
        Code.QUEUE_PUSH: queues.push,
        Code.QUEUE_LEN: lambda key: I64.pack(queues.length(key)),
    }


def cached_answers(state: StoreState, handlers: Mapping[int, Handler]) -> dict[int, Callable[..., Answer]]:
    """Return by code a function that makes, from the arguments of a request, the function that answers this request.

    If the made function returns None or raises, it has had no effect, and the session executes the request.
    """
    peek = state.keys.peek

    def wait(keys: list[str]) -> Answer:
        (key,) = keys
        return lambda: None if peek(key) is None else c10d.STOP_WAITING

    answers: dict[int, Callable[..., Answer]] = {Code.WAIT: wait}
    for code in (Code.GET, Code.ADD, Code.CHECK):
        answers[code] = partial(partial, handlers[code])
    return answers
