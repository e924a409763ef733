"""A store that is restarted with its journal: the real clients and servers, on the connections of a simulated cluster."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.net.listening import BACKLOG
from asyncdist.store.client import connect
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.server.accept import PendingConnection
from asyncdist.store.server.server import StoreServer
from benchmarks.scale.cluster import Cluster, ClusterHost, ClusterProcess, Costs, Shape

_PORT, _KEY = 1, "released"
_LOOK = 0.01
"""Seconds between two looks at whether all are served, at most."""
_FIRST_REPEAT = 1.0
"""Seconds after which a kernel asks again for a connection, if the other one's queue was full."""
_LONG, _LATER = 1e3, 1e6
"""Seconds in which a store returns, and seconds that no simulated client waits."""


async def restart(shape: Shape, costs: Costs, downtime: float) -> tuple[float, float]:
    """Let all ranks wait for a key of a store, which ends and returns.

    Returns:
        The seconds from its return until it serves all ranks again, and its processor time of these.
    """
    loop, size, cluster = asyncio.get_running_loop(), shape.size, Cluster(shape, costs)
    store, config = _Store(cluster), Config().with_(store_max_connections=size + 1, store_reconnect=_LATER)
    with (
        patch.object(loop, "create_connection", store.connect),
        patch("time.monotonic", loop.time),
        # Each of many clients would tell that it waits.
        patch.object(connect.log, "disabled", True),
    ):
        store.server = StoreServer(config, None, stays=True)
        addresses = (str(ipaddress.ip_address((127 << 24) + rank)) for rank in range(size))
        clients = await asyncio.gather(
            *(AsyncStore.connect(address, _PORT, config=config, timeout=_LATER) for address in addresses)
        )
        waiting = [client.get(_KEY) for client in clients]
        await store.serves(size)
        async for _ in Backoff(_LOOK, _LOOK):
            # Only a client that has an answer knows that the store may return.
            if all(client.connection.protocol.stays for client in clients):
                break
        await store.end_and_return(downtime)
        returned, used = cluster.now(), store.process.used
        await store.serves(size)
        back, busy = cluster.now() - returned, store.process.used - used
        await clients[0].set(_KEY, b"")
        # Nobody was lost, and none had to connect twice.
        assert await asyncio.gather(*waiting) == [b""] * size
        assert not any(client.expiries for client in clients)
        assert store.server.admission.num_admitted == size
    return back, busy


class _Store:
    """The process of a store, on a host of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self.process = cluster, ClusterProcess(cluster, ClusterHost(1))
        self.server: StoreServer | None = None
        self._num_unaccepted = 0

    async def serves(self, number: int) -> None:
        """Return when a number of requests wait."""
        assert self.server is not None
        async for _ in Backoff(_LOOK, _LOOK, Deadline.after(_LONG)):
            if self.server.state.num_open >= number:
                return
        raise RuntimeError(f"{self.server.state.num_open} of {number} simulated clients are served")

    async def end_and_return(self, downtime: float) -> None:
        """End, which closes all connections, and serve the same contents again after some seconds."""
        before, self.server = self.server, None
        assert before is not None
        contents, members = before.state.gather()(), before.sessions.gather()()
        before.drop_all()
        await asyncio.sleep(downtime)
        after = StoreServer(before.config, None, stays=True)
        after.state.restore(contents)
        after.sessions.restore(members, self._cluster.now())
        after.lineage, self._num_unaccepted, self.server = before.lineage, 0, after

    async def connect(self, protocol: Callable[[], Any], host: str, port: int, **options: object) -> None:
        """Connect the rank that calls the store by this host; in place of the loop's ``create_connection``."""
        costs, process = self._cluster.costs, self._cluster.processes[int(ipaddress.ip_address(host)) - (127 << 24)]
        pause = _FIRST_REPEAT
        await asyncio.sleep(2 * costs.latency)
        while self.server is not None and self._num_unaccepted >= BACKLOG:
            await asyncio.sleep(pause)
            pause *= 2
        server = self.server
        if server is None:
            raise ConnectionRefusedError("it has ended")
        # Each side has two messages for the handshake.
        client = _End(process, protocol(), [costs.connect / 4] * 2, costs.answer / 2)
        other = _End(self.process, PendingConnection(server), [costs.accept / 4] * 2, costs.request)
        client.peer, other.peer = other, client
        self._num_unaccepted += 1

        def accept() -> None:
            self._num_unaccepted -= 1
            if self.server is server:
                other.open()

        self._cluster.at(self.process.work(costs.accept / 2), accept)
        process.work(costs.connect / 2)
        client.open()


class _LocalSocket:
    """Stands for the sockets of all connections, which are local ones to the code that looks."""

    family = socket.AF_UNIX

    @staticmethod
    def getpeername() -> str:
        return ""


class _End(asyncio.Transport):
    """One end of a connection.

    Args:
        first: The processor time of the first messages that it receives.
        each: The processor time of each other one.
    """

    def __init__(self, process: ClusterProcess, protocol: asyncio.Protocol, first: list[float], each: float) -> None:
        super().__init__({"socket": _LocalSocket})
        self.peer = self
        self._process, self._protocol, self._first, self._each = process, protocol, first, each
        self._is_open = True

    def open(self) -> None:
        self._protocol.connection_made(self)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def write(self, data: Any) -> None:
        if self._is_open:
            peer = self.peer
            seconds = peer._first.pop() if peer._first else peer._each
            self._process.send(peer._process, len(data), 0.0, seconds, peer._receive, bytes(data))

    def _receive(self, data: bytes) -> None:
        if self._is_open:
            self._protocol.data_received(data)

    def abort(self) -> None:
        if self._is_open:
            self._lose()
            self._process.send(self.peer._process, 0, 0.0, 0.0, self.peer._lose)

    close = abort

    def _lose(self) -> None:
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def pause_reading(self) -> None:
        """Do nothing: no end sends more than the other reads."""

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0
