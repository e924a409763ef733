"""The state machine of a client's session with a store, without I/O. Both store clients drive it, one thread at a time.

A request is a `ResponseHandler`: an asyncio future of the awaited client, or the `PendingRequest` of a thread of the
blocking client. Methods return the messages to be sent, b"" for none; the caller frames and sends them.

A session outlives its connections. A request without an answer is sent again over the next connection, under the same
number. The server recognizes a repeated change by the client's identity and that number, and applies each change once
(`asyncdist.store.state.sessions`). If the server does not know the session any more, because it was restarted or the
lease has ended, the client repeats requests that only read, wait or set. Any other change is rejected, because its outcome
is unknown. A client that keeps a lease on a prefix ends instead, because the keys of its job may have been deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from asyncdist.errors import ProtocolError, QueueEmptyError, StoreConnectionError, StoreError, UsageError
from asyncdist.net.connection.frames import HELLO
from asyncdist.net.connection.inbox import Inbox, InboxOwner
from asyncdist.net.connection.messages import IncomingMessage
from asyncdist.store.protocol.codec import decode_answer, decode_hello, message_limit, messages_in, packer
from asyncdist.store.protocol.long_messages import LONG_NBYTES, LongMessage, Reassembler, weight
from asyncdist.store.protocol.operations import (
    BLOCKING,
    CHANGING,
    KEY_CHANGES,
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
"""The size of a random identity. Two clients never draw the same one."""
_LONGEST_LEASE = 365 * 86400.0
"""Seconds. A lease without a limit is sent as a year."""
_ACKNOWLEDGE_AFTER_NBYTES = 64 << 10
"""Bytes of answers to changes, after which the next request acknowledges them, so that the server drops them."""


class ResponseHandler(Protocol):
    """A request. The protocol calls its methods, which must neither raise nor block."""

    command: Command[Any]

    def resolve(self, value: Any) -> None: ...

    def reject(self, error: Exception) -> None: ...

    def publish(self, message: bytes) -> None: ...


def refusal(reason: int, text: str) -> Exception:
    return QueueEmptyError(text) if reason == Reason.EMPTY else StoreError(text)


class ClientProtocol(InboxOwner):
    """The open requests of one client, and its session over any number of connections.

    Args:
        where: The store's address, for error messages.
        lease: Seconds for which the server keeps the session and its ephemeral keys after a connection broke.
        identity: A random number by which the server knows the client.
    """

    def __init__(self, where: str = "?", lease: float = 0.0, identity: bytes = b"") -> None:
        self.where = where
        self.greeted = False
        """Whether the server's hello has arrived. Nothing may be sent before."""
        self.limit = message_limit()
        """The longest message that the server accepts, as stated in its hello."""
        self.stays = False
        """Whether the store is a daemon, which may be restarted."""
        self.lost: StoreConnectionError | None = None
        """The error if the session cannot be resumed although a server answers: the client's data is lost."""
        self.answered = False
        """Whether the store has answered a request over the present connection."""
        self.expiries = 0
        """How often the store has ended this client's lease, and has deleted its ephemeral keys."""
        self.output: list[bytes | LongMessage] = []
        """Messages to be sent; see `data_to_send`."""
        self.inbox = Inbox(self, most_nbytes=self.limit, most_open=1)
        self._identity = identity
        self.lease = min(lease, _LONGEST_LEASE)
        self._open: dict[int, ResponseHandler] = {}
        self._changes: dict[int, None] = {}  # the open requests that change something
        self._held: set[int] = set()  # the open requests that may not be sent yet
        self._unacknowledged_nbytes = 0  # of answers that the server keeps
        self._ephemeral: dict[str, Command[Any]] = {}
        self._restoring: dict[int, Command[Any]] = {}  # requests of this class that restore ephemeral keys
        self._leases: set[str] = set()  # prefixes on which this client keeps a lease
        self._last = 0
        self._resumed = False
        self._resume_request = 0
        self._introduced = False
        self._lineage = ""
        self._pack = packer()

    def open_requests(self) -> Collection[ResponseHandler]:
        return self._open.values()

    @property
    def resumable(self) -> bool:
        return self.lost is None and self._introduced

    # -- requests ---------------------------------------------------------------------------------

    def is_open(self, request: int) -> bool:
        """Return whether a request, or the rest of it, still has to be sent."""
        return request in self._open or request in self._restoring

    def ask(self, handler: ResponseHandler) -> tuple[int, bytes | LongMessage]:
        """Open a request; return its number, and its message, which follows those in ``output``.

        Raises UsageError if the request is too long for the server.
        """
        request, op = self._last + 1, handler.command.op
        message = self._message(request, handler.command)
        self._last = request
        self._open[request] = handler
        if op in CHANGING:
            self._changes[request] = None
        if not self._resumed:
            self._held.add(request)
            return request, b""
        if self._unacknowledged_nbytes >= _ACKNOWLEDGE_AFTER_NBYTES:
            self._unacknowledged_nbytes = 0
            self.output.append(self._pack((0, Op.RECEIVED, next(iter(self._changes), request))))
        return request, message

    def _message(self, request: int, command: Command[Any]) -> bytes | LongMessage:
        op, args = command
        fields = request, op, *args
        try:
            if op is not Op.GET and weight(args) > LONG_NBYTES:
                message: bytes | LongMessage = LongMessage(self._pack, fields, self.is_open)
            else:
                message = self._pack(fields)
                if len(message) > LONG_NBYTES:
                    message = LongMessage(self._pack, fields, self.is_open)
        except ValueError as error:  # a lone surrogate in a key
            raise UsageError(f"store {command.name}: {error}") from None
        if len(message) > self.limit:
            raise UsageError(
                f"store {command.name} of {len(message)} bytes, and the store takes {self.limit}: raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs, or send bulk data through a collective"
            )
        return message

    def give_up(self, request: int) -> bytes:
        """Close a request, answered or not; return the message that cancels it at the server."""
        handler = self._open.pop(request, None)
        self._changes.pop(request, None)
        if handler is not None and request not in self._held:
            self._note_lasting(handler.command)  # the server may have applied it
        self._held.discard(request)
        if not self._resumed or (handler is not None and handler.command.op not in BLOCKING):
            return b""
        return self._pack((0, Op.CANCEL, request))

    def confirm(self, request: int) -> bytes:
        return self._pack((0, Op.CONFIRM, request)) if self._resumed else b""

    def goodbye(self) -> bytes:
        return self._pack((0, Op.LEAVE))

    def data_to_send(self) -> list[bytes | LongMessage]:
        messages, self.output = self.output, []
        return messages

    # -- connections ------------------------------------------------------------------------------

    def introduce(self) -> bytes:
        """Return the first message on a connection whose server has said hello."""
        self.answered = False
        self._last += 1
        self._resume_request = self._last
        self._resumed, self._introduced = not self._introduced, True  # a new session need not wait for the answer
        return self._pack((self._resume_request, Op.RESUME, self._identity, int(self.lease * 1000)))

    def interrupted(self) -> None:
        """Reset the state of the connection, which has broken. Requests stay open until the session is resumed or ends."""
        self._resumed = self.greeted = False
        self._resume_request = 0
        self.output.clear()
        self.inbox.close()
        self.inbox = Inbox(self, most_nbytes=self.limit, most_open=1)

    def end(self, error: Exception) -> None:
        """Reject all open requests, because there is no further connection."""
        requests, self._open = self._open, {}
        self._changes.clear()
        self._held.clear()
        for handler in requests.values():
            handler.reject(type(error)(*error.args))  # one each, because raising adds a traceback

    def _resume(self, lineage: str, known: bool, stays: bool) -> None:
        before, self._lineage = self._lineage, lineage
        self._resume_request, self.stays = 0, stays
        if self._resumed:
            return
        if before and lineage != before:
            self.lost = StoreConnectionError(
                f"the store at {self.where} was started anew and holds nothing of what it held: start again all ranks that "
                "use it; `asyncdist store --data` keeps its data over a restart"
            )
            return
        if not known and self._leases:
            self.lost = StoreConnectionError(
                f"the store at {self.where} has had no connection from this process for more than {self.lease:g} s, and "
                "the data of its job may be gone: start the job again; a larger ASYNCDIST_STORE_LEASE makes the store "
                "wait longer"
            )
            return
        if not known:
            self.expiries += 1
            self._restore_ephemeral()
        for request, handler in list(self._open.items()):
            op = handler.command.op
            if request in self._held:
                continue
            if op is Op.SUBSCRIBE:
                self._break_off(request, self._missed(handler.command))
            elif not known and op in CHANGING and op not in REPEATABLE:
                self._break_off(request, self._unknown(handler.command))
        self._held.update(self._open)
        for request, command in list(self._restoring.items()):
            try:
                self.output.append(self._message(request, command))
            except UsageError as error:
                self._drop_ephemeral(request, error.summary)
        self._send_held()

    def _send_held(self) -> None:
        """Send the held requests. They wait for the ephemeral keys, whose long values short requests would overtake."""
        if self._restoring:
            return
        self._resumed = True
        self._held.clear()
        for request, handler in list(self._open.items()):
            try:
                self.output.append(self._message(request, handler.command))
            except UsageError as error:  # the limit of this server is lower than that of the one before
                self._break_off(request, error)

    def _break_off(self, request: int, error: Exception) -> None:
        handler = self._open.pop(request)
        self._changes.pop(request, None)
        handler.reject(error)

    def _unknown(self, command: Command[Any], why: str = "the store does not know this client any more") -> Exception:
        keys = ", ".join(map(repr, command.keys[:3]))
        return StoreConnectionError(
            f"the connection to the store at {self.where} broke, and {why}: whether "
            f"{command.name}({keys}) was done is unknown; read the value before you repeat it"
        )

    def _missed(self, command: Command[Any]) -> Exception:
        return StoreConnectionError(
            f"the connection to the store at {self.where} broke and was made again: messages of {command.keys[0]!r} may "
            "have been missed in between; subscribe again"
        )

    # -- answers ----------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Parse received bytes, and pass each answer to its handler. Raises ProtocolError."""
        self.inbox.feed(data)

    def on_short(self, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        for message in messages_in(head):
            self._handle(*decode_answer(message))

    def on_opening(self, message: IncomingMessage) -> None:
        message.context = Reassembler(message)

    def on_completed(self, message: IncomingMessage) -> None:
        self._handle(*decode_answer(message.context.message()))

    def on_frame(self, kind: int, body: bytes) -> None:
        if kind != HELLO or self.greeted:
            super().on_frame(kind, body)
        self.limit = self.inbox.most_nbytes = decode_hello(body, self.where)
        self.greeted = True

    def _handle(self, request: int, kind: int, value: Any) -> None:
        handler = self._open.get(request)
        if handler is None:
            self._handle_other(request, kind, value)
        elif kind == OperationKind.PUBLISHED:
            handler.publish(value)
        else:
            # A signal handler may raise in any line: the request stays open, and is sent again, until it has its answer.
            op = handler.command.op
            if op in CHANGING:
                self._changes.pop(request, None)
                self._unacknowledged_nbytes += cost_of(value)
                if kind == OperationKind.RESULT and op is Op.SET_EPHEMERAL:
                    self._ephemeral[handler.command.args[0]] = handler.command
                elif kind == OperationKind.RESULT:
                    self._note_lasting(handler.command)
            if kind == OperationKind.RESULT:
                if op is Op.ACQUIRE_LEASE:
                    self._leases.update(handler.command.keys)
                elif op is Op.RELEASE_LEASE:
                    self._leases.difference_update(handler.command.keys)
                handler.resolve(value)
                if op not in STREAMS:
                    del self._open[request]
                    self.answered = True
            else:
                reason, text = value
                unsure = reason == Reason.UNSURE
                handler.reject(self._unknown(handler.command, text) if unsure else refusal(reason, text))
                del self._open[request]
                self.answered = True

    def _handle_other(self, request: int, kind: int, value: Any) -> None:
        """Handle a message that answers no request of the program, or one that was cancelled."""
        if request == self._resume_request and request:
            types = [str, bool, bool]
            if kind != OperationKind.RESULT or type(value) is not list or [type(each) for each in value] != types:
                raise ProtocolError(
                    "a wrong answer to the resumption of a session: run the same asyncdist on both sides"
                )
            self._resume(*value)
        elif request in self._restoring:
            if kind != OperationKind.RESULT:
                self._drop_ephemeral(request, value[1])
            else:
                key = self._close_restoring(request)
                if value is False:  # another client has set the key since
                    del self._ephemeral[key]
            self._send_held()

    # -- ephemeral keys ---------------------------------------------------------------------------

    def _restore_ephemeral(self) -> None:
        for request in self._restoring:
            self._changes.pop(request, None)
        self._restoring.clear()
        for command in self._ephemeral.values():
            self._last += 1
            self._changes[self._last] = None
            self._restoring[self._last] = Command(Op.RESTORE_EPHEMERAL, command.args)

    def _drop_ephemeral(self, request: int, why: str) -> None:
        """Continue without an ephemeral key that the server refuses to restore, such as for its size."""
        key = self._close_restoring(request)
        del self._ephemeral[key]
        log.warning("the store at %s refuses to restore the ephemeral key %s: %s", self.where, named(key), why)

    def _close_restoring(self, request: int) -> str:
        self._changes.pop(request, None)
        key: str = self._restoring.pop(request).args[0]
        return key

    def _note_lasting(self, command: Command[Any]) -> None:
        op, args = command
        if not self._ephemeral or op not in KEY_CHANGES:
            return
        for key in command.keys:
            ephemeral = self._ephemeral.get(key)
            # A compare_set that expected another value has changed nothing.
            if ephemeral is not None and (op is not Op.COMPARE_SET or args[1] == ephemeral.args[1]):
                del self._ephemeral[key]
