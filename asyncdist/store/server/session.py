"""The server's side of one connection of this package's client: frames become requests, and replies become frames.

Long messages are sent in parts (`protocol.long_messages`), and short messages between the parts. The bytes of a request
that arrives count against the memory quota, and are dropped with their connection. A client may reconnect and repeat its
unanswered requests; each change is applied once (`state.sessions`)."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from asyncdist.errors import ProtocolError
from asyncdist.net.connection.inbox import Inbox, InboxOwner
from asyncdist.net.connection.messages import IncomingMessage, OutgoingMessage
from asyncdist.net.connection.part_sender import PartSender
from asyncdist.net.host_watch import HostWatch
from asyncdist.store.protocol.codec import TOGETHER_NBYTES, decode_request, framed, messages_in
from asyncdist.store.protocol.long_messages import LONG_NBYTES, LongMessage, Reassembler, weight
from asyncdist.store.protocol.operations import (
    CHANGING,
    LEASED,
    REPEATABLE,
    SERVERS,
    SWEEPING,
    Op,
    OperationKind,
    Reason,
    Reply,
)
from asyncdist.store.server.connection import BACKLOG_NBYTES, ServerConnection, ServerContext, logger
from asyncdist.store.state.model import RequestRefused
from asyncdist.store.state.sessions import ClientSession


class _ArrivingRequest(Reassembler):
    """A long request, whose bytes count against the store's memory quota until it is executed, refused or withdrawn."""

    def __init__(self, session: Session, opened: IncomingMessage) -> None:
        super().__init__(opened)
        self._session = session
        self._reserved_nbytes = 0
        self.is_answered = False

    def write(self, part: memoryview) -> None:
        if self.is_answered:
            return
        self.is_answered = self._session.answer_early(self.request, len(part))
        if self.is_answered:
            self.release_memory()
        else:
            self._reserved_nbytes += len(part)
            super().write(part)

    def release_memory(self) -> None:
        self._session.release_memory(self._reserved_nbytes)
        self._reserved_nbytes = 0


