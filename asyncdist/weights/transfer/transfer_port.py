"""The port of a process over which it gives versions to others and gets versions from them.

All methods are called on the loop on which the port was made. Bytes are copied in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.config import Config
from asyncdist.errors import PeerLostError, ProtocolError, SharedMemoryError
from asyncdist.kernel import can_share_segments
from asyncdist.net import ChannelAddress, ChannelPort, IncomingMessage, PeerChannel
from asyncdist.weights.content.layout import Manifest, layout_of
from asyncdist.weights.content.selection import Selection, whole_selection
from asyncdist.weights.snapshot import take_snapshot
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.pulling import MappedSource, VersionPuller
from asyncdist.weights.transfer.segments import OwnSegment, SegmentPool
from asyncdist.weights.transfer.serving import VersionServer
from asyncdist.weights.transfer.transfer_messages import (
    ALIVE,
    ASK,
    BLOCKS,
    CLOSED,
    END,
    MAPPED,
    REFUSED,
    Question,
    decode,
    encode,
)
from asyncdist.weights.transfer.version_table import Version

log = logging.getLogger("asyncdist")

_CONNECT = 5.0
"""Seconds for a source to accept a channel."""
_NUM_THREADS = 2


class TransferPort:
    """Gives the versions that this process has, and gets those that it asks for.

    It listens for other hosts at the address ``host``. Ports of different ``service`` do not connect. ``label`` is the role
    of this process in messages.
    """

    def __init__(self, *, host: str, service: str, job: str, token: str | None, config: Config, label: str) -> None:
        self.threads = DaemonThreadPool("asyncdist-weights", _NUM_THREADS, idle_timeout=5.0)
        self.pool = SegmentPool(self.threads, self._tell_closed)
        self._versions: dict[str, HeldVersion] = {}
        """By entry."""
        self._server = VersionServer(self._versions)
        self._puller = VersionPuller()
        self._mapped: dict[HeldVersion, MappedSource] = {}
        self._renewing: set[asyncio.Future[None]] = set()
        self.channels = ChannelPort(self, host=host, service=service, job=job, token=token, config=config, label=label)

    async def close(self) -> None:
        """Close the channels. Mapped memory stays readable."""
        # A caller that is cancelled leaves nothing open either.
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.threads.shutdown, wait=False)
            stack.callback(self.pool.close)
            stack.push_async_callback(self.channels.close)
            if self._renewing:
                await asyncio.wait(self._renewing)
            await self._server.close()

    @property
    def address(self) -> ChannelAddress:
        return self.channels.address

    # -- versions that this process has --------------------------------------------------------

    def new_held(self, version: Version, selection: Selection, manifest: Manifest) -> HeldVersion:
        digests = manifest.digests
        if selection.key:
            digests = np.zeros(len(selection.layout.blocks), dtype=np.uint64)
        return HeldVersion(version, selection, digests, self._unused)

    async def copy(self, tensors: Mapping[str, torch.Tensor], version: Version) -> tuple[HeldVersion, Manifest]:
        """Copy tensors into memory of this process; return them as ``version``, with its size and the time."""
        layout = layout_of(tensors)
        segment = await self.pool.take(layout.nbytes)
        try:
            digests = await take_snapshot(tensors, layout, segment.bytes, self.threads)
        except BaseException:
            self.pool.give_back(segment)
            raise
        manifest = Manifest(layout, digests)
        version = replace(version, nbytes=layout.nbytes, published_at=time.time())
        held = self.new_held(version, whole_selection(layout), manifest)
        held.place(segment)
        held.advance(len(held.blocks))
        return held, manifest

    def offer(self, held: HeldVersion, entry: str) -> None:
        """Give a version to readers from now on, as they ask for this entry."""
        held.entry = entry
        self._versions[entry] = held

    def take_base(self, held: HeldVersion) -> None:
        """Let a version arrive as differences from the newest one that this process has of the same tensors."""
        similar = [each for each in self._versions.values() if each.is_complete and each.is_like(held)]
        if similar:
            held.base = max(similar, key=lambda each: each.version.number)
            held.base.use()

    def drop(self, held: HeldVersion) -> None:
        """Give a version to readers no more. Its memory is used again when those that read it now have ended."""
        self._versions.pop(held.entry, None)
        held.abandon()
        held.release()

    def _unused(self, held: HeldVersion) -> None:
        mapped = self._mapped.pop(held, None)
        if mapped is not None:
            self._renew(mapped)
        elif held.memory is not None:
            memory: Any = held.memory
            (self.pool.discard if held.is_lost else self.pool.give_back)(memory)

    def _renew(self, mapped: MappedSource) -> None:
        """Renew a mapping before its source writes the memory again, so that the next version there shows at once."""

        def renewed(done: asyncio.Future[None]) -> None:
            self._renewing.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                log.info("a mapping could not be renewed yet: %s", error)
            mapped.end()

        renewing = asyncio.wrap_future(self.threads.submit(mapped.mapping.renew))
        self._renewing.add(renewing)
        renewing.add_done_callback(renewed)

    def _tell_closed(self, segment: OwnSegment) -> None:
        for channel in self.channels.channels:
            if channel.is_local and channel.error is None:
                channel.send(encode(CLOSED, segment.id))

    # -- reading -------------------------------------------------------------------------------

    async def get(
        self, held: HeldVersion, manifest: Manifest, entry: str, address: ChannelAddress, *, token: str | None = None
    ) -> None:
        """Get the blocks that a version lacks from one source, or map the memory of a source on this host.

        The ``token`` is that of the source, if it is not that of this port.

        Raises:
            AsyncdistError: The source does not have it any more, has stalled, has sent wrong bytes, or was lost.
            TimeoutError: The source does not accept a channel.
        """
        channel = await self.channels.connect(address, _CONNECT, token=token)
        if held.memory is None and channel.is_local and can_share_segments():
            try:
                await self._map(channel, held, manifest, entry)
                return
            except SharedMemoryError as error:
                log.warning("%s is copied, because it cannot be mapped: %s", held.version, error.summary)
        if held.memory is None:
            held.place(await self.pool.take(held.selection.layout.nbytes))
        if not held.is_complete:
            await self._puller.pull(channel, entry, held, maps=False)

    async def _map(self, channel: PeerChannel, held: HeldVersion, manifest: Manifest, entry: str) -> None:
        mapped = await self._puller.pull(channel, entry, held, maps=True)
        assert mapped is not None
        try:
            if not mapped.mapping.is_renewed:
                await asyncio.wrap_future(self.threads.submit(mapped.mapping.renew))
            mapped.mapping.is_renewed = False
            if held.selection.key and not mapped.selection:
                held.widen(whole_selection(manifest.layout), manifest.digests)
            held.place(mapped.mapping)
        except BaseException:
            mapped.end()
            raise
        self._mapped[held] = mapped
        held.advance(len(held.blocks))

    # -- messages ------------------------------------------------------------------------------

    def connected(self, channel: PeerChannel) -> None:
        """Nothing happens until a reader asks."""

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        unused = list(descriptors)
        try:
            kind, fields = decode(head)
            if kind == ASK:
                self._server.ask(channel, Question.decode(fields, buffers))
            elif kind == END:
                self._server.end(channel, fields[0])
            elif kind == BLOCKS:
                self._puller.received(channel, fields, buffers)
            elif kind == MAPPED:
                self._puller.mapped(channel, fields, unused)
            elif kind == ALIVE:
                self._puller.alive(channel, fields[0])
            elif kind == REFUSED:
                self._puller.refused(channel, fields[0], fields[1])
            elif kind == CLOSED:
                self._puller.forget_segment(channel, fields[0])
        except (TypeError, ValueError, LookupError) as cause:
            raise ProtocolError(f"a message about weights that cannot be read: {cause}") from cause
        finally:
            for descriptor in unused:
                os.close(descriptor)

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        kind, fields = decode(message.head)
        if kind == BLOCKS:
            self._puller.opened(channel, message, fields)
        elif kind != ASK:
            raise ProtocolError(f"a long message of kind {kind}")

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        kind, fields = decode(message.head)
        if kind == ASK and message.error is None:
            self._server.ask(channel, Question.decode(fields, message.buffers))
        elif kind == BLOCKS:
            self._puller.completed(message)

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        self._puller.withdrawn(message)

    def closed(self, channel: PeerChannel, error: PeerLostError) -> None:
        self._puller.closed(channel, error)
        self._server.closed(channel)
