"""Where a process serves its registered memory to others, and meets them, on its background loop.

All methods are called on the loop on which the port was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import msgpack

from asyncdist.base.deadline import Timeout
from asyncdist.base.descriptors import close_all
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, PeerLostError, ProtocolError, SharedMemoryError, UsageError
from asyncdist.kernel.memory.shared_arena import arena
from asyncdist.kernel.memory.shared_segment import can_share_segments
from asyncdist.kernel.one_sided.registration import Registration, pack_endpoint, unpack_endpoint
from asyncdist.kernel.one_sided.remote_port import MOST_OPEN, UNREGISTERED, Kind, RemotePort, encode
from asyncdist.net import ChannelAddress, ChannelPort, IncomingMessage, OutgoingMessage, PeerChannel

_LAST_COPIES_TIMEOUT = 10.0
"""Seconds for which a port that closes waits for copies of its peers: more than a heartbeat takes by default."""


class MemoryPort:
    """Serves registered memory to the processes that prove the ``token``, and connects to their ports.

    The port listens for other hosts at the address ``host``. ``label`` names this process in their messages.

    Attributes:
        memories: The registered memory by number.
    """

    def __init__(self, *, host: str, token: str, config: Config, label: str = "") -> None:
        self.memories: dict[int, Registration] = {}
        self._token, self._config = token, config
        self._remotes: dict[PeerChannel, RemotePort] = {}
        self._copying: dict[int, set[PeerChannel]] = {}
        """The channels to the peers which may copy memory themselves, by its number."""
        self._sending: dict[tuple[PeerChannel, int], OutgoingMessage] = {}
        """The answers to reads that have not left."""
        self._writing: dict[IncomingMessage, tuple[PeerChannel, int]] = {}
        """The writes of peers that have arrived in part, and the memory that they write."""
        self._channels = ChannelPort(self, host=host, service="one-sided", token=token, config=config, label=label)

    @property
    def id(self) -> str:
        return self._channels.address.id

    @property
    def endpoint(self) -> bytes:
        """What a peer passes to `connect`: the address and the secret."""
        return pack_endpoint(self._channels.address.encode(), self._token)

    async def connect(self, endpoint: bytes, timeout: Timeout) -> RemotePort:
        """Connect to the port of a peer. Raises UsageError, and the errors of `ChannelPort.connect`."""
        address, token = unpack_endpoint(endpoint)
        return self._remotes[await self._channels.connect(ChannelAddress.decode(address), timeout, token=token)]

    async def unregister(self, number: int) -> None:
        """Let no peer use memory any more. Returns when none does."""
        self.memories.pop(number).is_active = False
        for message, (channel, memory) in list(self._writing.items()):
            if memory == number:
                channel.drop(message, UsageError(UNREGISTERED))
        copying = self._copying.pop(number, ())
        await asyncio.gather(*[self._remotes[channel].revoke(number) for channel in copying])

    async def close(self, reason: str) -> None:
        """Unregister all memory, and close the channels in order, with a clause for the peers. Idempotent."""
        with contextlib.suppress(TimeoutError):
            # Without heartbeats no peer that is stopped is ever lost.
            async with asyncio.timeout(_LAST_COPIES_TIMEOUT):
                await asyncio.gather(*[self.unregister(number) for number in list(self.memories)])
        await self._channels.close(reason)

    # -- peers that use this process's memory ------------------------------------------------------

    def _memory(self, number: int, offset: int, nbytes: int) -> memoryview:
        """Return bytes of registered memory. Raises UsageError."""
        registration = self.memories.get(number)
        if registration is None:
            raise UsageError(UNREGISTERED)
        if not 0 <= offset <= offset + nbytes <= registration.nbytes:
            raise UsageError(
                f"{nbytes} bytes from byte {offset} on, of registered memory of {registration.nbytes} bytes"
            )
        return registration.bytes[offset : offset + nbytes]

    def _grant(self, channel: PeerChannel, number: int, memory: int) -> None:
        registration = self.memories.get(memory)
        if registration is None:
            raise UsageError(UNREGISTERED)
        place, arena_nbytes, descriptors = 0, 0, []
        if channel.is_local and can_share_segments():
            place = registration.address
            # A process without an arena has the memory elsewhere.
            with contextlib.suppress(SharedMemoryError):
                offset = (own := arena()).offset_of(place, registration.nbytes)
                if offset is not None:
                    place, arena_nbytes, descriptors = offset, own.nbytes, [own.descriptor]
            self._copying.setdefault(memory, set()).add(channel)
        channel.send(encode(Kind.GRANT, number, registration.nbytes, place, arena_nbytes), descriptors=descriptors)

    def _give(self, channel: PeerChannel, number: int, memory: int, offset: int, nbytes: int) -> None:
        key = channel, number
        if key in self._sending or sum(each is channel for each, _ in self._sending) >= MOST_OPEN:
            raise ProtocolError(f"read {number} of {channel.peer.name} is open, or one of too many")
        message = channel.send(encode(Kind.DATA, number), [self._memory(memory, offset, nbytes)])
        if message is not None:
            self._sending[key] = message
            message.on_done = functools.partial(self._sent, key)

    def _sent(self, key: tuple[PeerChannel, int], message: OutgoingMessage) -> None:
        self._sending.pop(key, None)

    def _answer(self, channel: PeerChannel, kind: int, number: int, fields: Sequence[Any], buffers: Any) -> None:
        try:
            if kind == Kind.ASK:
                self._grant(channel, number, *fields)
            elif kind == Kind.READ:
                self._give(channel, number, *fields)
            else:
                (memory, offset), (data,) = fields, buffers
                self._memory(memory, offset, data.nbytes)[:] = data
                channel.send(encode(Kind.DONE, number))
        except UsageError as error:
            channel.send(encode(Kind.REFUSED, number, error.summary))

    # -- messages ----------------------------------------------------------------------------------

    def connected(self, channel: PeerChannel) -> None:
        self._remotes[channel] = RemotePort(channel, self._config.host)

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        try:
            kind, number, fields = _decode(head)
            if kind in (Kind.ASK, Kind.READ, Kind.WRITE):
                self._answer(channel, kind, number, fields, buffers)
            elif kind != Kind.END:
                self._remotes[channel].answered(kind, number, fields, buffers, descriptors)
            elif (sending := self._sending.get((channel, number))) is not None:
                channel.withdraw(sending)
        except (TypeError, ValueError, LookupError) as cause:
            raise ProtocolError(f"a message about registered memory that cannot be read: {cause}") from cause
        finally:
            close_all(descriptors)

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        kind, number, fields = _decode(message.head)
        if kind == Kind.DATA:
            self._remotes[channel].opened(message, number)
        elif kind == Kind.WRITE and len(message.sizes) == 1 and len(fields) == 2:
            try:
                memory, offset = fields
                message.buffers = [self._memory(memory, offset, message.nbytes)]
                self._writing[message] = channel, memory
            except UsageError as error:
                channel.drop(message, error)
        else:
            raise ProtocolError(f"a long message of kind {kind} about registered memory")

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        kind, number, _ = _decode(message.head)
        self._writing.pop(message, None)
        if kind == Kind.WRITE and message.error is None:
            channel.send(encode(Kind.DONE, number))
        elif kind == Kind.WRITE:
            reason = message.error.summary if isinstance(message.error, AsyncdistError) else str(message.error)
            channel.send(encode(Kind.REFUSED, number, reason))
        elif message.context is not None:
            self._remotes[channel].completed(message, message.context)

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        self._writing.pop(message, None)
        if message.context is not None:
            self._remotes[channel].withdrawn(message.context)

    def closed(self, channel: PeerChannel, error: PeerLostError) -> None:
        for message in [each for each, (writer, _) in self._writing.items() if writer is channel]:
            del self._writing[message]
        for key in [key for key in self._sending if key[0] is channel]:
            del self._sending[key]
        for channels in self._copying.values():
            channels.discard(channel)
        self._remotes.pop(channel).closed(error)


def _decode(head: bytes) -> tuple[int, int, list[Any]]:
    try:
        kind, number, *fields = msgpack.unpackb(head)
    except (TypeError, ValueError, msgpack.UnpackException) as cause:
        raise ProtocolError(f"a message about registered memory that cannot be read: {cause}") from cause
    if type(kind) is not int or type(number) is not int:
        raise ProtocolError(f"a message about registered memory of kind {kind!r}")
    return kind, number, fields
