"""A client of this package, at the server: frames become requests, and replies become frames.

Long messages are sent in chunks (`protocol.chunking`), and short ones pass between the chunks. A value in transfer counts
against the store's memory, and is dropped with its connection. A client with an identity may reconnect and repeat its
unanswered requests; each change is applied once (`state.sessions`). It does not import the server.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any, Protocol

from asyncdist.errors import ProtocolError
from asyncdist.store.protocol.chunk_sender import ChunkSender
from asyncdist.store.protocol.chunking import FRAME_NBYTES, LONG_NBYTES, ChunkedMessage, Reassembler, answer_piece
from asyncdist.store.protocol.codec import TOGETHER_NBYTES, FrameParser, decode_request, framed, messages_in
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
from asyncdist.store.server.connection import BACKLOG_NBYTES, ConnectionContext, ServerConnection
from asyncdist.store.state.limits import MemoryQuota
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import RequestRefused
from asyncdist.store.state.sessions import ClientSession


class SessionContext(ConnectionContext, Protocol):
    """What a session of the store's own protocol needs of its server."""

    state: StoreState
    quota: MemoryQuota
    num_requests: int

    def pack(self, message: tuple[Any, ...], /) -> bytes:
        """Encode one message."""

    def encode(self, reply: Reply) -> bytes | ChunkedMessage:
        """Return the message of a reply."""

    def deliver(self, replies: list[Reply], asking: ServerConnection | None) -> None:
        """Put replies into the connections that they are for."""

    def resume(self, connection: Session, identity: bytes, lease: int) -> tuple[str, bool, bool]:
        """Bind a connection to the client session ``identity``."""

    def close_session(self, connection: Session) -> None:
        """Close the client session of a connection."""

    def open_scoped_port(self, connection: Session, request: int, prefix: str) -> None:
        """Open a port with an empty store behind it, until the lease on ``prefix`` ends; the reply follows."""

    def status(self) -> dict[str, Any]:
        """Return what ``asyncdist store status`` shows."""


