"""The channels over which processes map, read and write each other's registered memory.

The owner of the memory serves its peers on its background loop, whatever its threads do. On one host it passes the
descriptor of its arena, and a peer copies memory that lies there (``asyncdist.empty``, ``Group.register``) without
asking again. Other memory passes in messages. All methods are called on the loop on which the port was made.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncdist.base.descriptors import close_all
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, PeerLostError, ProtocolError, SharedMemoryError, UsageError
from asyncdist.kernel import ArenaMapping, arena, can_share_segments
from asyncdist.net import ChannelAddress, ChannelPort, IncomingMessage, OutgoingMessage, PeerChannel
from asyncdist.torch_backend.one_sided.memory import LocalView, Registration, RemoteMemory

ASK, GRANT, READ, DATA, WRITE, DONE, REFUSED, REVOKED, END = range(9)
_MOST_OPEN = 32
"""The most requests of one process at a peer; further ones wait here."""
_UNREGISTERED = "this memory is not registered any more"
_mappings: weakref.WeakValueDictionary[tuple[int, int], ArenaMapping] = weakref.WeakValueDictionary()
"""The arenas of other processes, by device and inode, for all ports of this process."""


@dataclass(eq=False, slots=True)
class Grant:
    """The answer of the owner of registered memory about it.

    ``address`` is where this process has mapped it; 0 if it passes in messages. ``mapping`` keeps the address valid.
    """

    nbytes: int
    address: int
    mapping: ArenaMapping | None
    is_revoked: bool = False


@dataclass(eq=False, slots=True)
class _MemoryRequest:
    """A request of this process. ``into`` takes the bytes of a read, which ``arriving`` brings."""

    channel: PeerChannel
    outcome: asyncio.Future[Any]
    into: memoryview | None = None
    arriving: IncomingMessage | None = None

    def fail(self, error: AsyncdistError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def succeed(self, result: Any = None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)


class MemoryPort:
    """Serves ``memories``, registered memory by number, to all peers; reads and writes that of one.

    A peer proves the ``token``. The port listens for other hosts at the address ``host``.
    """

    def __init__(self, memories: Mapping[int, Registration], *, host: str, token: str, config: Config) -> None:
        self._memories = memories
        self._channel: PeerChannel | None = None
        self.grants: dict[int, Grant] = {}
        """The grants of the peer, by the number of the memory."""
        self._numbers = itertools.count(1)
        self._requests: dict[int, _MemoryRequest] = {}
        self._slots = asyncio.Semaphore(_MOST_OPEN)
        self._sending: dict[tuple[PeerChannel, int], OutgoingMessage] = {}
        """The answers to reads that have not left."""
        self._writing: dict[IncomingMessage, tuple[PeerChannel, int]] = {}
        """The writes of peers that have arrived in part, and the memory that they write."""
        self._channels = ChannelPort(self, host=host, service="one-sided", token=token, config=config)

    @property
    def address(self) -> ChannelAddress:
        return self._channels.address

    async def close(self) -> None:
        """Close the channels in order. Idempotent."""
        await self._channels.close("it has closed its transport")

    # -- the peer ----------------------------------------------------------------------------------

    async def connect(self, address: ChannelAddress, token: str, timeout: float) -> None:
        """Connect to the port whose memory is read and written. Raises the errors of `ChannelPort.connect`."""
        self._channel = await self._channels.connect(address, timeout, token=token)

    @property
    def is_connected(self) -> bool:
        return self._channel is not None and self._channel.is_open

    @property
    def peer_name(self) -> str:
        return "no peer" if self._channel is None else self._channel.peer.name

    def check_peer(self, port: str) -> None:
        """Raise PeerLostError if the peer is lost, UsageError if it is not this port. Any thread may call it."""
        channel = self._channel
        if channel is None:
            raise UsageError(
                "this transport is not connected: call connect() with what bind() of the peer has returned"
            )
        if channel.peer.id != port:
            raise UsageError(f"this memory is not that of {channel.peer.name}, to which the transport is connected")
        if channel.error is not None:
            raise copy.copy(channel.error)

    async def ask(self, remote: RemoteMemory) -> Grant:
        """Return how this process reaches memory of the peer. Raises UsageError if it is not registered there."""
        grant = self.grants.get(remote.number)
        if grant is None:
            grant = await self._request(ASK, remote)
        return grant

    async def read(self, remote: RemoteMemory, view: LocalView) -> None:
        """Read memory of the peer in a message. If that ends early, the view is written no more."""
        await self._request(READ, remote, view.nbytes, into=view.bytes)

    async def write(self, remote: RemoteMemory, view: LocalView) -> None:
        """Write memory of the peer in a message. If that ends early, the view is read no more."""
        await self._request(WRITE, remote, buffers=[view.bytes])

    async def _request(
        self,
        kind: int,
        remote: RemoteMemory,
        *fields: int,
        into: memoryview | None = None,
        buffers: Sequence[memoryview] = (),
    ) -> Any:
        async with self._slots:
            self.check_peer(remote.port)
            channel = self._channel
            assert channel is not None
            number, message = next(self._numbers), None
            request = _MemoryRequest(channel, asyncio.get_running_loop().create_future(), into)
            self._requests[number] = request
            try:
                message = channel.send(_encode(kind, number, remote.number, *fields), buffers)
                return await request.outcome
            except BaseException as error:
                if message is not None and channel.is_open:
                    channel.withdraw(message)
                if request.arriving is not None:
                    channel.drop(request.arriving, UsageError("the reader has ended its request"))
                if kind == READ and channel.is_open and not isinstance(error, AsyncdistError):
                    channel.send(_encode(END, number))
                raise
            finally:
                del self._requests[number]

    # -- peers that use this process's memory ------------------------------------------------------

    async def revoke(self, number: int) -> None:
        """Let no peer use memory any more that was registered under this number."""
        for message, (channel, memory) in list(self._writing.items()):
            if memory == number:
                channel.drop(message, UsageError(_UNREGISTERED))
        for channel in self._channels.channels:
            if channel.is_open:
                channel.send(_encode(REVOKED, number))

    def _memory(self, number: int, nbytes: int) -> memoryview:
        """Return the first bytes of registered memory. Raises UsageError."""
        registration = self._memories.get(number)
        if registration is None:
            raise UsageError(_UNREGISTERED)
        if not 0 <= nbytes <= registration.nbytes:
            raise UsageError(f"{nbytes} bytes of registered memory of {registration.nbytes} bytes")
        return registration.view[:nbytes]

    def _grant(self, channel: PeerChannel, number: int, memory: int) -> None:
        registration = self._memories.get(memory)
        if registration is None:
            raise UsageError(_UNREGISTERED)
        own = offset = None
        if channel.is_local and can_share_segments():
            try:
                own = arena()
                offset = own.offset_of(registration.address, registration.nbytes)
            # This process has no arena, so that the memory lies elsewhere.
            except SharedMemoryError:
                pass
        if own is None or offset is None:
            channel.send(_encode(GRANT, number, memory, registration.nbytes, -1, 0))
        else:
            fields = number, memory, registration.nbytes, offset, own.nbytes
            channel.send(_encode(GRANT, *fields), descriptors=[own.descriptor])

    def _give(self, channel: PeerChannel, number: int, memory: int, nbytes: int) -> None:
        key = channel, number
        if key in self._sending or sum(each is channel for each, _ in self._sending) >= _MOST_OPEN:
            raise ProtocolError(f"read {number} of {channel.peer.name} is open, or one of too many")
        message = channel.send(_encode(DATA, number), [self._memory(memory, nbytes)])
        if message is not None:
            self._sending[key] = message
            message.on_done = functools.partial(self._sent, key)

    def _sent(self, key: tuple[PeerChannel, int], message: OutgoingMessage) -> None:
        self._sending.pop(key, None)

    def _answer(self, channel: PeerChannel, kind: int, number: int, fields: Sequence[Any], buffers: Any) -> None:
        try:
            if kind == ASK:
                self._grant(channel, number, *fields)
            elif kind == READ:
                self._give(channel, number, *fields)
            else:
                (memory,), (data,) = fields, buffers
                self._memory(memory, data.nbytes)[:] = data
                channel.send(_encode(DONE, number))
        except UsageError as error:
            channel.send(_encode(REFUSED, number, error.summary))

    # -- messages ----------------------------------------------------------------------------------

    def connected(self, channel: PeerChannel) -> None:
        """Nothing happens until a peer asks."""

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        try:
            kind, number, fields = _decode(head)
            if kind in (ASK, READ, WRITE):
                self._answer(channel, kind, number, fields, buffers)
            elif kind == END:
                if (sending := self._sending.get((channel, number))) is not None:
                    channel.withdraw(sending)
            elif kind == REVOKED:
                if channel is self._channel and (grant := self.grants.pop(number, None)) is not None:
                    grant.is_revoked = True
            elif (request := self._open_request(channel, number)) is not None:
                self._outcome(request, kind, fields, buffers, descriptors)
        except (TypeError, ValueError, LookupError) as cause:
            raise ProtocolError(f"a message about registered memory that cannot be read: {cause}") from cause
        finally:
            close_all(descriptors)

    def _open_request(self, channel: PeerChannel, number: int) -> _MemoryRequest | None:
        request = self._requests.get(number)
        return request if request is not None and request.channel is channel else None

    def _outcome(
        self,
        request: _MemoryRequest,
        kind: int,
        fields: Sequence[Any],
        buffers: Sequence[memoryview],
        descriptors: Sequence[int],
    ) -> None:
        if kind == GRANT:
            memory, nbytes, offset, arena_nbytes = fields
            address, mapping = 0, None
            if offset >= 0:
                mapping = _mapping_of(descriptors[0], arena_nbytes)
                if mapping is not None and not 0 <= offset <= mapping.nbytes - nbytes:
                    raise ProtocolError(f"memory at {offset} in an arena of {mapping.nbytes} bytes")
                address = 0 if mapping is None else mapping.address + offset
            # Kept now: the owner may revoke it before the request's task resumes.
            request.succeed(self.grants.setdefault(memory, Grant(nbytes, address, mapping)))
        elif kind == DATA and request.into is not None:
            request.into[:] = buffers[0]
            request.succeed()
        elif kind == DONE:
            request.succeed()
        elif kind == REFUSED:
            request.fail(UsageError(f"{request.channel.peer.name} refuses: {fields[0]}"))
        else:
            raise ProtocolError(f"a message of kind {kind} about registered memory")

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        kind, number, fields = _decode(message.head)
        if kind == DATA:
            request = self._open_request(channel, number)
            if request is None or request.into is None or request.outcome.done():
                channel.drop(message, UsageError("the reader has ended its request"))
                return
            message.buffers, message.context, request.arriving = [request.into], request, message
        elif kind == WRITE and len(message.sizes) == 1 and len(fields) == 1:
            try:
                message.buffers = [self._memory(fields[0], message.nbytes)]
                self._writing[message] = channel, fields[0]
            except UsageError as error:
                channel.drop(message, error)
        else:
            raise ProtocolError(f"a long message of kind {kind} about registered memory")

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        kind, number, _ = _decode(message.head)
        self._writing.pop(message, None)
        if kind == WRITE and message.error is None:
            channel.send(_encode(DONE, number))
        elif kind == WRITE:
            reason = message.error.summary if isinstance(message.error, AsyncdistError) else str(message.error)
            channel.send(_encode(REFUSED, number, reason))
        elif message.context is not None:
            request: _MemoryRequest = message.context
            request.arriving = None
            if message.error is None:
                request.succeed()
            else:
                request.fail(UsageError(f"{channel.peer.name} has sent another number of bytes: {message.error}"))

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        self._writing.pop(message, None)
        if message.context is not None:
            message.context.arriving = None
            message.context.fail(UsageError(f"{channel.peer.name} has stopped sending"))

    def closed(self, channel: PeerChannel, error: PeerLostError) -> None:
        for request in self._requests.values():
            if request.channel is channel:
                request.arriving = None
                request.fail(copy.copy(error))
        for message in [each for each, (writer, _) in self._writing.items() if writer is channel]:
            del self._writing[message]
        for key in [key for key in self._sending if key[0] is channel]:
            del self._sending[key]
        if channel is self._channel:
            self.grants.clear()


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


def _encode(kind: int, number: int, *fields: Any) -> bytes:
    packed: bytes = msgpack.packb([kind, number, *fields])
    return packed


def _decode(head: bytes) -> tuple[int, int, list[Any]]:
    try:
        kind, number, *fields = msgpack.unpackb(head)
    except (TypeError, ValueError, msgpack.UnpackException) as cause:
        raise ProtocolError(f"a message about registered memory that cannot be read: {cause}") from cause
    if type(kind) is not int or type(number) is not int:
        raise ProtocolError(f"a message about registered memory of kind {kind!r}")
    return kind, number, fields
