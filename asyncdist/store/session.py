"""A client of ours, at the server: frames become requests, replies become frames."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from asyncdist.store.connection import BATCH_NBYTES, Connection
from asyncdist.store.messages import FrameParser, decode_request
from asyncdist.store.operations import DOORS, Reply

if TYPE_CHECKING:
    from asyncdist.store.server import StoreServer


class Session(Connection):
    """One client that speaks our protocol, and has proved that it may."""

    __slots__ = ("_parser", "_todo")

    def __init__(self, server: StoreServer, transport: asyncio.Transport, peer: str) -> None:
        super().__init__(server, transport, peer)
        self._parser = FrameParser(server.limit)
        self._todo: deque[bytes | bytearray] = deque()

    def receive(self, data: bytes) -> None:
        if data:
            self._todo.extend(self._parser.feed(data))
        self._work()

    def _work(self) -> None:
        """Execute what has been read, as long as the client takes the replies."""
        server, execute = self._server, self._server.state.execute
        while self._todo and not self._paused and self._transport is not None:
            request, op, args = decode_request(self._todo.popleft())
            if op in DOORS:
                server.doors.execute(self, request, op, args)
            else:
                server.deliver(execute(self, request, op, args), self)
            if self._out_nbytes >= BATCH_NBYTES:
                self.flush()
        self.flush()
        if self._todo and self._transport is not None:
            self._transport.pause_reading()

    def answer(self, reply: Reply) -> None:
        self.put(self._server.encode(reply))

    def refuse(self, why: str) -> None:
        self._todo.clear()
        super().refuse(why)

    @property
    def unfinished(self) -> bool:
        return bool(self._parser.pending or self._todo)
