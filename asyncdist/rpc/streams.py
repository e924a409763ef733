"""The caller's side of a stream: the items of an async generator that runs at the callee.

The callee sends at most `WINDOW` items that the caller has not taken. A stream that the program drops, or leaves early, is
cancelled at the callee. `calls` puts the items that arrive into an `ItemQueue`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from math import inf
from typing import Any, Protocol, Self

from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import UsageError
from asyncdist.rpc.errors import CallTimeoutError

WINDOW = 16
"""The items that a callee sends before the caller takes the first."""


class StreamingCall(Protocol):
    """A call that has turned out to be a stream."""

    number: int
    target: str
    method: str
    timeout: float
    deadline: float
    limits_stream: bool
    nbytes: int
    outgoing: Any


class StreamCaller(Protocol):
    """The table of the calls."""

    peer: str
    loop: asyncio.AbstractEventLoop

    def give_up(self, call: Any) -> None: ...

    def grant(self, number: int, count: int) -> None: ...


class ItemQueue:
    """The items of one stream that have arrived, in the table of the calls. It does not refer to the `CallStream`."""

    def __init__(self, caller: StreamCaller, call: StreamingCall) -> None:
        self.number, self.target, self.method = call.number, call.target, call.method
        self.timeout, self.nbytes, self.outgoing = call.timeout, call.nbytes, call.outgoing
        self.deadline = call.deadline if call.limits_stream else inf
        self.is_sent = True
        self.head, self.buffers = b"", ()
        self._caller = caller
        self._items: deque[Any] = deque()
        self._taken = 0
        self._over: BaseException | None = None
        self._changed = asyncio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed.set()

    def end(self, error: BaseException | None) -> None:
        """Note that no item follows, and why."""
        if self._over is None:
            self._over = error or StopAsyncIteration()
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        self.end(error)

    def expire(self) -> None:
        self.end(CallTimeoutError(self.target, self.method, self._caller.peer, self.timeout))
        self._caller.give_up(self)

    def close(self) -> None:
        """Cancel the stream at the callee, unless it has ended. Idempotent."""
        if self._over is None:
            self._over = StopAsyncIteration()
            self._caller.give_up(self)
            self._items.clear()
            self._changed.set()

    def close_soon(self) -> None:
        """Cancel the stream. Any thread may call it."""
        if self._over is None and not self._caller.loop.is_closed():
            self._caller.loop.call_soon_threadsafe(self.close)

    async def take(self) -> Any:
        """Wait for the next item and return it. Raises StopAsyncIteration at the end, and the error of the call."""
        while not self._items:
            if self._over is not None:
                raise self._over
            self._changed.clear()
            await self._changed.wait()
        self._taken += 1
        if self._taken >= WINDOW // 2 and self._over is None:
            self._caller.grant(self.number, self._taken)
            self._taken = 0
        return self._items.popleft()


class CallStream(ProcessBound):
    """The items that an async generator at the callee yields: ``async for item in policy.rollout(64)``.

    It ends with the generator, or raises the error of the call. `close` it, leave its ``async with`` block, or drop it, to
    cancel the generator.
    """

    _elsewhere = "iterate over it, and send its items instead"

    def __init__(self, call: Awaitable[Any] | None, queue: ItemQueue | None = None) -> None:
        self._call: Any = call
        self._queue = queue
        self._has_begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._queue is None:
            self._has_begun = True
            # A limit of the caller ends its waiting for the first item, and not the stream.
            await asyncio.wait([self._call])
        if self._queue is None:
            stream = self._call.result()
            name = f"{self._call.target}.{self._call.method}()"
            if not isinstance(stream, CallStream):
                raise UsageError(f"{name} returns a value and is no async generator: await it")
            if stream._queue is None:
                raise UsageError(f"the stream of {name} has been iterated over: keep `await {name}`, or call it again")
            self._queue, stream._queue = stream._queue, None
        return await self._queue.take()

    def close(self) -> None:
        """Cancel the generator at the callee. Idempotent."""
        if self._queue is not None:
            self._queue.close()
        elif self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        queue, call = self._queue, self._call
        if queue is not None:
            queue.close_soon()
        elif self._has_begun:
            call.cancel_soon()
