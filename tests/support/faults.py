"""Faults for tests: a proxy that delays, blocks and cuts connections, an impostor, and cancellation at any suspension.

    with proxied_world(2) as world:                       # every connection goes through its own proxy
        world.proxies[0, 1].cut_after(1000)               # after 1000 bytes from rank 0 to rank 1
        await world.groups[0].all_reduce(tensor)          # raises PeerLostError

    for number in itertools.count():                      # until the coroutine suspends fewer times than this
        task = asyncio.ensure_future(cancelled_at(number, coroutine()))

`benchmarks.processes` kills and stops processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import socket
import struct
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from asyncdist.base.callables import Callback
from asyncdist.config import Config
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.transport import registry
from asyncdist.net.security.auth import Handshake, HandshakeDriver, dial
from tests.support.stopwatch import Stopwatch

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds after which waiting for a proxy or a peer is an error."""

# The size of the socket buffers on either side of a proxy. They are small, so that a clogged proxy holds few bytes.
_BUFFER_NBYTES = 1 << 16


class Proxy:
    """A TCP proxy in front of a server, in its own thread. All methods are thread-safe.

    Args:
        host: The host of the server.
        port: The port of the server.

    Attributes:
        address: The ``(host, port)`` at which the proxy listens.
        target: The ``(host, port)`` of the server.
        delay: Seconds before each chunk is forwarded, in both directions. It may be set at any time.
        chunk_nbytes: The length of the longest chunk in bytes. It may be set at any time.
        passed_nbytes: The number of bytes forwarded to the target.
        cut_at: The monotonic time of the latest cut.
        since_cut: A `Stopwatch` that started at the latest cut.
    """

    def __init__(self, host: str, port: int) -> None:
        self.delay = 0.0
        self.chunk_nbytes = 1 << 16
        self.passed_nbytes = 0
        self._taken_nbytes = 0
        self.cut_at: float | None = None
        self.since_cut: Stopwatch | None = None
        self.target = (host, port)
        self._limit: int | None = None
        self._connections: dict[asyncio.Task[None], tuple[socket.socket, socket.socket]] = {}
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)
        self._listener.setblocking(False)
        self._listener.bind((host, 0))
        self._listener.listen()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._gate.set()
        self._hold_limit = math.inf
        self._released = asyncio.Event()
        self._dropped: set[bool] = set()
        self._loop.add_reader(self._listener, self._accept)
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    # -- faults --------------------------------------------------------------------------------

    def clog(self) -> None:
        """Stop reading and forwarding until `unclog`."""
        self._call(self._gate.clear)

    def unclog(self) -> None:
        """Continue to read and forward."""
        self._call(self._gate.set)

    def cut(self) -> None:
        """Reset every connection, like the death of a host. New connections are accepted."""
        self._call(self._cut)

    def cut_after(self, nbytes: int) -> None:
        """`cut` once, when exactly ``nbytes`` have been forwarded to the target over all connections."""
        self._limit = nbytes

    def hold_after(self, nbytes: int) -> None:
        """Forward the bytes after the first ``nbytes`` to the target only after `release`."""
        self._call(self._released.clear)
        self._hold_limit = nbytes

    def release(self) -> None:
        """Forward the held bytes."""
        self._call(self._released.set)

    def drop(self, *, to_target: bool) -> None:
        """Read and discard the bytes of one direction until `restore`, like a network that loses packets one way.

        Connections that are made until then lose them too.
        """
        self._call(lambda: self._dropped.add(to_target))

    def restore(self) -> None:
        """End `drop`, and reset the connections, whose streams have gaps."""
        self._call(self._dropped.clear)
        self._call(self._cut)

    def refuse(self) -> None:
        """Refuse new connections. The open ones continue."""
        self._call(self._refuse)

    @property
    def num_connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def until(self, true: Callback) -> None:
        """Wait for a condition that changes only with forwarded bytes or connections.

        Raises:
            TimeoutError: The condition is false for `PATIENCE` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(true, PATIENCE):
                raise TimeoutError(f"the condition is false after {self.passed_nbytes} forwarded bytes")

    def close(self) -> None:
        """Cut every connection and stop. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._refuse)
        self._call(self._cut_and_wait)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- on the proxy's own thread -------------------------------------------------------------

    def _call(self, function: Callable[[], Awaitable[None] | None]) -> None:
        async def call() -> None:
            if (result := function()) is not None:
                await result

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _cut(self) -> None:
        self.cut_at, self.since_cut = time.monotonic(), Stopwatch()
        for sockets in self._connections.values():
            for sock in sockets:
                # Without linger, closing discards unsent bytes, and the other side gets a reset instead of an end.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for task in self._connections:
            task.cancel()

    async def _cut_and_wait(self) -> None:
        tasks = list(self._connections)
        self._cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _refuse(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # the client has closed the connection
            return
        far = socket.socket(near.family, socket.SOCK_STREAM)
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        task = self._loop.create_task(self._connect(near, far))
        self._connections[task] = (near, far)
        task.add_done_callback(self._ended)
        self._notify()

    def _ended(self, task: asyncio.Task[None]) -> None:
        for sock in self._connections.pop(task):
            sock.close()
        self._notify()

    async def _connect(self, near: socket.socket, far: socket.socket) -> None:
        # A task group ends both directions before `_ended` closes the sockets: a direction that still waits on a closed
        # socket would spoil the next connection, which may get the same file descriptors.
        with contextlib.suppress(OSError, ExceptionGroup):
            await self._loop.sock_connect(far, self.target)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward(near, far, to_target=True))
                directions.create_task(self._forward(far, near, to_target=False))

    async def _forward(self, source: socket.socket, sink: socket.socket, *, to_target: bool) -> None:
        while chunk := await self._loop.sock_recv(source, self.chunk_nbytes):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._gate.wait()
            if to_target in self._dropped:
                continue
            if to_target:
                # Counted before the bytes are sent: another connection may forward in the meantime.
                if self._limit is not None:
                    chunk = chunk[: max(0, self._limit - self._taken_nbytes)]
                self._taken_nbytes += len(chunk)
            if to_target and self.passed_nbytes + len(chunk) > self._hold_limit:
                await self._released.wait()
            await self._loop.sock_sendall(sink, chunk)
            if to_target:
                self.passed_nbytes += len(chunk)
                self._notify()
                if self.passed_nbytes == self._limit:
                    self._limit = None
                    self._cut()
                    await asyncio.sleep(0)  # this task is cancelled here
        sink.shutdown(socket.SHUT_WR)


