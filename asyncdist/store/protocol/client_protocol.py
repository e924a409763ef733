"""The client's side of its connections without the connections: who asked what, and whose answer has come.

Both clients are drivers of this one machine: the awaited one hangs asyncio futures into it, the blocking one objects
that a thread waits on. It calls ``resolve`` and ``reject`` on those *sinks*, and ``publish`` for a subscription's
messages. It does no I/O: methods return messages to be sent (`messages`), b"" where there is none; whoever sends them
frames them, together where it can. One thread at a time.

A conversation outlives its connections. What has not been answered when one breaks is asked again over the next, under
the same number: the store knows by the client's identity and that number what it has done already, and does it once
(`members`). Where the store does not know us any more, because it was started anew or our lease has run out, what only
looks, waits or sets is still asked again; of any other change nobody knows whether it was made, and its sink is told so.
So it is where more changes were under way than the store keeps answers to. A client that keeps a lease on a prefix does
not continue when the server does not know it any more: the keys of its job may be deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Protocol

from asyncdist.errors import ProtocolError, QueueEmptyError, StoreConnectionError, StoreError, UsageError
from asyncdist.store.protocol.chunking import (
    FRAME_NBYTES,
    LONG_NBYTES,
    ChunkedMessage,
    Reassembler,
    request_piece,
    weight,
)
from asyncdist.store.protocol.codec import HELLO, VERSION, Encoder, FrameParser, decode_answer, message_limit
from asyncdist.store.protocol.operations import (
    BLOCKING,
    CHANGING,
    REPEATABLE,
    STREAMS,
    Command,
    Op,
    OperationKind,
    Reason,
)
from asyncdist.store.state.model import cost_of, named

log = logging.getLogger("asyncdist")

IDENTITY_NBYTES = 16
"""Of a random identity: enough that no two clients have the same."""
_LONGEST_LEASE = 365 * 86400.0
"""Seconds: a year stands for no limit."""
_TELL_AFTER_NBYTES = 64 << 10
"""Bytes of answers to changes that the server may keep before the next request acknowledges them."""
_LASTING = frozenset((Op.SET, Op.ADD, Op.COMPARE_SET, Op.DELETE_KEY, Op.APPEND, Op.MULTI_SET))
"""Changes after which a key that went with us does not any more."""


class ResponseHandler(Protocol):
    """One who waits for the answer to a command. None of its methods may raise or block."""

    command: Command[Any]

    def resolve(self, value: Any) -> None: ...

    def reject(self, error: Exception) -> None: ...

    def publish(self, message: bytes) -> None: ...


def refusal(reason: int, text: str) -> Exception:
    """Return the exception for what a store refused."""
    if reason == Reason.EMPTY:
        return QueueEmptyError(text)
    return StoreError(text)


class ClientProtocol:
    """The requests that are open at one store, and what arrives for them.

    ``identity`` is what the store knows us by, a random one; ``lease`` is for how many seconds it waits for us, and keeps
    our ephemeral keys, when a connection has broken.
    """

    def __init__(self, where: str = "?", lease: float = 0.0, identity: bytes = b"") -> None:
        self.where = where
        self.greeted = False
        """Whether the server has said hello; ask nothing before."""
        self.limit = message_limit()
        """The longest message that the store takes, once it has said so."""
        self.stays = False
        """Whether the store is one that comes back when it has gone, as far as it has said."""
        self.lost: StoreConnectionError | None = None
        """Why there is no going on, although a store answers: it has not kept what we, or others with us, need."""
        self.answered = False
        """Whether the store has answered a request over the present connection."""
        self._identity = identity
        self._lease = min(lease, _LONGEST_LEASE)
        self._asked: dict[int, ResponseHandler] = {}
        self._changes: dict[int, None] = {}  # those of them that change something
        self._kept_nbytes = 0  # by the store, of answers that have arrived here
        self._restoring: dict[int, Command[Any]] = {}  # by this class, not by a caller
        self._held: set[int] = set()  # not to be sent yet
        self._ephemeral: dict[str, Command[Any]] = {}
        self._leases: set[str] = set()  # prefixes on which this client keeps a lease
        self._last = 0
        self._talking = False
        self._resuming = 0
        self._introduced = False
        self._lineage = ""
        self._out: list[bytes | ChunkedMessage] = []
        self._encoder = Encoder()
        self._parser = FrameParser(FRAME_NBYTES)
        self._arriving = Reassembler(self.limit)

    @property
    def num_open(self) -> int:
        return len(self._asked)

    def open_requests(self) -> Collection[ResponseHandler]:
        """Return who has not been answered, or not for good."""
        return self._asked.values()

    @property
    def resumable(self) -> bool:
        """Whether another connection could take up where one breaks."""
        return self.lost is None and self._introduced

    # -- asking -----------------------------------------------------------------------------------

    def is_open(self, request: int) -> bool:
        """Whether there is a point in sending a request, or the rest of it."""
        return request in self._asked or request in self._restoring

    def ask(self, sink: ResponseHandler) -> tuple[int, bytes | ChunkedMessage]:
        """Open a request; return its id and the message to be sent, after what is there to `take_out`.

        Raises UsageError for what cannot be sent.
        """
        request, command = self._last + 1, sink.command
        message = self._message(request, command)
        self._last = request
        self._asked[request] = sink
        op = command.op
        if op in CHANGING:
            self._changes[request] = None
        if not self._talking:
            self._held.add(request)
            return request, b""
        if self._kept_nbytes >= _TELL_AFTER_NBYTES:
            self._kept_nbytes = 0
            self._out.append(self._encoder.pack((0, Op.RECEIVED, next(iter(self._changes), request))))
        return request, message

    def _message(self, request: int, command: Command[Any]) -> bytes | ChunkedMessage:
        op, args = command
        fields = request, op, *args
        try:
            if op is not Op.GET and weight(args) > LONG_NBYTES:
                message: bytes | ChunkedMessage = ChunkedMessage(self._encoder.pack, fields, request_piece)
            else:
                message = self._encoder.pack(fields)
                if len(message) > LONG_NBYTES:
                    message = ChunkedMessage(self._encoder.pack, fields, request_piece)
        except ValueError as error:  # a lone surrogate in a key
            raise UsageError(f"store {command.name}: {error}") from None
        if len(message) > self.limit:
            raise UsageError(
                f"store {command.name} of {len(message)} bytes, and the store takes {self.limit}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective"
            )
        return message

    def give_up(self, request: int) -> bytes:
        """Forget a request, answered or not; return the message that makes the store forget it too."""
        asked = self._asked.pop(request, None)
        self._changes.pop(request, None)
        if asked is not None and request not in self._held:
            self._note_lasting(asked.command)  # it may be done
        self._held.discard(request)
        if not self._talking or (asked is not None and asked.command.op not in BLOCKING):
            return b""
        return self._encoder.pack((0, Op.CANCEL, request))

    def confirm(self, request: int) -> bytes:
        """Return the message that acknowledges a popped item."""
        return self._encoder.pack((0, Op.CONFIRM, request)) if self._talking else b""

    def goodbye(self) -> bytes:
        """Return the message that says that we shall not be back."""
        return self._encoder.pack((0, Op.LEAVE))

    # -- one connection after the other -----------------------------------------------------------

    def introduce(self) -> bytes:
        """Return what is said first on a connection whose server has said hello."""
        self.answered = False
        self._last += 1
        self._resuming = self._last
        self._talking, self._introduced = not self._introduced, True  # the first time there is nothing to wait for
        return self._encoder.pack((self._resuming, Op.RESUME, self._identity, int(self._lease * 1000)))

    def interrupted(self) -> None:
        """The connection has broken: what is open stays so until another one takes up, or `end`."""
        self._talking = False
        self._resuming = 0
        self._out.clear()
        self.greeted = False
        self._parser = FrameParser(FRAME_NBYTES)
        self._arriving.drop()

    @property
    def has_more(self) -> bool:
        """Whether there is something to `take_out`."""
        return bool(self._out)

    def data_to_send(self) -> list[bytes | ChunkedMessage]:
        """Return the messages to send after `receive` or `ask`, and forget them."""
        out, self._out = self._out, []
        return out

    def _resumed(self, lineage: str, known: bool, stays: bool) -> None:
        before, self._lineage = self._lineage, lineage
        self._resuming, self.stays = 0, stays
        if self._talking:
            return
        if before and lineage != before:
            self.lost = StoreConnectionError(
                f"the store at {self.where} was started anew and holds nothing of what it held: start again all who met "
                "there; `asyncdist store --data` outlives its own end"
            )
            return
        if not known and self._leases:
            self.lost = StoreConnectionError(
                f"the store at {self.where} has not heard of us for more than {self._lease:g} s, and what our job kept "
                "there may be gone: start it again; a larger ASYNCDIST_STORE_LEASE has the store wait longer"
            )
            return
        if not known:
            self._restore_ephemeral()
        for request, sink in list(self._asked.items()):
            command = sink.command
            op = command.op
            if request in self._held:
                continue
            if op is Op.SUBSCRIBE:
                self._break_off(request, self._missed(command))
            elif not known and op in CHANGING and op not in REPEATABLE:
                self._break_off(request, self._unknown(command))
        self._held.update(self._asked)
        for request, command in list(self._restoring.items()):
            try:
                self._out.append(self._message(request, command))
            except UsageError as error:
                self._do_without(request, str(error))
        self._go_on()

    def _go_on(self) -> None:
        """Ask what is held, once our keys are there again: it may be about these, and would overtake long values."""
        if self._restoring:
            return
        self._talking = True
        self._held.clear()
        for request, sink in list(self._asked.items()):
            self._ask_again(request, sink.command)

    def _ask_again(self, request: int, command: Command[Any]) -> None:
        try:
            self._out.append(self._message(request, command))
        except UsageError as error:  # this server takes less than the one before
            self._break_off(request, error)

    def _break_off(self, request: int, error: Exception) -> None:
        sink = self._asked.pop(request)
        self._changes.pop(request, None)
        sink.reject(error)

    def _restore_ephemeral(self) -> None:
        for request in self._restoring:
            self._changes.pop(request, None)
        self._restoring.clear()
        for command in self._ephemeral.values():
            self._last += 1
            self._changes[self._last] = None
            self._restoring[self._last] = Command(Op.RESTORE_EPHEMERAL, command.args)

    def _unknown(self, command: Command[Any], why: str = "the store does not know us any more") -> StoreConnectionError:
        keys = ", ".join(map(repr, command.keys[:3]))
        return StoreConnectionError(
            f"the connection to the store at {self.where} broke, and {why}: whether "
            f"{command.name}({keys}) was done is unknown; look at what is there before you repeat it"
        )

    def _missed(self, command: Command[Any]) -> StoreConnectionError:
        return StoreConnectionError(
            f"the connection to the store at {self.where} broke and was made again: messages of {command.keys[0]!r} may "
            "have been missed in between; subscribe again"
        )

    # -- hearing ----------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take bytes that arrived and tell those whose answers they hold. Raises ProtocolError."""
        for frame in self._parser.feed(data):
            for message in self._arriving.messages_in(frame):
                self._hear(*decode_answer(message))

    def _hear(self, request: int, kind: int, value: Any) -> None:
        # An answer may cross its CANCEL on the way.
        sink = self._asked.get(request)
        if sink is None:
            if kind == HELLO:
                self._greet(*value)
            elif kind == OperationKind.PIECE:
                self._arriving.add(*value)
            elif request == self._resuming and request:
                self._hear_resumed(kind, value)
            elif request in self._restoring:
                self._hear_restored(request, kind, value)
            return
        op = sink.command.op
        if kind == OperationKind.PUBLISHED:
            sink.publish(value)
            return
        if kind == OperationKind.PIECE:
            self._arriving.add(*value)
            return
        if op in CHANGING:
            del self._changes[request]
            self._kept_nbytes += cost_of(value)
            self._note_ephemeral(sink.command, kind)
        if kind != OperationKind.RESULT:
            del self._asked[request]
            self.answered = True
            reason, text = value
            sink.reject(self._unknown(sink.command, text) if reason == Reason.UNSURE else refusal(reason, text))
        else:
            if op not in STREAMS:
                del self._asked[request]
                self.answered = True
            if op is Op.ACQUIRE_LEASE:
                self._leases.update(sink.command.keys)
            elif op is Op.RELEASE_LEASE:
                self._leases.difference_update(sink.command.keys)
            sink.resolve(value)

    def _hear_resumed(self, kind: int, value: Any) -> None:
        types = [str, bool, bool]
        if kind != OperationKind.RESULT or type(value) is not list or [type(each) for each in value] != types:
            raise ProtocolError("the store does not say what it knows of us: run the same asyncdist on both sides")
        self._resumed(*value)

    def _hear_restored(self, request: int, kind: int, value: Any) -> None:
        if kind != OperationKind.RESULT:
            self._do_without(request, value[1])
        else:
            key = self._close_restoring(request)
            if value is False:  # another client has set it since
                del self._ephemeral[key]
        self._go_on()

    def _do_without(self, request: int, why: str) -> None:
        """Forget an ephemeral key that the server refuses to restore, such as for its size."""
        key = self._close_restoring(request)
        del self._ephemeral[key]
        log.warning("the store at %s does not take back the ephemeral key %s: %s", self.where, named(key), why)

    def _close_restoring(self, request: int) -> str:
        """Forget a request of `_restoring`; return the key that it was about."""
        self._changes.pop(request, None)
        key: str = self._restoring.pop(request).args[0]
        return key

    def _note_ephemeral(self, command: Command[Any], kind: int) -> None:
        op, args = command
        if kind != OperationKind.RESULT:
            return
        if op is Op.SET_EPHEMERAL:
            self._ephemeral[args[0]] = command
        else:
            self._note_lasting(command)

    def _note_lasting(self, command: Command[Any]) -> None:
        op, args = command
        if self._ephemeral and op in _LASTING:
            for key in command.keys:
                if op is not Op.COMPARE_SET or args[1] == self._what_is_ours(key):  # or nothing has been set
                    self._ephemeral.pop(key, None)

    def _what_is_ours(self, key: str) -> bytes | None:
        return self._ephemeral[key].args[1] if key in self._ephemeral else None

    def _greet(self, version: int, limit: int) -> None:
        if version != VERSION:
            raise ProtocolError(
                f"the store speaks version {version} of our protocol, and we speak {VERSION}: "
                "run the same asyncdist on both sides"
            )
        self.greeted = True
        self.limit = self._arriving.limit = limit

    def end(self, error: Exception) -> None:
        """There is no further connection: reject everything that is open."""
        asked, self._asked = self._asked, {}
        self._changes.clear()
        self._held.clear()
        for sink in asked.values():
            sink.reject(type(error)(*error.args))  # one each: each who raises it adds a traceback
