"""A client of ours, at the server: frames become requests, replies become frames.

A client that has said who it is may come back over another connection, and ask again what it was not answered: what
changes something is done once (`members`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from asyncdist.errors import ProtocolError
from asyncdist.store.connection import Connection
from asyncdist.store.members import Member
from asyncdist.store.messages import TOGETHER_NBYTES, FrameParser, decode_request, framed, messages_in
from asyncdist.store.operations import CHANGING, SERVERS, Kind, Op, Reply
from asyncdist.store.status import status

if TYPE_CHECKING:
    from asyncdist.store.server import StoreServer


class Session(Connection):
    """One client that speaks our protocol, and has proved that it may."""

    __slots__ = ("_parser", "_todo", "member")

    def __init__(self, server: StoreServer, transport: asyncio.Transport, peer: str) -> None:
        super().__init__(server, transport, peer)
        self._parser = FrameParser(server.limit)
        self._todo: deque[Any] = deque()
        self.member: Member | None = None

    def receive(self, data: bytes) -> None:
        for frame in self._parser.feed(data) if data else ():
            self._todo.extend(messages_in(frame))
        self._work()

    def _work(self) -> None:
        """Execute what has been read, as long as the client takes the replies."""
        server, todo = self._server, self._todo
        execute, peek, pack = server.state.execute, server.state.peek, server.pack
        before = len(todo)
        while todo and not self._paused and self._transport is not None:
            if self._out_nbytes >= TOGETHER_NBYTES:
                self.flush()
            message = todo.popleft()
            match message:  # by far the most of what comes in rows, made short
                case [int(request), Op.GET, str(key)] if (value := peek(key)) is not None:
                    self.put(pack((request, Kind.RESULT, value)))
                    continue
            request, op, args = decode_request(message)
            if op in CHANGING and self.member is not None:
                self._change(self.member, request, op, args)
            elif op in SERVERS or op is Op.LEAVE:
                self._serve(request, op, args)
            else:
                server.deliver(execute(self, request, op, args), self)
        server.num_requests += before - len(todo)
        self.flush()
        if todo and self._transport is not None:
            self._transport.pause_reading()

    def _change(self, member: Member, request: int, op: Op, args: tuple[Any, ...]) -> None:
        """Change something, unless that was done for an earlier connection of this client."""
        server = self._server
        before = member.answer_to(request)
        if before is not None:
            self.put(server.encode(before))
            return
        replies = server.state.execute(self, request, op, args)
        member.remember(replies[-1])
        if op is Op.SET_EPHEMERAL and replies[-1].kind is Kind.RESULT:
            server.state.own(member, args[0])
            if server.book is not None:
                server.book.owned(args[0], member.identity, args[1])
        server.deliver(replies, self)

    def _serve(self, request: int, op: Op, args: tuple[Any, ...]) -> None:
        """Do what concerns the client or the server rather than what is stored."""
        server = self._server
        if op is Op.RESUME:
            server.deliver([Reply(self, request, Kind.RESULT, server.resume(self, *args))], self)
        elif op is Op.RECEIVED:
            if self.member is not None:
                self.member.received(*args)
        elif op is Op.STATUS:
            server.deliver([Reply(self, request, Kind.RESULT, status(server))], self)
        elif op is Op.LEAVE:
            server.deliver(server.state.leave(self), self)
            server.part(self)
        else:
            server.doors.execute(self, request, op, args)

    def come(self, member: Member) -> None:
        """Know who this is; it says so once, before it changes anything."""
        if self.member is not None:
            raise ProtocolError("a client that says twice who it is")
        self.member = member

    def supersede(self) -> None:
        """The client has come back over another connection, and will ask again what is still to be done here."""
        self._todo.clear()
        self.member = None
        self.abort()

    def answer(self, reply: Reply) -> None:
        self.put(self._server.encode(reply))

    def joined(self, pieces: list[bytes]) -> bytes:
        return framed(pieces)

    def refuse(self, why: str) -> None:
        self._todo.clear()
        super().refuse(why)

    @property
    def unfinished(self) -> bool:
        return bool(self._parser.pending or self._todo)