# -- a world behind proxies -----------------------------------------------------------------------


@dataclass
class ProxiedWorld:
    """Ranks of this process, each of whose connections goes through its own `Proxy`.

    A connection carries the messages of the rank that opened it.

    Attributes:
        endpoints: The endpoints by rank.
        groups: The groups of all ranks, by rank.
        proxies: By (writer, reader), the proxy of the connections that the writer opens to the reader.
    """

    endpoints: list[Endpoint]
    groups: list[Group]
    proxies: dict[tuple[int, int], Proxy]
    _made: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_group(self, ranks: list[int], timeout: float = PATIENCE) -> dict[int, Group]:
        """Make a group of some ranks; return each rank's `Group` by rank."""
        nonce = next(self._made)
        return {rank: Group(self.endpoints[rank], ranks, f"ranks {ranks}", timeout, nonce=nonce) for rank in ranks}


@contextlib.contextmanager
def proxied_world(
    size: int, *, timeout: float = PATIENCE, config: Config | None = None, home: asyncio.AbstractEventLoop | None = None
) -> Iterator[ProxiedWorld]:
    """Run a world of ``size`` ranks over tcp in this process, without a store, with a proxy for each connection.

    Args:
        size: The number of ranks.
        timeout: The timeout of operations in seconds.
        config: Settings of all ranks; None for the defaults with a random token.
        home: The loop that drives the ranks; None for blocking calls, with one thread per rank.
    """
    config = config or Config(token=secrets.token_hex(8))
    kinds = registry.selected("tcp")
    world_id = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        endpoints = [Endpoint(rank, size, world_id, config, kinds, home) for rank in range(size)]
        for endpoint in endpoints:
            stack.callback(endpoint.close)
        listening = [endpoint.listen("127.0.0.1")[0]["tcp"] for endpoint in endpoints]
        proxies = {
            (writer, reader): stack.enter_context(Proxy(listening[reader]["host"], listening[reader]["port"]))
            for writer in range(size)
            for reader in range(size)
            if writer != reader
        }
        for rank, endpoint in enumerate(endpoints):
            addresses = [_behind(proxies.get((rank, peer)), listening[peer]) for peer in range(size)]
            endpoint.know(addresses, ["host"] * size, {}, {"tcp"})
            endpoint.finalize({})
        yield ProxiedWorld(
            endpoints, [Group(endpoint, range(size), "world", timeout) for endpoint in endpoints], proxies
        )


def _behind(proxy: Proxy | None, listening: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"tcp": listening if proxy is None else {"host": proxy.address[0], "port": proxy.address[1]}}


# -- an impostor ----------------------------------------------------------------------------------


def greet(sock: socket.socket, steps: Handshake) -> None:
    """Run a handshake over a blocking socket."""
    HandshakeDriver(steps, sock.sendall).pump(sock.recv)


def impostor(address: tuple[str, int], world_id: str, rank: int, token: str | None) -> socket.socket:
    """Connect to a rank's tcp listener as ``rank`` of its world does, and return the socket."""
    from asyncdist_transports.tcp.connection import HELLO

    sock = socket.create_connection(address, PATIENCE)
    try:
        greet(sock, dial(token, f"peer of world {world_id}", secrets.token_bytes(32)))
        sock.sendall(HELLO.pack(rank, 0))
    except BaseException:
        sock.close()
        raise
    return sock


# -- cancellation ---------------------------------------------------------------------------------


@types.coroutine
def cancelled_at(number: int, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await a coroutine in a task that is cancelled when it suspends for the ``number``-th time, counted from 0."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    suspended = 0
    while True:
        try:
            future = resume(value)
        except StopIteration as end:
            result: T = end.value
            return result
        if suspended == number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        suspended += 1
        try:
            resume, value = coroutine.send, (yield future)
        except BaseException as thrown:
            resume, value = coroutine.throw, thrown
