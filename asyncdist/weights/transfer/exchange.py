"""What a publisher and a subscriber have in common: the versions that this process has, and their exchange with others.

All methods are called on the loop on which the exchange was opened. Bytes are copied in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.base.deadline import Timeout
from asyncdist.base.error_text import describe_error
from asyncdist.channels import ChannelAddress, ChannelPort, IncomingMessage, JobDirectory, PeerChannel
from asyncdist.config import Config
from asyncdist.errors import (
    AsyncdistError,
    DigestError,
    PeerLostError,
    ProtocolError,
    SharedMemoryError,
    StoreError,
    WeightsError,
)
from asyncdist.memory.shared_segment import can_share_segments
from asyncdist.weights.content.manifest import Manifest
from asyncdist.weights.content.selection import Selection, whole_selection
from asyncdist.weights.transfer.fan_out import HolderRecord, ranked_sources
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
from asyncdist.weights.transfer.version_table import HoldersView, Version, VersionTable

log = logging.getLogger("asyncdist")

_CONNECT = 5.0
"""Seconds for a source to accept a channel."""
_NUM_THREADS = 2


class WeightsExchange:
    """The part of this process in one set of weights. Make it with `open`.

    Attributes:
        table: The versions at the store.
        threads: Threads for copies.
        pool: Memory for versions that this process writes.
    """

    def __init__(self, directory: JobDirectory, table: VersionTable, config: Config, label: str, name: str) -> None:
        self.table = table
        self._directory = directory
        self.threads = DaemonThreadPool("asyncdist-weights", _NUM_THREADS, idle_timeout=5.0)
        self.pool = SegmentPool(self.threads, self._tell_closed)
        self._versions: dict[str, HeldVersion] = {}
        self._server = VersionServer(self._versions, self.threads)
        self._puller = VersionPuller()
        self._entries: dict[HeldVersion, str] = {}
        self._mapped: dict[HeldVersion, MappedSource] = {}
        self._serial = 0
        self.port = ChannelPort(
            self,
            host=directory.host,
            service=f"weights {name}",
            job=directory.job,
            token=directory.token,
            config=config,
            label=label,
        )

    @classmethod
    async def open(cls, job: str, name: str, *, label: str, config: Config, timeout: Timeout) -> Self:
        """Connect to the store of a job, and accept channels. Raises the errors of `JobDirectory.open`."""
        directory = await JobDirectory.open(job, "weights", config=config, timeout=timeout)
        try:
            table = VersionTable(directory.store, name)
            await table.open()
            return cls(directory, table, config, label, name)
        except BaseException:
            await directory.close()
            raise

    async def close(self) -> None:
        """Close the channels and the connection to the store. What this process has mapped stays readable."""
        await self._server.close()
        await self.port.close()
        self.pool.close()
        with contextlib.suppress(StoreError):
            await self.table.close()
        await self._directory.close()
        self.threads.shutdown(wait=False)

    # -- versions that this process has --------------------------------------------------------

    def record(self, selection: Selection, *, is_complete: bool) -> HolderRecord:
        """Return a new record of this process as a holder."""
        self._serial += 1
        address = self.port.address
        shares = can_share_segments() and bool(address.unix)
        host = f"{address.host}/{address.user}/{address.network}" if shares else ""
        entry = f"{address.id}.{self._serial}"
        return HolderRecord(entry, address.id, host, selection.key, is_complete, address.encode())

    def new_held(self, version: Version, selection: Selection, manifest: Manifest) -> HeldVersion:
        """Return a version that has no blocks yet."""
        digests = manifest.digests
        if selection.key:
            digests = np.zeros(len(selection.layout.blocks), dtype=np.uint64)
        return HeldVersion(version, selection, digests, self._unused)

    def offer(self, held: HeldVersion, entry: str) -> None:
        """Give a version to readers from now on, as they ask for it."""
        self._versions[held.version.key] = held
        self._entries[held] = entry

    async def drop(self, held: HeldVersion) -> None:
        """Give a version to readers no more. Its memory is used again when those have it that read it now."""
        entry = self._entries.pop(held, None)
        if self._versions.get(held.version.key) is held:
            del self._versions[held.version.key]
        held.abandon()
        held.release()
        if entry is not None:
            await self.table.withdraw(held.version, entry)

    def _unused(self, held: HeldVersion) -> None:
        mapped = self._mapped.pop(held, None)
        if mapped is not None:
            mapped.end()
        elif held.memory is not None:
            memory: Any = held.memory
            (self.pool.discard if held.is_lost else self.pool.give_back)(memory)

    def _tell_closed(self, segment: OwnSegment) -> None:
        for channel in self.port.channels:
            if channel.is_local and channel.error is None:
                channel.send(encode(CLOSED, segment.id))

    # -- reading -------------------------------------------------------------------------------

    async def fetch(self, version: Version, manifest: Manifest, selection: Selection) -> HeldVersion:
        """Get a version from those that have it; give it to others already while it arrives.

        Raises:
            DigestError: No source is left, and one has sent bytes that were not published.
            WeightsError: No source is left.
        """
        held = self.new_held(version, selection, manifest)
        record = self.record(selection, is_complete=False)
        self.offer(held, record.entry)
        try:
            async with self.table.holders(version) as holders:
                if not holders.present:
                    raise self._no_source(version, ())
                order = await self.table.enroll(version, record)
                await self._fill(held, manifest, holders, order, record)
            complete = replace(record, selection=held.selection.key, is_complete=True)
            # Its failure is that of the next operation, too.
            self.table.update(version, complete).add_done_callback(lambda done: done.cancelled() or done.exception())
            return held
        except BaseException:
            await self.drop(held)
            raise

    async def _fill(
        self, held: HeldVersion, manifest: Manifest, holders: HoldersView, order: Sequence[str], record: HolderRecord
    ) -> None:
        failures: dict[str, Exception] = {}
        num_blocks = len(held.blocks)
        while not held.is_complete or held.memory is None:
            sources = ranked_sources(order, holders.present, record, num_blocks, failures)
            if not sources:
                order = await self.table.order(held.version)
                sources = ranked_sources(order, holders.present, record, num_blocks, failures)
            if not sources:
                raise self._no_source(held.version, list(failures.values()))
            try:
                await self._get(held, manifest, sources[0])
            except (AsyncdistError, TimeoutError) as error:
                failures[sources[0].entry] = error
                log.warning("%s: trying another source: %s", held.version, describe_error(error))

    @staticmethod
    def _no_source(version: Version, failures: Sequence[Exception]) -> WeightsError:
        for error in failures:
            if isinstance(error, DigestError):
                return error
        tried = "; ".join(map(describe_error, failures)) or "no process has it"
        return WeightsError(f"{version} cannot be read: {tried}")

    async def _get(self, held: HeldVersion, manifest: Manifest, source: HolderRecord) -> None:
        address = ChannelAddress.decode(source.address)
        channel = await self.port.connect(address, timeout=_CONNECT)
        if held.memory is None and channel.is_local and can_share_segments():
            mapped = await self._puller.pull(channel, held, maps=True)
            assert mapped is not None
            try:
                await self._use_mapping(held, manifest, mapped)
                return
            except SharedMemoryError as error:
                mapped.end()
                log.warning("%s is copied, because it cannot be mapped: %s", held.version, error.message)
            except BaseException:
                mapped.end()
                raise
        if held.memory is None:
            held.place(await self.pool.take(held.selection.layout.nbytes))
        if not held.is_complete:
            await self._puller.pull(channel, held, maps=False)

    async def _use_mapping(self, held: HeldVersion, manifest: Manifest, mapped: MappedSource) -> None:
        await asyncio.wrap_future(self.threads.submit(mapped.mapping.renew))
        if held.selection.key and not mapped.selection:
            held.widen(whole_selection(manifest.layout), manifest.digests)
        held.place(mapped.mapping)
        self._mapped[held] = mapped
        held.advance(len(held.blocks))

    # -- messages ------------------------------------------------------------------------------

    def connected(self, channel: PeerChannel) -> None:
        """Nothing happens until a reader asks."""

    def received(
        self, channel: PeerChannel, head: bytes, buffers: Sequence[memoryview], descriptors: Sequence[int]
    ) -> None:
        """Handle a short message."""
        unused = list(descriptors)
        try:
            kind, fields = decode(head)
            self._handle(channel, kind, fields, buffers, unused)
        except (TypeError, ValueError, LookupError) as cause:
            raise ProtocolError(f"a message about weights that cannot be read: {cause}") from cause
        finally:
            for descriptor in unused:
                os.close(descriptor)

    def _handle(
        self,
        channel: PeerChannel,
        kind: int,
        fields: Sequence[Any],
        buffers: Sequence[memoryview],
        descriptors: list[int],
    ) -> None:
        if kind == ASK:
            self._server.ask(channel, Question.decode(fields, buffers))
        elif kind == END:
            self._server.end(channel, fields[0])
        elif kind == BLOCKS:
            self._puller.received(channel, fields, buffers)
        elif kind == MAPPED:
            self._puller.mapped(channel, fields, descriptors)
        elif kind == ALIVE:
            self._puller.alive(channel, fields[0])
        elif kind == REFUSED:
            self._puller.refused(channel, fields[0], fields[1])
        elif kind == CLOSED:
            self._puller.forget_segment(channel, fields[0])

    def opened(self, channel: PeerChannel, message: IncomingMessage) -> None:
        """Handle the beginning of a long message."""
        for descriptor in message.descriptors:
            os.close(descriptor)
        kind, fields = decode(message.head)
        if kind == BLOCKS:
            self._puller.opened(channel, message, fields)
        elif kind != ASK:
            raise ProtocolError(f"a long message of kind {kind}")

    def completed(self, channel: PeerChannel, message: IncomingMessage) -> None:
        """Handle a long message."""
        kind, fields = decode(message.head)
        if kind == ASK and message.error is None:
            self._server.ask(channel, Question.decode(fields, message.buffers))
        elif kind == BLOCKS:
            self._puller.completed(message)

    def withdrawn(self, channel: PeerChannel, message: IncomingMessage) -> None:
        """Handle the end of a long message that its sender has given up."""
        self._puller.withdrawn(message)

    def closed(self, channel: PeerChannel, error: PeerLostError, messages: Sequence[IncomingMessage]) -> None:
        """Handle the end of a channel."""
        self._puller.closed(channel, error)
        self._server.closed(channel)
