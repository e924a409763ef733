"""How two ranks of one host connect: over a Unix socket, on which both prove the job's token and pass their memory.

Every rank listens at an abstract address, which needs no file and ends with the process. Abstract addresses belong to a
network namespace. For peers in another namespace, and only if there are any, a rank also listens at a path: it binds the
socket to a name, opens the socket file, removes the name, and peers connect through the descriptor
(``/proc/<pid>/fd/<descriptor>``). The name of a rank that was killed in between is removed by the next rank that
listens so.

    dialing side (the higher rank)               accepting side
    rank, nonce, proof of the token           →
                                              ←  rank, arena size, control block, proof, arena; or the reason of a refusal
    rank, arena size, control block, arena    →

Both proofs cover the nonce and the random name of the accepting rank's socket, which no other world has seen.

`meetings` runs this.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, cast

from asyncdist.base import lifecycle
from asyncdist.base.backoff import Backoff
from asyncdist.base.descriptors import ClosingOnError, close_all
from asyncdist.errors import AsyncdistError
from asyncdist.kernel.memory.shared_arena import Arena, ArenaMapping
from asyncdist.kernel.transport.base import Host
from asyncdist.net.listening import listen
from asyncdist.net.loop_socket import ready
from asyncdist.net.network import machine_name, namespace
from asyncdist.net.security.auth import NONCE_NBYTES, PROOF_NBYTES, proof
from asyncdist.net.security.handshake import peer_user
from asyncdist_transports.shm.control_block import ControlBlock

# Rank, nonce.
_CALL = struct.Struct(f"<I{NONCE_NBYTES}s")
# Rank, bytes of the arena, offset of the control block.
_INTRODUCTION = struct.Struct("<IQQ")
_PREFIX = "asyncdist-"
"""Prefix of the names of the sockets."""

_PACKET_NBYTES = 4096
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two attempts to connect."""

Introduction = tuple[int, ArenaMapping, int]
"""Rank, arena and offset of the control block of a peer."""
Handshake = Coroutine[socket.socket | None, None, Introduction]
"""`connect_peer` or `accept_peer`. It yields the socket that it waits to read, or None for a pause."""

CROSSED = "both ranks connect to each other"
"""Why a rank refuses one of two connections between the same ranks: the other one, of the higher rank, is in use."""


class PeerRefused(Exception):
    """A peer cannot connect; the message is the reason. ``rank`` is its rank, once it has authenticated."""

    rank: int | None = None
    is_crossed = False


class LocalListener:
    """The listening sockets of one rank: one at an abstract address, and one for peers in other network namespaces.

    Any thread may `close` it, for example at process exit. Sockets that a loop watches stay open until it stops watching:
    uvloop aborts the process when a watched descriptor is closed, and the descriptor's number may be reused.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.name = secrets.token_hex(16)
        self.sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._watched = self._closed = False
        self._path_descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        with ClosingOnError(self):
            self.sockets.append(listening_socket(f"\0{_PREFIX}{self.name}"))

    def address(self) -> dict[str, Any]:
        """Return what peers need to connect."""
        return {
            "host": self._host.config.host or machine_name(),
            "user": os.getuid(),
            "name": self.name,
            "net": namespace("net"),
            "pids": namespace("pid"),
            "pid": os.getpid(),
            "descriptor": self._path_descriptor,
        }

    def listen_by_descriptor(self) -> None:
        """Let peers of other network namespaces connect through the descriptor that `address` has published."""
        with self._lock:
            if self._closed:
                return
            folder = os.open(tempfile.gettempdir(), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # A socket address holds 107 bytes, and the folder's name may be longer.
                inside = f"/proc/self/fd/{folder}"
                _remove_stale_sockets(inside)
                sock, descriptor = _listening_by_descriptor(f"{inside}/{_PREFIX}{self.name}")
            finally:
                os.close(folder)
            self.sockets.append(sock)
            try:
                os.dup2(descriptor, self._path_descriptor, inheritable=False)
            finally:
                os.close(descriptor)

    def accept_pending(self) -> socket.socket | None:
        """Return a connection that waits, if any. Raises OSError."""
        for sock in self.sockets:
            with contextlib.suppress(BlockingIOError):
                accepted, _ = sock.accept()
                lifecycle.close_in_children(accepted)
                accepted.setblocking(False)
                return accepted
        return None

    async def accept(self) -> socket.socket:
        """Wait for a connection; one caller at a time. A closed listener accepts no connection."""
        with self._lock:
            self._watched = True
        try:
            while True:
                if (accepted := self.accept_pending()) is not None:
                    return accepted
                await ready(*self.sockets)
        finally:
            with self._lock:
                self._watched = False
                if self._closed:
                    self._close()

    def close(self) -> None:
        """Stop listening as soon as no call of `accept` waits. Idempotent."""
        with self._lock:
            self._closed = True
            if not self._watched:
                self._close()

    def _close(self) -> None:
        self.retire(socket.socket.close)

    def retire(self, end: Callable[[socket.socket], object]) -> None:
        """Stop listening; ``end`` closes the sockets, which a driver may watch. Idempotent."""
        if self._path_descriptor >= 0:
            os.close(self._path_descriptor)
            self._path_descriptor = -1
        while self.sockets:
            end(self.sockets.pop())


def _listening_by_descriptor(path: str) -> tuple[socket.socket, int]:
    """Return a listening socket without a name, and a descriptor through which peers connect to it."""
    while True:
        sock = listening_socket(path)
        try:
            return sock, os.open(path, os.O_PATH | os.O_CLOEXEC)
        except BaseException as error:
            sock.close()
            # Another rank removed the name, because the socket did not listen yet.
            if not isinstance(error, FileNotFoundError):
                raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_stale_sockets(folder: str) -> None:
    """Remove the socket files of this user's ranks that were killed while their sockets had names."""
    names: list[str] = []
    # The folder may not be readable.
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for name in names:
        if name.startswith(_PREFIX):
            # Another rank has removed it, or it is not a socket of a rank.
            with contextlib.suppress(OSError):
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


