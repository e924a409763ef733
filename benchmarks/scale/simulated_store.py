"""A store in a simulated cluster: the real state machine, with requests and replies that take their time."""

from __future__ import annotations

import asyncio
from asyncio import Future
from typing import Any, TypeVar

from asyncdist.base.deadline import Timeout
from asyncdist.net.connection.frames import HEADER_NBYTES
from asyncdist.store.base import AsyncStoreBase, AsyncStream
from asyncdist.store.protocol.codec import packer
from asyncdist.store.protocol.long_messages import weight
from asyncdist.store.protocol.operations import Command, Op, OperationKind, Reply
from asyncdist.store.state.machine import StoreState
from benchmarks.scale.cluster import Cluster, ClusterProcess

T = TypeVar("T")
_FRAME_NBYTES = HEADER_NBYTES + 8
"""The bytes of a reply without its value."""


class SimulatedServer:
    """The server, in a process of its own on the host of rank 0.

    Attributes:
        sent: The bytes of all replies.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.state, self.sent = cluster, StoreState(), 0
        self.process = ClusterProcess(cluster, cluster.hosts[0])
        self.pack = packer()

    def execute(self, client: SimulatedStore, number: int, command: Command[Any]) -> None:
        costs = self.cluster.costs
        for reply in self.state.execute(client, number, *command):
            to, nbytes = reply.client, _FRAME_NBYTES + weight((reply.value,))
            self.sent += nbytes
            to.nbytes += nbytes
            moving = nbytes * costs.nbyte
            self.process.send(to.process, nbytes, moving, costs.answer / 2 + moving, to.answered, reply)


class SimulatedStore(AsyncStoreBase):
    """The client of one rank. Its requests never time out.

    Attributes:
        nbytes: The bytes of all replies to this client.
    """

    def __init__(self, server: SimulatedServer, process: ClusterProcess) -> None:
        self.server, self.process, self.nbytes, self.timeout = server, process, 0, 0.0
        self._open: dict[int, Future[Any]] = {}
        self._last = 0

    @classmethod
    async def connect(cls, server: SimulatedServer, process: ClusterProcess) -> SimulatedStore:
        """Connect to the server."""
        connected = asyncio.get_running_loop().create_future()
        costs = server.cluster.costs
        process.send(server.process, 0, costs.connect, costs.accept, connected.set_result, None)
        await connected
        return cls(server, process)

    def request(self, command: Command[T], timeout: Timeout = None) -> Future[T]:
        future: Future[T] = asyncio.get_running_loop().create_future()
        number = self._send(command)
        self._open[number] = future
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def _send(self, command: Command[Any]) -> int:
        self._last += 1
        costs = self.server.cluster.costs
        nbytes = HEADER_NBYTES + len(self.server.pack((self._last, *command[:1], *command.args)))
        moving = nbytes * costs.nbyte
        self.process.send(
            self.server.process, nbytes, costs.answer / 2 + moving, costs.request + moving,
            self.server.execute, self, self._last, command,
        )  # fmt: skip
        return self._last

    def _cancel(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self._send(Command(Op.CANCEL, (number,)))

    def answered(self, reply: Reply) -> None:
        """Take a reply."""
        future = self._open.pop(reply.request, None)
        if future is not None and not future.done():
            if reply.kind is OperationKind.RESULT:
                future.set_result(reply.value)
            else:
                future.set_exception(RuntimeError(f"the simulated store refused a request: {reply.value}"))

    host = "127.0.0.1"

    async def take(self, command: Command[T], timeout: Timeout = None) -> T:
        return await self.request(command)

    def stream(self, command: Command[Any], hidden: str = "") -> AsyncStream[Any]:
        raise NotImplementedError("no rank watches a key while a world starts")

    async def close(self) -> None:
        """Do nothing: a connection that is kept costs no time."""