class Session(ServerConnection, InboxOwner):
    """One authenticated client of this package's protocol."""

    __slots__ = (
        "_has_heard", "_has_sent", "_host_watch", "_inbox", "_last_before", "_parts", "_published_nbytes",
        "_published_queued_nbytes", "_queued", "_queued_nbytes", "_todo", "client_session",
    )  # fmt: skip

    def __init__(self, server: ServerContext, transport: asyncio.Transport, peer: str) -> None:
        super().__init__(server, transport, peer)
        self._inbox = Inbox(self, most_nbytes=server.limit, most_open=1)
        self._queued: Counter[int] = Counter()  # number of long replies that are neither sent nor cancelled, by request
        self._queued_nbytes = 0  # length of the long replies that are neither sent nor withdrawn
        self._parts = PartSender(transport, asyncio.get_running_loop().call_soon)
        self._published_nbytes = 0  # length of the short published messages since the socket was last full
        self._published_queued_nbytes = 0  # length of the long published messages that have not been sent
        self._todo: deque[Any] = deque()
        self.client_session: ClientSession | None = None
        self._last_before = 0  # the last request over an earlier connection
        self._host_watch = HostWatch(transport.get_extra_info("socket"), server.config.heartbeat)
        self._has_heard = False  # since the last look
        self._has_sent = False  # and not seen that it has arrived

    def receive(self, data: bytes) -> None:
        self._has_heard = True
        if data:
            self._inbox.feed(data)
        self._work()

    def on_short(self, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> None:
        self._todo.extend(messages_in(head))

    def on_opening(self, message: IncomingMessage) -> None:
        message.context = _ArrivingRequest(self, message)

    def on_completed(self, message: IncomingMessage) -> None:
        message.context.release_memory()
        if not message.context.is_answered:
            self._todo.append(message.context.message())

    def on_withdrawn(self, message: IncomingMessage) -> None:
        message.context.release_memory()

    def answer_early(self, request: int, nbytes: int) -> bool:
        """Reserve memory for bytes of a long request that have arrived; else answer the request, and return True."""
        self._work(in_turns=False)  # earlier requests may release memory
        # A repeated request, which has a reply, needs no memory.
        answer = self.client_session.answer_to(request) if self.client_session is not None else None
        try:
            if answer is None:
                self._server.quota.reserve(nbytes)
        except RequestRefused as refused:
            answer = self._unsure(request) or refused.reply(self, request)
        if answer is not None:
            self.answer(answer)
        return answer is not None

    def release_memory(self, nbytes: int) -> None:
        self._server.quota.arriving_nbytes -= nbytes

    def _work(self, in_turns: bool = True) -> None:
        """Execute the requests that have arrived, while the client reads the replies, and yield after a long one."""
        server, todo = self._server, self._todo
        execute, peek, pack = server.state.execute, server.state.keys.peek, server.pack
        before = len(todo)
        while todo and not self.paused and self._transport is not None:
            if self._out_nbytes >= TOGETHER_NBYTES:
                self.flush()
            message = todo.popleft()
            match message:  # the fast path of the most frequent request
                case [int(request), Op.GET, str(key)] if (value := peek(key)) is not None and len(value) <= LONG_NBYTES:
                    self.put(pack((request, OperationKind.RESULT, value)))
                    continue
            request, op, args = decode_request(message)
            if op in CHANGING and self.client_session is not None:
                self._change(self.client_session, request, op, args)
            elif op in LEASED and self.client_session is None:
                raise ProtocolError("a lease of a client without a session")
            elif op in SERVERS or op is Op.LEAVE:
                self._serve(request, op, args)
            else:
                server.deliver(execute(self, request, op, args), self)
                if op is Op.CANCEL:  # the rest of a long reply is not sent
                    self._queued.pop(args[0], None)
            if op in SWEEPING and todo and in_turns:
                self._yield_turn()
        server.num_requests += before - len(todo)
        self.flush()
        if todo and self._transport is not None:
            self._transport.pause_reading()

    def _change(self, client_session: ClientSession, request: int, op: Op, args: tuple[Any, ...]) -> None:
        """Apply a change once, also if the client repeats it over another connection."""
        server = self._server
        before = client_session.answer_to(request)
        unsure = self._unsure(request) if request <= self._last_before else None
        if before is None and op not in REPEATABLE:
            before = unsure
        if before is not None:
            self.answer(before)
            return
        replies = server.state.execute(self, request, op, args)
        if unsure is None:  # otherwise it would replace the reply to another request
            client_session.remember(replies[-1])
        server.deliver(replies, self)

    def _unsure(self, request: int) -> Reply | None:
        """Return the reply to a request that may have been executed for an earlier connection; None to any other."""
        if self.client_session is None or request > min(self._last_before, self.client_session.unsure):
            return None
        text = "more changes were under way than the store keeps replies to"
        return RequestRefused(Reason.UNSURE, text).reply(self, request)

    def _serve(self, request: int, op: Op, args: tuple[Any, ...]) -> None:
        server = self._server
        if op is Op.RESUME or op is Op.STATUS:
            result = server.status() if op is Op.STATUS else self.resume(*args)
            server.deliver([Reply(self, request, OperationKind.RESULT, result)], self)
        elif op is Op.RECEIVED:
            if self.client_session is not None:
                self.client_session.received(*args)
        elif op is Op.LEAVE:
            server.deliver(server.state.leave(self), self)
            if self.client_session is not None:
                server.sessions.close(self.client_session)
                server.deliver(server.state.expire(self.client_session.identity), self)
                self.client_session = None
        elif op is Op.OPEN_SCOPED_STORE:
            assert self.client_session is not None
            server.open_scoped_store(self, self.client_session.identity, request, *args)
        else:
            raise AssertionError(op)

    def resume(self, identity: bytes, lease: int) -> tuple[str, bool, bool]:
        """Serve a client, once, before its first change. Its session outlives a broken connection by ``lease`` ms.

        Returns:
            The server's lineage, whether it remembers the client, and whether another server may follow here.
        """
        server = self._server
        session, known, before = server.sessions.open(identity, lease / 1e3, self)
        if isinstance(before, Session) and before is not self:  # its client repeats the unanswered requests here
            before._todo.clear()
            before.abort()
            server.dismiss(before)
        if self.client_session is not None:
            raise ProtocolError("a client that resumes its session twice on one connection")
        self.client_session = session
        self._last_before = session.last
        server.deliver(server.state.bind(self, identity), self)
        return server.lineage, known, server.stays

    def end_if_vanished(self) -> None:
        # A look takes some microseconds: idle clients and those that talk need none.
        if self._has_heard or not self._has_sent:
            self._has_heard = False
        elif self._host_watch.has_vanished():
            logger.warning("store: the server disconnects %s: %s", self.peer, self._host_watch.why())
            self.abort()
        else:
            self._has_sent = self._host_watch.is_waiting

    # -- replies ----------------------------------------------------------------------------------

    def answer(self, reply: Reply) -> None:
        message = self._encoded(reply)
        if isinstance(message, bytes) and reply.request not in self._queued:
            self.put(message)
            self._published_nbytes += len(message) if reply.kind is OperationKind.PUBLISHED else 0
            return
        if isinstance(message, bytes):  # a short message of a stream must not overtake a long one
            message = self._long((reply.request, reply.kind, reply.value))
        self.flush()
        self._queued[reply.request] += 1
        self._published_queued_nbytes += len(message) if reply.kind is OperationKind.PUBLISHED else 0
        self._send_when_durable(message)

    def _long(self, fields: tuple[Any, ...]) -> LongMessage:
        return LongMessage(self._server.pack, fields, self._queued.__contains__)

    def _encoded(self, reply: Reply) -> bytes | LongMessage:
        pack, limit = self._server.pack, self._server.limit
        fields = reply.request, reply.kind, reply.value
        nbytes = weight((reply.value,))
        if nbytes <= LONG_NBYTES:
            return pack(fields)
        # A list's size is checked before it is packed: a request may repeat one key many times.
        if nbytes <= limit or type(reply.value) is bytes:
            message = self._long(fields)
            if len(message) <= limit:
                return message
        text = f"the reply would exceed the store's {limit} bytes: ask for fewer keys at a time"
        return pack(RequestRefused(Reason.TOO_LARGE, text).reply(self, reply.request)[1:])

    def _write(self, data: bytes | LongMessage) -> None:
        self._has_sent = True
        if not isinstance(data, LongMessage):
            super()._write(data)
        elif self._transport is not None:
            data.on_done = self._long_sent
            self._parts.add(data)
            self._queued_nbytes += len(data)
            self.paused = self.paused or self._must_pause

    def pause_writing(self) -> None:
        super().pause_writing()
        self._published_nbytes = 0
        self._parts.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._parts.resume()

    def _long_sent(self, message: OutgoingMessage) -> None:
        assert isinstance(message, LongMessage)
        self._queued -= Counter([message.request])
        self._queued_nbytes -= len(message)
        self._published_queued_nbytes -= len(message) if message.kind is OperationKind.PUBLISHED else 0
        self.settle()

    @property
    def _must_pause(self) -> bool:
        if super()._must_pause or not self._queued_nbytes:
            return super()._must_pause
        first = self._parts.first
        return self._queued_nbytes - (len(first) if isinstance(first, LongMessage) else 0) > BACKLOG_NBYTES

    @property
    def _published_waiting_nbytes(self) -> int:
        # The transport does not tell which of the short messages it has sent.
        return self._published_queued_nbytes + min(self._published_nbytes, self.waiting_nbytes)

    def _close_if_sent(self) -> None:
        if not self._queued_nbytes:
            super()._close_if_sent()

    def connection_lost(self, exc: Exception | None) -> None:
        for message in self._inbox.close():
            # None if its head could not be read.
            if message.context is not None:
                message.context.release_memory()
        self._parts.drop()
        super().connection_lost(exc)
        # It refers to this session: the cycle would keep both until the collector runs.
        del self._inbox

    def joined(self, pieces: list[bytes]) -> bytes:
        return framed(pieces)

    def refuse(self, why: str) -> None:
        self._todo.clear()
        super().refuse(why)

    @property
    def unfinished(self) -> bool:
        return bool(self._todo) or not self._inbox.is_between_messages