def listening_socket(address: str) -> socket.socket:
    return listen(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), address)


def unreachable_reason(own: Mapping[str, Any], address: Mapping[str, Any]) -> str | None:
    """Return why two ranks cannot connect, or None. Both compute the same, so neither waits for the other."""
    if address["user"] != own["user"]:
        return f"it runs as another user, {address['user']}"
    if address["net"] != own["net"] and address["pids"] != own["pids"]:
        return "it has another network and another process namespace"
    return None


def dialling_socket() -> socket.socket:
    """Return a socket for `connect_peer`. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifecycle.close_in_children(sock)
    sock.setblocking(False)
    return sock


async def connect_peer(
    sock: socket.socket, peer: int, address: Mapping[str, Any], host: Host, arena: Arena, control_offset: int
) -> Introduction:
    """Connect to a peer and exchange introductions. Raises PeerRefused and OSError."""
    await _connect(sock, address)
    call = _CALL.pack(host.rank, os.urandom(NONCE_NBYTES))
    _send(sock, call + _proof(host, b"d", address["name"], call))
    introduction = await _receive_introduction(sock, host, peer, _proof(host, b"a", address["name"], call))
    _send_introduction(sock, host, arena, control_offset)
    return introduction


async def accept_peer(
    sock: socket.socket, name: str, host: Host, arena: Arena, control_offset: int, refusal_of: Callable[[int], str]
) -> Introduction:
    """Exchange introductions with a peer that has connected to the listener ``name``.

    ``refusal_of`` returns why a rank is refused; empty if it is not. Raises PeerRefused.
    """
    if (user := peer_user(sock)) != os.getuid():
        raise PeerRefused(f"it runs as another user, {user}")
    packet, descriptors = await _receive_packet(sock)
    close_all(descriptors)
    if len(packet) != _CALL.size + PROOF_NBYTES:
        raise PeerRefused(f"a packet of {len(packet)} bytes where {_CALL.size + PROOF_NBYTES} were expected")
    call = packet[: _CALL.size]
    if not hmac.compare_digest(packet[_CALL.size :], _proof(host, b"d", name, call)):
        raise PeerRefused("it does not hold the token of this process")
    rank, _ = _CALL.unpack(call)
    if reason := refusal_of(rank):
        _send(sock, reason.encode())
        raise PeerRefused(reason)
    try:
        _send_introduction(sock, host, arena, control_offset, _proof(host, b"a", name, call))
        return await _receive_introduction(sock, host, rank)
    except PeerRefused as refusal:
        refusal.rank = rank
        raise


def _proof(host: Host, side: bytes, name: str, call: bytes) -> bytes:
    """Return the proof of one side, ``b"d"`` or ``b"a"``, for a call at the socket of that name."""
    return proof(host.config.token, side, f"shm peer of world {host.world_id}", name.encode() + call)


async def _connect(sock: socket.socket, address: Mapping[str, Any]) -> None:
    same_network = address["net"] == namespace("net")
    path = f"\0{_PREFIX}{address['name']}" if same_network else f"/proc/{address['pid']}/fd/{address['descriptor']}"
    while True:
        try:
            sock.connect(path)
            return
        except OSError as cause:
            backlog_full = isinstance(cause, BlockingIOError)
            # A peer in another namespace may not listen at its path yet.
            not_listening_yet = isinstance(cause, ConnectionRefusedError) and not same_network
            if not backlog_full and not not_listening_yet:
                raise PeerRefused(f"its Unix socket cannot be reached: {cause.strerror}") from cause
        await _until(None)


def _send_introduction(sock: socket.socket, host: Host, arena: Arena, control_offset: int, shown: bytes = b"") -> None:
    _send(sock, _INTRODUCTION.pack(host.rank, arena.nbytes, control_offset) + shown, [arena.descriptor])


async def _receive_introduction(sock: socket.socket, host: Host, peer: int, shown: bytes = b"") -> Introduction:
    """Receive a peer's rank and memory, with the proof ``shown``; tell a peer that accepts why this rank refuses it."""
    packet, descriptors = await _receive_packet(sock)
    if len(packet) != _INTRODUCTION.size + len(shown):
        close_all(descriptors)
        raise _refused(packet)
    try:
        if not hmac.compare_digest(packet[_INTRODUCTION.size :], shown):
            raise PeerRefused("it could not prove that it holds the token of this process")
        return _opened(packet[: _INTRODUCTION.size], descriptors, host, peer)
    except PeerRefused as refusal:
        if shown:
            # A peer that has accepted waits for an answer; one that has been accepted does not.
            _send(sock, str(refusal).encode()[:_PACKET_NBYTES])
        raise
    finally:
        close_all(descriptors)


