"""The port of a peer: its registered memory, as this process reads and writes it.

On one host this process copies memory that lies in the peer's arena (``asyncdist.empty``, ``Group.register``), and small
pieces of other memory where the system lets it trace the peer. Everything else passes in messages, which the background
loop of the peer answers, whatever its threads do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import msgpack

from asyncdist.base.background_loop import background_loop, run_in_background
from asyncdist.base.callables import Callback
from asyncdist.base.deadline import Deadline
from asyncdist.errors import (
    AsyncdistError,
    OperationTimeoutError,
    PeerLostError,
    ProtocolError,
    SharedMemoryError,
    UsageError,
)
from asyncdist.kernel.engine.drivers.stalled_loop import call_in_thread
from asyncdist.kernel.memory.shared_arena import ArenaMapping
from asyncdist.kernel.one_sided.process_memory import OutOfReachError, ProcessMemory
from asyncdist.kernel.one_sided.registration import RemoteMemory
from asyncdist.net import IncomingMessage, PeerChannel
from asyncdist.net.process_identity import process_identity

T = TypeVar("T")


class Kind(IntEnum):
    """What a message is about: docs/wire-formats.md lists the fields of each."""

    ASK, GRANT, READ, DATA, WRITE, DONE, REFUSED, REVOKE, END = range(9)


MOST_OPEN = 32
"""The most requests of one process at a peer; further ones wait here."""
UNREGISTERED = "this memory is not registered any more"
_LOOP_NBYTES = 1 << 20
"""A loop copies no more, in some tenths of a millisecond; a thread copies larger memories."""
_STEP_NBYTES = 128 << 20
"""Bytes that a thread copies between two looks at its peer. The C library copies large pieces past the caches."""
_TRACED_NBYTES = 4 << 20
"""The most bytes that pass through the file of a peer's memory: the system copies them twice, slower than messages pass."""
_mappings: weakref.WeakValueDictionary[tuple[int, int], ArenaMapping] = weakref.WeakValueDictionary()
"""The arenas of other processes, by device and inode, for all ports of this process."""


class LocalRange(Protocol):
    """Bytes of this process: a `Registration`, or a part of one."""

    @property
    def address(self) -> int: ...

    @property
    def bytes(self) -> memoryview: ...

    @property
    def nbytes(self) -> int: ...


class Grant:
    """The answer of the owner of registered memory about it.

    Attributes:
        nbytes: The bytes that may be used.
        address: Where they are: in this process if they are mapped, else in the owner's.
        memory: The owner's arena, or its whole memory; None if the bytes pass in messages.
    """

    def __init__(self, nbytes: int, address: int, memory: ArenaMapping | ProcessMemory | None) -> None:
        self.nbytes, self.address, self.memory = nbytes, address, memory
        self._lock = threading.Lock()
        self._copies = 0
        self._on_free: Callback | None = None
        self._is_revoked = False

    @property
    def is_mapped(self) -> bool:
        """Whether this process has mapped the bytes."""
        return isinstance(self.memory, ArenaMapping)

    def reaches(self, nbytes: int) -> bool:
        """Return whether this process copies so many bytes itself."""
        return self.memory is not None and (nbytes <= _TRACED_NBYTES or self.is_mapped)

    def copy(self, offset: int, local: LocalRange, part: slice, writes: bool) -> None:
        """Copy a part of a range of this process. Raises OutOfReachError, and UsageError after `revoke`."""
        here, there, nbytes = local.address + part.start, self.address + offset + part.start, part.stop - part.start
        with self._lock:
            if self._is_revoked:
                raise UsageError(UNREGISTERED)
            self._copies += 1
        try:
            memory = self.memory
            # Another thread may have found that it is out of reach.
            if memory is None:
                raise OutOfReachError
            if isinstance(memory, ProcessMemory):
                memory.copy(there, local.bytes[part], writes)
            else:
                ctypes.memmove(*((there, here) if writes else (here, there)), nbytes)
        finally:
            with self._lock:
                self._copies -= 1
                on_free = self._on_free if not self._copies else None
            if on_free is not None:
                on_free()

    def revoke(self, on_free: Callback) -> None:
        """Let no copy begin or go on, and call ``on_free`` when none is under way."""
        with self._lock:
            self._is_revoked, self._on_free = True, on_free
            is_free = not self._copies
        if is_free:
            on_free()


