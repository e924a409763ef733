"""How two ranks of one host become neighbours: over a Unix socket, on which each proves itself and hands over its memory.

Every rank listens at an abstract address, which no file system knows and which ends with it. Abstract addresses belong to a
network namespace; for peers in another one, and only if there are any, a rank also opens a *door*: a socket that had a
name for some microseconds, and is reached through the descriptor that holds it (``/proc/<pid>/fd/<descriptor>``). The name of a
rank that was killed just then is removed by who next opens a door.

    dialler (the higher rank)                acceptor
    proof of the job's token           ⇄     proof of the job's token
    rank, size, board, arena           →
                                       ←     rank, size, board, arena     or why not, in words
    welcome, or why not, in words      →
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.auth import Handshake, accept, dial
from asyncdist.base.network import machine_name
from asyncdist.errors import AsyncdistError, ProtocolError
from asyncdist.memory.shared_arena import Arena
from asyncdist.memory.shared_arena import ArenaMapping as ArenaMapping
from asyncdist.transport.base import Host
from asyncdist_transports.shm.control_block import ControlBlock

_INTRODUCTION = struct.Struct("<IQQ")  # rank, bytes of the arena, offset of the board
_PREFIX = "asyncdist-"
"""With which the names of our sockets begin."""

_PACKET_NBYTES = 4096
_PAUSE = 0.005
_WELCOME = b"."
_CREDENTIALS = struct.Struct("3i")

Introduction = tuple[int, ArenaMapping, int]
"""Rank, arena and the offset of the board of a peer."""


class PeerRefused(Exception):
    """A peer does not become our neighbour; the reason in words. ``rank`` is who it is, if it has proven itself."""

    rank: int | None = None


def _namespace(kind: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    return 0


class LocalListener:
    """Where peers find us: the listening socket, and the door for those of other network namespaces.

    Any thread may `close` it, as a process that ends does. What the loop watches then stays open until it watches no more:
    uvloop takes the process down over a watched descriptor that is closed, and its number may soon be another's.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._name = secrets.token_hex(16)
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._watched = self._closed = False
        self._path_descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._sockets.append(_listening(f"\0{_PREFIX}{self._name}"))

    def address(self) -> dict[str, Any]:
        """Return what peers need to know to find us."""
        return {
            "host": self._host.config.host or machine_name(),
            "user": os.getuid(),
            "name": self._name,
            "net": _namespace("net"),
            "pids": _namespace("pid"),
            "pid": os.getpid(),
            "descriptor": self._path_descriptor,
        }

    def listen_by_descriptor(self) -> None:
        """Let peers of other network namespaces in, under the descriptor that `address` has told them."""
        with self._lock:
            if not self._closed:
                self._listen_by_descriptor()

    def _listen_by_descriptor(self) -> None:
        folder = os.open(tempfile.gettempdir(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            inside = f"/proc/self/fd/{folder}"  # an address may have 107 bytes, a folder's name more
            _remove_stale_sockets(inside)
            sock, descriptor = _listening_by_descriptor(f"{inside}/{_PREFIX}{self._name}")
        finally:
            os.close(folder)
        self._sockets.append(sock)
        os.dup2(descriptor, self._path_descriptor, inheritable=False)
        os.close(descriptor)

    async def accept(self) -> socket.socket:
        """Wait for a connection, one caller at a time. On a porch that is closed nobody comes any more."""
        with self._lock:
            self._watched = True
        try:
            while True:
                for sock in self._sockets:
                    with contextlib.suppress(BlockingIOError):
                        accepted, _ = sock.accept()
                        lifecycle.close_in_children(accepted)
                        accepted.setblocking(False)
                        return accepted
                await _any_ready(self._sockets)
        finally:
            with self._lock:
                self._watched = False
                if self._closed:
                    self._close()

    def close(self) -> None:
        """Listen no more, once nobody waits in `accept`. Idempotent."""
        with self._lock:
            self._closed = True
            if not self._watched:
                self._close()

    def _close(self) -> None:
        if self._path_descriptor >= 0:
            os.close(self._path_descriptor)
            self._path_descriptor = -1
        while self._sockets:
            self._sockets.pop().close()


def _listening_by_descriptor(path: str) -> tuple[socket.socket, int]:
    """Return a listening socket, and a descriptor by which it is reached when it has a name no more, as it has not now."""
    while True:
        sock = _listening(path)
        try:
            return sock, os.open(path, os.O_PATH | os.O_CLOEXEC)
        except BaseException as error:
            sock.close()
            if not isinstance(error, FileNotFoundError):  # swept: it seemed dead, as before it listened
                raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_stale_sockets(folder: str) -> None:
    """Remove what is left there of ranks of our user that were killed while their doors had names."""
    names: list[str] = []
    with contextlib.suppress(OSError):  # a folder may be one that nobody lists
        names = os.listdir(folder)
    for name in names:
        if name.startswith(_PREFIX):
            with contextlib.suppress(OSError):  # gone meanwhile, or nothing that we understand
                _remove_if_stale(f"{folder}/{name}")


def _remove_if_stale(path: str) -> None:
    found = os.lstat(path)
    if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
            caller.setblocking(False)
            try:
                caller.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def _listening(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifecycle.close_in_children(sock)
    try:
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(512)
    except BaseException:
        sock.close()
        raise
    return sock


def unreachable_reason(own: Mapping[str, Any], address: Mapping[str, Any]) -> str | None:
    """Return why a peer and we need not even try to meet: as both of us know, neither waits for the other."""
    if address["user"] != own["user"]:
        return f"it runs as another user, {address['user']}"
    if address["net"] != own["net"] and address["pids"] != own["pids"]:
        return "it has another network and another process namespace"
    return None


async def connect_peer(
    address: Mapping[str, Any], host: Host, arena: Arena, control_offset: int
) -> tuple[socket.socket, Introduction]:
    """Go to a peer and become its neighbour. Raises Refused, and TimeoutError of whoever limits us."""
    sock = await _connect(address)
    try:
        await _authenticate(sock, dial(host.config.token, _purpose(host), secrets.token_bytes(32)))
        await _send_introduction(sock, host, arena, control_offset)
        introduction = await _receive_introduction(sock, host)
        await _send(sock, _WELCOME)
        return sock, introduction
    except BaseException:
        sock.close()
        raise


async def accept_peer(
    sock: socket.socket, host: Host, arena: Arena, control_offset: int, expected: Collection[int]
) -> Introduction:
    """Let a visitor become our neighbour if it is one of those expected. Raises Refused; closes the connection then."""
    rank: int | None = None
    try:
        _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.getuid():
            raise PeerRefused(f"it runs as another user, {user}")
        await _authenticate(sock, accept(host.config.token, _purpose(host), secrets.token_bytes(32)))
        introduction = await _receive_introduction(sock, host, expected)
        rank = introduction[0]
        await _send_introduction(sock, host, arena, control_offset)
        reply, _ = await _accept_peers(sock)
        if reply != _WELCOME:
            raise PeerRefused(_decode_reason(reply))
        return introduction
    except PeerRefused as refusal:
        refusal.rank = rank if refusal.rank is None else refusal.rank
        sock.close()
        raise
    except BaseException:
        sock.close()
        raise


def _purpose(host: Host) -> str:
    return f"shm peer of world {host.world_id}"


async def _connect(address: Mapping[str, Any]) -> socket.socket:
    same_network = address["net"] == _namespace("net")
    path = f"\0{_PREFIX}{address['name']}" if same_network else f"/proc/{address['pid']}/fd/{address['descriptor']}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifecycle.close_in_children(sock)
    sock.setblocking(False)
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:  # many are before us
                await asyncio.sleep(_PAUSE)
            except ConnectionRefusedError:
                if same_network:
                    raise
                await asyncio.sleep(_PAUSE)  # the door is not open yet
    except OSError as cause:
        sock.close()
        raise PeerRefused(f"its Unix socket cannot be reached: {cause.strerror}") from cause
    except BaseException:
        sock.close()
        raise


async def _authenticate(sock: socket.socket, handshake: Handshake) -> None:
    """Run a handshake, a packet a message."""
    try:
        step = next(handshake)
        while True:
            if isinstance(step, bytes):
                await _send(sock, step)
                step = next(handshake)
            else:
                packet, _ = await _accept_peers(sock)
                if len(packet) != step:
                    raise ProtocolError(f"a packet of {len(packet)} bytes where {step} were expected")
                step = handshake.send(packet)
    except StopIteration:
        return
    except AsyncdistError as error:
        raise PeerRefused(str(error)) from error


async def _send_introduction(sock: socket.socket, host: Host, arena: Arena, control_offset: int) -> None:
    await _send(sock, _INTRODUCTION.pack(host.rank, arena.nbytes, control_offset), arena.descriptor)


async def _receive_introduction(
    sock: socket.socket, host: Host, expected: Collection[int] | None = None
) -> Introduction:
    """Receive who the peer is, and its memory; tell it if we cannot take it."""
    packet, descriptors = await _accept_peers(sock)
    if len(packet) != _INTRODUCTION.size:
        _close(descriptors)
        raise PeerRefused(_decode_reason(packet))
    rank, nbytes, control_offset = _INTRODUCTION.unpack(packet)
    try:
        if not 0 <= rank < host.world_size or rank == host.rank or (expected is not None and rank not in expected):
            raise PeerRefused(f"it claims to be rank {rank}")
        if len(descriptors) != 1:
            raise PeerRefused("its memory did not come with the packet: descriptors are not passed between us")
        if (
            os.fstat(descriptors[0]).st_size < nbytes
            or control_offset % 8
            or not control_offset + ControlBlock.nbytes(host.world_size) <= nbytes
        ):
            raise PeerRefused("its memory is smaller than it says")
        try:
            return rank, ArenaMapping(descriptors[0], nbytes), control_offset
        except AsyncdistError as error:
            raise PeerRefused(str(error)) from error
    except PeerRefused as refusal:
        refusal.rank = rank
        await _send(sock, str(refusal).encode()[:_PACKET_NBYTES])
        raise
    finally:
        _close(descriptors)


def _decode_reason(packet: bytes) -> str:
    return f"it says: {packet.decode(errors='replace')}" if packet else "it closed the connection"


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# -- packets on the running loop --------------------------------------------------------------------


async def _send(sock: socket.socket, packet: bytes, descriptor: int | None = None) -> None:
    while True:
        try:
            if descriptor is None:
                sock.send(packet)
            else:
                socket.send_fds(sock, [packet], [descriptor])
            return
        except BlockingIOError:
            await asyncio.sleep(_PAUSE)
        except OSError as cause:
            raise PeerRefused(f"the connection ended: {cause.strerror}") from cause


async def _accept_peers(sock: socket.socket) -> tuple[bytes, list[int]]:
    while True:
        try:
            packet, descriptors, _, _ = socket.recv_fds(sock, _PACKET_NBYTES, 4, socket.MSG_CMSG_CLOEXEC)
            return packet, descriptors
        except BlockingIOError:
            await _any_ready([sock])
        except OSError as cause:
            raise PeerRefused(f"the connection ended: {cause.strerror}") from cause


async def _any_ready(socks: list[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not ready.done():
            ready.set_result(None)

    descriptors = [sock.fileno() for sock in socks]
    for descriptor in descriptors:
        loop.add_reader(descriptor, resolve)
    try:
        await ready
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
