"""A call as its caller holds it: a future of the result, or the items of an async generator that runs at the callee.

The callee of a stream sends at most `WINDOW` items that the caller has not taken. A stream that the program drops, or
leaves early, is cancelled at the callee. `caller` puts the items that arrive into an `ItemQueue`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from math import inf
from typing import Any, NoReturn, Protocol, Self

import torch

from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import UsageError
from asyncdist.net import IncomingMessage, OutgoingMessage
from asyncdist.rpc.errors import CallTimeoutError
from asyncdist.rpc.loans import MessageLoan
from asyncdist.rpc.values import SentReference

WINDOW = 16
"""The items that a callee sends before the caller takes the first."""


class CallTable(Protocol):
    """The calls over one channel: a `Caller`."""

    peer: str
    loop: asyncio.AbstractEventLoop

    def give_up(self, call: Any) -> None: ...

    def grant(self, number: int, count: int) -> None: ...


class RemoteCall(ProcessBound, asyncio.Future[Any]):
    """A call that has started: await it, gather it, or iterate over it if the method is an async generator.

    It is a future and not a coroutine, so it needs no task: the call has been sent when it is made, unless a thread packs
    its long arguments. Cancelling it, or the task that awaits it, cancels the method.
    """

    _elsewhere = "await it, and send its result instead"

    __slots__ = (
        "_caller", "buffers", "deadline", "destination", "head", "incoming", "is_sent", "limits_stream", "loan", "method",
        "nbytes", "number", "outgoing", "references", "target", "timeout",
    )  # fmt: skip

    def __init__(
        self, caller: CallTable, number: int, target: str, method: str, timeout: float, deadline: float
    ) -> None:
        super().__init__(loop=caller.loop)
        self._caller = caller
        self.number, self.target, self.method = number, target, method
        self.timeout, self.deadline = timeout, deadline
        self.limits_stream = False
        """Whether the deadline is that of the whole stream, if the method is an async generator."""
        self.is_sent = False
        self.nbytes = 0
        self.head = b""
        self.buffers: Sequence[memoryview] = ()
        self.references: Sequence[SentReference] = ()
        self.loan: MessageLoan | None = None
        """The device tensors that the callee reads where they lie, until it has been sent."""
        self.outgoing: OutgoingMessage | None = None
        self.destination: torch.Tensor | None = None
        """A contiguous tensor in host memory, into which the result is received."""
        self.incoming: IncomingMessage | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self._caller.give_up(self)
        return cancelled

    def cancel_soon(self) -> None:
        """Cancel the call, unless it has ended. Any thread may call it."""
        if not (self.done() or self._caller.loop.is_closed()):
            self._caller.loop.call_soon_threadsafe(self.cancel)

    def expire(self) -> None:
        if not self.done():
            self.set_exception(CallTimeoutError(self.target, self.method, self._caller.peer, self.timeout))
            self._caller.give_up(self)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, unless it has ended."""
        if not self.done():
            self.set_exception(error)

    def __aiter__(self) -> CallStream:
        return CallStream(self)

    def __iter__(self) -> NoReturn:
        raise UsageError(f"{self.target}.{self.method}() returns a call: await it, or iterate over it with `async for`")

    def __repr__(self) -> str:
        """Return an advice, which asyncio shows in its error if a program makes a task of this future."""
        state = "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        return f"<a call of {self.target}.{self.method}() that is {state}: await it as it is, it needs no task>"


class ItemQueue:
    """The items of one stream that have arrived, in the table of the calls. It does not refer to the `CallStream`."""

    def __init__(self, caller: CallTable, call: RemoteCall) -> None:
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
