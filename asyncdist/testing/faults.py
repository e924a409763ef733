"""Faults for tests: a proxy that delays, blocks and cuts connections, a misbehaving peer, and cancellation at any step.

    with proxied_world(2) as world:                       # every connection goes through its own proxy
        world.proxies[0, 1].cut_after(1000)               # what rank 0 sends to rank 1
        await world.groups[0].all_reduce(tensor)          # raises PeerLostError

    for number in itertools.count():                      # until the coroutine ends before the cancellation
        task = asyncio.ensure_future(cancelled_at(number, coroutine()))

For processes that are killed and frozen see `asyncdist.testing.processes`.
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

from asyncdist.base.auth import Handshake, HandshakeDriver, dial
from asyncdist.config import Config
from asyncdist.engine.endpoint import Endpoint
from asyncdist.groups.group import Group
from asyncdist.testing.stopwatch import Stopwatch
from asyncdist.transport import registry

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds after which waiting for a proxy or a peer is an error."""

# Socket buffer size on either side of a proxy, small so that a clogged proxy holds little.
_BUFFER_NBYTES = 1 << 16


class Proxy:
    """A TCP proxy at ``address`` in front of the ``target`` ``(host, port)``, in its own thread.

    All methods are thread-safe.

    Two faults are attributes that may be set at any time: ``delay`` (seconds before each chunk is passed on, in both
    directions) and ``chunk_nbytes`` (the longest chunk). ``passed_nbytes`` counts the bytes passed on towards the target;
    ``cut_at`` is the monotonic time of the latest cut, and ``since_cut`` a `Stopwatch` started then.
    """

    def __init__(self, host: str, port: int) -> None:
        self.delay = 0.0
        self.chunk_nbytes = 1 << 16
        self.passed_nbytes = 0
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
        self._hold = math.inf
        self._held = asyncio.Event()
        self._loop.add_reader(self._listener, self._accept)
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    # -- faults --------------------------------------------------------------------------------

    def clog(self) -> None:
        """Stop reading and passing on, until `unclog`."""
        self._call(self._gate.clear)

    def unclog(self) -> None:
        """Pass on again."""
        self._call(self._gate.set)

    def cut(self) -> None:
        """Reset every connection, like the death of a host. New connections are accepted."""
        self._call(self._cut)

    def cut_after(self, nbytes: int) -> None:
        """`cut` once, when exactly ``nbytes`` have been passed on towards the target over all connections."""
        self._limit = nbytes

    def hold_after(self, nbytes: int) -> None:
        """Pass the bytes after the first ``nbytes`` on towards the target only after `release`."""
        self._call(self._held.clear)
        self._hold = nbytes

    def release(self) -> None:
        """Pass on the held bytes."""
        self._call(self._held.set)

    def refuse(self) -> None:
        """Refuse new connections. Existing ones continue."""
        self._call(self._refuse)

    @property
    def num_connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def until(self, true: Callable[[], object]) -> None:
        """Wait until something is so that changes only as bytes or connections pass; TimeoutError if it never is."""
        with self._changed:
            if not self._changed.wait_for(true, PATIENCE):
                raise TimeoutError(f"still not so, with {self.passed_nbytes} bytes passed on")

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

    def _note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _cut(self) -> None:
        self.cut_at, self.since_cut = time.monotonic(), Stopwatch()
        for sockets in self._connections.values():
            for sock in sockets:
                # No linger: closing throws away what is under way, and the other side gets a reset, not an end.
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
        except OSError:  # the connection is closed already
            return
        far = socket.socket(near.family, socket.SOCK_STREAM)
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        task = self._loop.create_task(self._connect(near, far))
        self._connections[task] = (near, far)
        task.add_done_callback(self._ended)
        self._note()

    def _ended(self, task: asyncio.Task[None]) -> None:
        for sock in self._connections.pop(task):
            sock.close()
        self._note()

    async def _connect(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await self._loop.sock_connect(far, self.target)
            await asyncio.gather(self._pass_on(near, far, forth=True), self._pass_on(far, near, forth=False))

    async def _pass_on(self, source: socket.socket, sink: socket.socket, *, forth: bool) -> None:
        while chunk := await self._loop.sock_recv(source, self.chunk_nbytes):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self._gate.wait()
            if forth and self._limit is not None:
                chunk = chunk[: max(0, self._limit - self.passed_nbytes)]
            if forth and self.passed_nbytes + len(chunk) > self._hold:
                await self._held.wait()
            await self._loop.sock_sendall(sink, chunk)
            if forth:
                self.passed_nbytes += len(chunk)
                self._note()
                if self.passed_nbytes == self._limit:
                    self._limit = None
                    self._cut()
                    await asyncio.sleep(0)  # this task is cancelled here
        sink.shutdown(socket.SHUT_WR)


# -- worlds by hand -------------------------------------------------------------------------------


@dataclass
class ProxiedWorld:
    """Ranks of this process, each of whose connections goes through its own `Proxy`.

    ``groups`` and ``meshes`` by rank; ``proxies[writer, reader]`` is what the one rank's connections to the other go
    through: a connection carries messages from who opened it.
    """

    meshes: list[Endpoint]
    groups: list[Group]
    proxies: dict[tuple[int, int], Proxy]
    _made: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def new_group(self, ranks: list[int], timeout: float = PATIENCE) -> dict[int, Group]:
        """Make a group of some ranks; return it by rank."""
        nonce = next(self._made)
        return {rank: Group(self.meshes[rank], ranks, f"ranks {ranks}", timeout, nonce=nonce) for rank in ranks}


@contextlib.contextmanager
def proxied_world(
    size: int, *, timeout: float = PATIENCE, config: Config | None = None, home: asyncio.AbstractEventLoop | None = None
) -> Iterator[ProxiedWorld]:
    """Run a world of ``size`` ranks over tcp in this process, without a store, with a proxy for each connection.

    ``home`` is the loop that drives them; None for blocking calls, with one thread per rank. ``timeout`` is the operations'
    timeout in seconds.
    """
    config = config or Config(token=secrets.token_hex(8))
    kinds = registry.selected("tcp")
    world_id = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        meshes = [Endpoint(rank, size, world_id, config, kinds, home) for rank in range(size)]
        for mesh in meshes:
            stack.callback(mesh.close)
        listening = [mesh.listen("127.0.0.1")["tcp"] for mesh in meshes]
        proxies = {
            (writer, reader): stack.enter_context(Proxy(listening[reader]["host"], listening[reader]["port"]))
            for writer in range(size)
            for reader in range(size)
            if writer != reader
        }
        for rank, mesh in enumerate(meshes):
            mesh.transport_selector.set_addresses(
                [_behind(proxies.get((rank, peer)), listening[peer]) for peer in range(size)]
            )
            mesh.finalize([{}] * size)
        yield ProxiedWorld(meshes, [Group(mesh, range(size), "world", timeout) for mesh in meshes], proxies)


def _behind(proxy: Proxy | None, listening: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"tcp": listening if proxy is None else {"host": proxy.address[0], "port": proxy.address[1]}}


# -- peers that misbehave -------------------------------------------------------------------------


def greet(sock: socket.socket, steps: Handshake) -> None:
    """Run a handshake over a blocking socket."""
    driver = HandshakeDriver(steps, sock.sendall)
    while not driver.done:
        data = sock.recv(driver.missing)
        if not data:
            raise ConnectionResetError("closed during the handshake")
        driver.feed(data)


def impostor(address: tuple[str, int], world_id: str, rank: int, token: str | None) -> socket.socket:
    """Connect to a rank's tcp listener as ``rank`` of its world would; return the socket, to say anything on it."""
    from asyncdist_transports.tcp.connection import HELLO

    sock = socket.create_connection(address, PATIENCE)
    try:
        greet(sock, dial(token, f"peer of world {world_id}", secrets.token_bytes(32)))
        sock.sendall(HELLO.pack(rank, 0))
    except BaseException:
        sock.close()
        raise
    return sock


# -- bad moments ----------------------------------------------------------------------------------


@types.coroutine
def cancelled_at(number: int, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await a coroutine in a task that is cancelled when it suspends for the ``number``-th time, counted from 0."""
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    suspended = 0
    while True:
        try:
            future = resume(value)
        except StopIteration as over:
            result: T = over.value
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