@dataclass(eq=False, slots=True)
class _MemoryRequest:
    """A request of this process. ``into`` takes the bytes of a read, which ``arriving`` brings."""

    outcome: asyncio.Future[Any]
    memory: int
    into: memoryview | None = None
    arriving: IncomingMessage | None = None

    def fail(self, error: AsyncdistError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def succeed(self, result: Any = None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)


class RemotePort:
    """The port at the other end of a channel. `MemoryPort` makes it, and passes on the answers.

    Any thread and any loop may call `check`, `copy_now` and `transfer`; the loop of the channel the other methods.
    """

    def __init__(self, channel: PeerChannel, host_name: str | None) -> None:
        self._channel, self._host_name = channel, host_name
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._requests: dict[int, _MemoryRequest] = {}
        self._slots = asyncio.Semaphore(MOST_OPEN)
        self._grants: dict[int, Grant] = {}
        """The grants of the peer, by the number of the memory."""

    @property
    def name(self) -> str:
        return self._channel.peer.name

    @property
    def is_open(self) -> bool:
        return self._channel.is_open

    def check(self, remote: RemoteMemory) -> None:
        """Raise UsageError if memory is not that of this port, PeerLostError if the peer is lost."""
        if remote.port != self._channel.peer.id:
            raise UsageError(f"this memory is not that of {self.name}, to which the transport is connected")
        if self._channel.error is not None:
            raise copy.copy(self._channel.error)

    # -- copies of this process --------------------------------------------------------------------

    def copy_now(self, remote: RemoteMemory, offset: int, local: LocalRange, writes: bool, deadline: Deadline) -> bool:
        """Copy in the calling thread. Return False if the bytes must be transferred.

        Raises:
            OperationTimeoutError: The deadline passed.
            Exception: The errors of `transfer`.
        """
        grant = self._grants.get(remote.number)
        if grant is None or not grant.reaches(local.nbytes):
            return False
        try:
            for _ in self._steps(remote, grant, offset, local, writes):
                if deadline.expired():
                    raise self.overdue(local, writes)
        except OutOfReachError:
            grant.memory = None
            return False
        return True

    async def transfer(self, remote: RemoteMemory, offset: int, local: LocalRange, writes: bool) -> None:
        """Read memory of the peer, from a byte on, into a range of this process, or write it.

        If that ends early, nothing more of it is read or written.

        Raises:
            UsageError: The memory is not registered, or does not have these bytes. Nothing was copied.
            PeerLostError: The peer has ended, or has not been heard for ASYNCDIST_HEARTBEAT. A write may be in the memory
                in part.
        """
        grant = self._grants.get(remote.number)
        if grant is None:
            grant = await _on_background(self.ask(remote))
        if grant.reaches(local.nbytes):
            steps = self._steps(remote, grant, offset, local, writes)
            try:
                if local.nbytes > _LOOP_NBYTES:
                    await _in_thread(steps)
                else:
                    with contextlib.closing(steps):
                        for _ in steps:
                            await asyncio.sleep(0)
                return
            except OutOfReachError:
                grant.memory = None
        if local.nbytes:
            await _on_background(self._exchange(remote, offset, local, writes))

    def _steps(
        self, remote: RemoteMemory, grant: Grant, offset: int, local: LocalRange, writes: bool
    ) -> Generator[None, None, None]:
        """Copy step by step, with a yield before each one."""
        if offset + local.nbytes > grant.nbytes:
            raise UsageError(f"{local.nbytes} bytes from byte {offset} on, of memory of {self.name} of {grant.nbytes}")
        for at in range(0, local.nbytes, _STEP_NBYTES):
            yield
            self.check(remote)
            grant.copy(offset, local, slice(at, min(at + _STEP_NBYTES, local.nbytes)), writes)
        self.check(remote)

    def overdue(self, local: LocalRange, writes: bool) -> OperationTimeoutError:
        """Return the error of a transfer that has not ended in time."""
        what = "write" if writes else "read"
        error = OperationTimeoutError(f"a {what} of {local.nbytes} bytes with {self.name} did not end in time")
        error.advice = "it has ended now, and its buffers are free; pass a longer timeout="
        return error

    # -- requests ----------------------------------------------------------------------------------

    async def ask(self, remote: RemoteMemory) -> Grant:
        """Return how this process reaches memory of the peer. Raises UsageError if it is not registered there."""
        self.check(remote)
        found: Grant = self._grants.get(remote.number) or await self._request(Kind.ASK, remote.number)
        return found

    async def _exchange(self, remote: RemoteMemory, offset: int, local: LocalRange, writes: bool) -> None:
        self.check(remote)
        if writes:
            await self._request(Kind.WRITE, remote.number, offset, buffers=[local.bytes])
        else:
            await self._request(Kind.READ, remote.number, offset, local.nbytes, into=local.bytes)

    async def revoke(self, number: int) -> None:
        """Let the peer use memory of this process no more. Returns when it does not, or is lost."""
        with contextlib.suppress(PeerLostError):
            await self._request(Kind.REVOKE, number)

    async def _request(
        self,
        kind: int,
        memory: int,
        *fields: int,
        into: memoryview | None = None,
        buffers: Sequence[memoryview] = (),
    ) -> Any:
        channel, message = self._channel, None
        async with self._slots:
            number = next(self._numbers)
            request = self._requests[number] = _MemoryRequest(self._loop.create_future(), memory, into)
            try:
                message = channel.send(encode(kind, number, memory, *fields), buffers)
                return await request.outcome
            except BaseException as error:
                if message is not None and channel.is_open:
                    channel.withdraw(message)
                if request.arriving is not None:
                    channel.drop(request.arriving, UsageError("the reader has ended its request"))
                if kind == Kind.READ and channel.is_open and not isinstance(error, AsyncdistError):
                    channel.send(encode(Kind.END, number))
                raise
            finally:
                del self._requests[number]

    # -- answers -----------------------------------------------------------------------------------

    def answered(
        self, kind: int, number: int, fields: Sequence[Any], buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        """Handle a short message that is no request for memory of this process. Raises ProtocolError."""
        if kind == Kind.REVOKE:
            self._revoked(number, *fields)
            return
        request = self._requests.get(number)
        if request is None:
            return
        if kind == Kind.GRANT:
            # Kept now: the owner may revoke it before the request's task resumes.
            nbytes, place, arena_nbytes = fields
            grant = self._grant(nbytes, place, arena_nbytes, descriptors)
            request.succeed(self._grants.setdefault(request.memory, grant))
        elif kind == Kind.DATA and request.into is not None:
            request.into[:] = buffers[0]
            request.succeed()
        elif kind == Kind.DONE:
            request.succeed()
        elif kind == Kind.REFUSED:
            request.fail(UsageError(f"{self.name} refuses: {fields[0]}"))
        else:
            raise ProtocolError(f"a message of kind {kind} about registered memory")

    def _grant(self, nbytes: int, place: int, arena_nbytes: int, descriptors: Sequence[int]) -> Grant:
        if not arena_nbytes:
            return Grant(nbytes, place, self._process if place else None)
        mapping = _mapping_of(descriptors[0], arena_nbytes)
        if mapping is not None and not 0 <= place <= mapping.nbytes - nbytes:
            raise ProtocolError(f"memory at {place} in an arena of {mapping.nbytes} bytes")
        return Grant(nbytes, 0 if mapping is None else mapping.address + place, mapping)

    @functools.cached_property
    def _process(self) -> ProcessMemory | None:
        with contextlib.suppress(OutOfReachError):
            return ProcessMemory(self._channel.peer.identity, process_identity(self._host_name))
        return None

    def _revoked(self, number: int, memory: int) -> None:
        def confirm() -> None:
            if self._channel.is_open:
                self._channel.send(encode(Kind.DONE, number))

        grant = self._grants.pop(memory, None)
        if grant is None:
            confirm()
        else:
            grant.revoke(lambda: self._loop.call_soon_threadsafe(confirm))

    def opened(self, message: IncomingMessage, number: int) -> None:
        """Receive the bytes of a read into the memory for which they are meant."""
        request = self._requests.get(number)
        if request is None or request.into is None or request.outcome.done():
            self._channel.drop(message, UsageError("the reader has ended its request"))
        else:
            message.buffers, message.context, request.arriving = [request.into], request, message

    def completed(self, message: IncomingMessage, request: _MemoryRequest) -> None:
        """Handle the end of a read."""
        request.arriving = None
        if message.error is None:
            request.succeed()
        else:
            request.fail(UsageError(f"{self.name} has sent another number of bytes: {message.error}"))

    def withdrawn(self, request: _MemoryRequest) -> None:
        request.arriving = None
        request.fail(UsageError(f"{self.name} has stopped sending"))

    def closed(self, error: PeerLostError) -> None:
        for request in self._requests.values():
            request.arriving = None
            request.fail(copy.copy(error))
        self._grants.clear()


def _mapping_of(descriptor: int, nbytes: int) -> ArenaMapping | None:
    """Return an arena of another process, mapped once for all ports; None if this process cannot map it."""
    status = os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    mapping = _mappings.get(key)
    if mapping is None:
        try:
            mapping = _mappings[key] = ArenaMapping(descriptor, nbytes)
        except SharedMemoryError:
            return None
    return mapping


def encode(kind: int, number: int, *fields: Any) -> bytes:
    packed: bytes = msgpack.packb([kind, number, *fields])
    return packed


async def _in_thread(steps: Generator[None, None, None]) -> None:
    """Copy in a thread. A cancelled caller waits for the end of the present step, after which there is no other."""
    ended: concurrent.futures.Future[None] = concurrent.futures.Future()
    is_wanted = True

    def run() -> None:
        try:
            while is_wanted and next(steps, ended) is None:
                pass
            steps.close()
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    call_in_thread(run)
    waiting = asyncio.wrap_future(ended)
    try:
        await asyncio.wait([waiting])
    except asyncio.CancelledError:
        is_wanted = False
        await asyncio.wait([waiting])
        raise
    waiting.result()


async def _on_background(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the background loop; a cancelled caller waits for its end."""
    if asyncio.get_running_loop() is background_loop().loop:
        return await coroutine
    return await run_in_background(coroutine)
