"""The client's side of a connection without the connection: who asked what, and whose answer has come.

Both clients are drivers of this one machine: the awaited one hangs asyncio futures into it, the blocking one objects
that a thread waits on. It calls ``resolve`` and ``reject`` on those *sinks*, and ``publish`` for a subscription's
messages. It does no I/O: methods return the bytes to be sent. One thread at a time.
"""

from __future__ import annotations

from typing import Any, Protocol

from asyncdist.errors import ProtocolError, QueueEmptyError, StoreError, UsageError
from asyncdist.store.messages import HELLO, LENGTH, VERSION, Encoder, FrameParser, decode_answer, frame_limit
from asyncdist.store.operations import BLOCKING, Command, Kind, Op, Reason


class Sink(Protocol):
    """One who waits for an answer. None of these may raise or block."""

    def resolve(self, value: Any) -> None: ...

    def reject(self, error: Exception) -> None: ...

    def publish(self, message: bytes) -> None: ...


def refusal(reason: int, text: str) -> Exception:
    """Return the exception for what a store refused."""
    if reason == Reason.EMPTY:
        return QueueEmptyError(text)
    return StoreError(text)


class Conversation:
    """The requests that are open on one connection, and what arrives for them."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[Op, Sink]] = {}
        self._last = 0
        self._encoder = Encoder()
        self._parser = FrameParser(frame_limit(0))  # until the server says how long frames may be, either way
        self.limit: int | None = None

    @property
    def greeted(self) -> bool:
        """Whether the server has said hello; ask nothing before."""
        return self.limit is not None

    @property
    def num_open(self) -> int:
        return len(self._asked)

    def ask(self, command: Command, sink: Sink) -> tuple[int, bytes]:
        """Open a request; return its id and the bytes to be sent. Raises UsageError for what cannot be sent."""
        request = self._last + 1
        try:
            frame = self._encoder.frame(request, command.op, *command.args)
        except ValueError as error:  # a lone surrogate in a key, a value of 4 GiB and more
            raise UsageError(f"store {command.name}: {error}") from None
        limit = self.limit or frame_limit(0)
        if len(frame) - LENGTH.size > limit:
            raise UsageError(
                f"store {command.name} of {len(frame)} bytes, and the store takes {limit}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective"
            )
        self._last = request
        self._asked[request] = command.op, sink
        return request, frame

    def give_up(self, request: int) -> bytes:
        """Forget a request, answered or not; return the bytes that make the store forget it too."""
        op, _ = self._asked.pop(request, (Op.QUEUE_POP, None))
        return self._encoder.frame(0, Op.CANCEL, request) if op in BLOCKING else b""

    def confirm(self, request: int) -> bytes:
        """Return the bytes that say that a popped item has reached who asked for it."""
        return self._encoder.frame(0, Op.CONFIRM, request)

    def receive(self, data: bytes) -> None:
        """Take bytes that arrived and tell those whose answers they hold. Raises ProtocolError."""
        for frame in self._parser.feed(data):
            request, kind, value = decode_answer(frame)
            if kind == HELLO:
                self._greet(*value)
                continue
            if kind == Kind.PUBLISHED:
                if request in self._asked:
                    self._asked[request][1].publish(value)
                continue
            # An answer may cross its CANCEL on the way: then nobody is there for it.
            op, sink = self._asked.get(request, (None, None))
            if sink is None:
                continue
            if kind == Kind.RESULT:
                if op is not Op.SUBSCRIBE:
                    del self._asked[request]
                sink.resolve(value)
            else:
                del self._asked[request]
                sink.reject(refusal(*value))

    def _greet(self, version: int, limit: int) -> None:
        if version != VERSION:
            raise ProtocolError(
                f"the store speaks version {version} of our protocol, and we speak {VERSION}: "
                "run the same asyncdist on both sides"
            )
        self.limit = self._parser.limit = limit

    def end(self, error: Exception) -> None:
        """The connection is over: reject everything that is open."""
        asked, self._asked = self._asked, {}
        for _, sink in asked.values():
            sink.reject(type(error)(*error.args))  # one each: each who raises it adds a traceback