class Session(ServerConnection):
    """One authenticated client of this package's protocol."""

    __slots__ = (
        "_arriving",
        "_carrier",
        "_expected_nbytes",
        "_in_line",
        "_in_line_nbytes",
        "_last_before",
        "_parser",
        "_published_in_line_nbytes",
        "_published_nbytes",
        "_todo",
        "member",
    )

    _server: SessionContext

    def __init__(self, server: SessionContext, transport: asyncio.Transport, peer: str) -> None:
        super().__init__(server, transport, peer)
        self._parser = FrameParser(FRAME_NBYTES)
        self._arriving = Reassembler(server.limit)
        self._expected_nbytes = 0  # of what is arriving, counted against the store's memory
        self._in_line: Counter[int] = Counter()  # requests with long replies that wait or are under way, and are wanted
        self._in_line_nbytes = 0  # of those that nothing holds up but the socket
        self._carrier = ChunkSender(transport.write, self._in_line.__contains__, asyncio.get_running_loop().call_soon)
        self._published_nbytes = 0  # of short messages from others, since the socket takes no more
        self._published_in_line_nbytes = 0  # of their long ones that have not been sent
        self._todo: deque[Any] = deque()
        self.member: ClientSession | None = None
        self._last_before = 0  # of the client's requests over earlier connections

    def receive(self, data: bytes) -> None:
        for frame in self._parser.feed(data) if data else ():
            if len(frame) > LONG_NBYTES or self._arriving.busy:
                self._take(frame)
            else:
                self._todo.extend(messages_in(frame))
        self._work()

    def _take(self, frame: bytes | bytearray) -> None:
        """Take a frame that may be a piece, or belong to pieces."""
        for message in self._arriving.messages_in(frame):
            match message:
                case [int(request), Op.PIECE, int(number), bytes(piece)]:
                    self._take_piece(request, number, piece)
                case _:
                    self._todo.append(message)
        self._recount()

    def _take_piece(self, request: int, number: int, piece: bytes) -> None:
        self._arriving.add(number, piece)
        self._recount()
        more = self._arriving.nbytes - self._expected_nbytes
        if more <= 0:
            return
        self._work(in_turns=False)  # what came before may make room
        answer = self.member.answer_to(request) if self.member is not None else None  # no room for what is done already
        try:
            if answer is None:
                self._server.quota.reserve(more)
                self._expected_nbytes += more
        except RequestRefused as refused:
            answer = self._unsure(request) or Reply(
                self, request, OperationKind.REFUSED, (int(refused.reason), refused.text)
            )
        if answer is not None:
            self._arriving.waste()
            self.answer(answer)

    def _recount(self) -> None:
        """Release the memory reserved for a chunked message that is complete or abandoned."""
        if self._expected_nbytes and not self._arriving.nbytes:
            self._server.quota.arriving_nbytes -= self._expected_nbytes
            self._expected_nbytes = 0

    def _work(self, in_turns: bool = True) -> None:
        """Execute what has been read, as long as the client takes the replies, and no longer than others can wait."""
        server, todo = self._server, self._todo
        execute, peek, pack = server.state.execute, server.state.keys.peek, server.pack
        before = len(todo)
        while todo and not self.paused and self._transport is not None:
            if self._out_nbytes >= TOGETHER_NBYTES:
                self.flush()
            message = todo.popleft()
            match message:  # by far the most of what comes in rows, made short
                case [int(request), Op.GET, str(key)] if (value := peek(key)) is not None and len(value) <= LONG_NBYTES:
                    self.put(pack((request, OperationKind.RESULT, value)))
                    continue
            request, op, args = decode_request(message)
            if op in CHANGING and self.member is not None:
                self._change(self.member, request, op, args)
            elif op in LEASED and self.member is None:
                raise ProtocolError("a lease of a client without a session")
            elif op in SERVERS or op is Op.LEAVE:
                self._serve(request, op, args)
            else:
                server.deliver(execute(self, request, op, args), self)
                if op is Op.CANCEL:  # the rest of a long reply is not wanted
                    self._in_line.pop(args[0], None)
            if op in SWEEPING and todo and in_turns:
                self._rest()
        server.num_requests += before - len(todo)
        self.flush()
        if todo and self._transport is not None:
            self._transport.pause_reading()

    def _change(self, member: ClientSession, request: int, op: Op, args: tuple[Any, ...]) -> None:
        """Apply a change once, also if the client repeats it over another connection."""
        server = self._server
        before = member.answer_to(request)
        unsure = self._unsure(request) if request <= self._last_before else None
        if before is None and op not in REPEATABLE:
            before = unsure
        if before is not None:
            self.answer(before)
            return
        replies = server.state.execute(self, request, op, args)
        if unsure is None:  # it would take the place of another answer
            member.remember(replies[-1])
        server.deliver(replies, self)

    def _unsure(self, request: int) -> Reply | None:
        """Return the answer to what may have been done for an earlier connection, and nobody knows any more."""
        if self.member is None or request > min(self._last_before, self.member.unsure):
            return None
        why = (int(Reason.UNSURE), "more changes were under way than the store keeps answers to")
        return Reply(self, request, OperationKind.REFUSED, why)

    def _serve(self, request: int, op: Op, args: tuple[Any, ...]) -> None:
        """Execute a request that concerns the session or the server, not the stored state."""
        server = self._server
        if op is Op.RESUME:
            server.deliver([Reply(self, request, OperationKind.RESULT, server.resume(self, *args))], self)
        elif op is Op.RECEIVED:
            if self.member is not None:
                self.member.received(*args)
        elif op is Op.STATUS:
            server.deliver([Reply(self, request, OperationKind.RESULT, server.status())], self)
        elif op is Op.LEAVE:
            server.deliver(server.state.leave(self), self)
            server.close_session(self)
        elif op is Op.OPEN_SCOPED_STORE:
            server.open_scoped_port(self, request, *args)
        else:
            raise ProtocolError("a piece of a message that has no other")

    def bind(self, member: ClientSession) -> None:
        """Know who this is; it says so once, before it changes anything."""
        if self.member is not None:
            raise ProtocolError("a client that says twice who it is")
        self.member = member
        self._last_before = member.last

    def supersede(self) -> None:
        """The client has come back over another connection, and will ask again what is still to be done here."""
        self._todo.clear()
        self.abort()

    # -- replies ----------------------------------------------------------------------------------

    def answer(self, reply: Reply) -> None:
        message = self._server.encode(reply)
        if isinstance(message, bytes) and reply.request not in self._in_line:
            self.put(message)
            self._published_nbytes += len(message) if reply.kind is OperationKind.PUBLISHED else 0
            return
        if isinstance(message, bytes):  # a stream's next message, which is not to come before a long one
            message = ChunkedMessage(self._server.pack, (reply.request, reply.kind, reply.value), answer_piece)
        self.flush()
        self._in_line[reply.request] += 1
        self._published_in_line_nbytes += len(message) if reply.kind is OperationKind.PUBLISHED else 0
        self._pass_on(message)

    def _write(self, data: bytes | ChunkedMessage) -> None:
        if not isinstance(data, ChunkedMessage):
            super()._write(data)
        elif self._transport is not None:
            self._carrier.send(data, self._chunks_sent)
            self._in_line_nbytes += len(data)
            self.paused = self.paused or self._backpressured

    def pause_writing(self) -> None:
        super().pause_writing()
        self._published_nbytes = 0
        self._carrier.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._carrier.resume()

    def _chunks_sent(self, parcel: ChunkedMessage) -> None:
        self._in_line -= Counter([parcel.request])
        self._in_line_nbytes -= len(parcel)
        self._published_in_line_nbytes -= len(parcel) if parcel.kind is OperationKind.PUBLISHED else 0
        self.settle()

    @property
    def _backpressured(self) -> bool:
        return super()._backpressured or self._in_line_nbytes - self._carrier.nbytes_under_way > BACKLOG_NBYTES

    @property
    def _unasked_nbytes(self) -> int:
        # Of what is short nobody knows when it has left the socket: no more of it waits there than all that waits there.
        return self._published_in_line_nbytes + min(self._published_nbytes, self.waiting_nbytes)

    def _hang_up(self) -> None:
        if not self._carrier.busy:
            super()._hang_up()
        elif self._transport is not None:
            self._closing = self.paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving.drop()
        self._recount()
        self._carrier.drop()
        super().connection_lost(exc)

    def joined(self, pieces: list[bytes]) -> bytes:
        return framed(pieces)

    def refuse(self, why: str) -> None:
        self._todo.clear()
        super().refuse(why)

    @property
    def unfinished(self) -> bool:
        return bool(self._parser.pending or self._todo or self._arriving.busy)