def _opened(packet: bytes, descriptors: Sequence[int], host: Host, peer: int) -> Introduction:
    """Map the memory of a peer. Raises PeerRefused."""
    rank, nbytes, control_offset = _INTRODUCTION.unpack(packet)
    if rank != peer:
        raise PeerRefused(f"it claims to be rank {rank}")
    if len(descriptors) != 1:
        raise PeerRefused("its memory did not come with the packet: no descriptor passes between the two processes")
    if (
        os.fstat(descriptors[0]).st_size < nbytes
        or control_offset % 8
        or not control_offset + ControlBlock.nbytes(host.world_size) <= nbytes
    ):
        raise PeerRefused("its memory is smaller than announced")
    try:
        return rank, ArenaMapping(descriptors[0], nbytes), control_offset
    except AsyncdistError as error:
        raise PeerRefused(error.summary) from error


def _refused(packet: bytes) -> PeerRefused:
    """Return what a packet says in place of an introduction."""
    refusal = PeerRefused(f"it says: {packet.decode(errors='replace')}" if packet else "it closed the connection")
    refusal.is_crossed = packet == CROSSED.encode()
    return refusal


# -- packets ----------------------------------------------------------------------------------------


@types.coroutine
def _until(sock: socket.socket | None) -> Generator[socket.socket | None, None, None]:
    """Let who runs a handshake go on when a socket is readable; None is after a pause."""
    yield sock


async def on_loop(handshake: Handshake) -> Introduction:
    """Run a handshake on the running loop."""
    pauses = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
    with contextlib.closing(handshake):
        while True:
            try:
                sock = handshake.send(None)
            except StopIteration as end:
                return cast("Introduction", end.value)
            if sock is None:
                await asyncio.sleep(pauses.next_pause())
            else:
                await ready(sock)


def _send(sock: socket.socket, packet: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a packet. The few small packets of a handshake never fill the socket's buffer."""
    try:
        socket.send_fds(sock, [packet], descriptors)
    except OSError as cause:
        raise PeerRefused(f"the connection ended: {cause.strerror}") from cause


def _take_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Return a packet that has arrived, and its descriptors. Raises PeerRefused and BlockingIOError."""
    try:
        packet, descriptors, _, _ = socket.recv_fds(sock, _PACKET_NBYTES, 4, socket.MSG_CMSG_CLOEXEC)
        return packet, descriptors
    except BlockingIOError:
        raise
    except OSError as cause:
        raise PeerRefused(f"the connection ended: {cause.strerror}") from cause


async def _receive_packet(sock: socket.socket) -> tuple[bytes, list[int]]:
    while True:
        try:
            return _take_packet(sock)
        except BlockingIOError:
            await _until(sock)
