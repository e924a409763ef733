"""What a publisher and a subscriber have in common: a port, the versions at the store, and reading from any source.

All methods are called on the loop on which the exchange was opened.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from asyncdist.base.deadline import Timeout
from asyncdist.base.error_text import describe_error
from asyncdist.config import Config
from asyncdist.errors import AsyncdistError, StoreError
from asyncdist.kernel import can_share_segments
from asyncdist.net import ChannelAddress
from asyncdist.rendezvous import JobDirectory
from asyncdist.weights.content.layout import Manifest
from asyncdist.weights.content.selection import Selection
from asyncdist.weights.errors import DigestError, WeightsError
from asyncdist.weights.transfer.fan_out import HolderRecord, ranked_sources
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.transfer_port import TransferPort
from asyncdist.weights.transfer.version_table import Version, VersionTable

log = logging.getLogger("asyncdist")


class WeightsExchange:
    """The part of this process in one set of weights: the table of the store, and a port. Make it with `open`."""

    def __init__(self, directory: JobDirectory, table: VersionTable, port: TransferPort) -> None:
        self.table, self.port = table, port
        self._directory = directory
        self._serial = 0

    @classmethod
    async def open(cls, job: str, name: str, *, label: str, config: Config, timeout: Timeout) -> Self:
        """Connect to the store of a job, and accept channels. Raises the errors of `JobDirectory.open`."""
        directory = await JobDirectory.open(job, "weights", config=config, timeout=timeout)
        try:
            table = VersionTable(directory.store, name)
            await table.open()
            port = TransferPort(
                host=directory.host,
                service=f"weights {name}",
                job=directory.job,
                token=directory.token,
                config=config,
                label=label,
            )
            return cls(directory, table, port)
        except BaseException:
            await directory.close()
            raise

    async def close(self) -> None:
        """Close the channels and the connection to the store. Mapped memory stays readable."""
        try:
            await self.port.close()
            with contextlib.suppress(StoreError):
                await self.table.close()
        finally:
            await self._directory.close()

    def _record(self, selection: Selection, *, is_complete: bool) -> HolderRecord:
        """Return a new record of this process as a holder."""
        self._serial += 1
        address = self.port.address
        shares = can_share_segments() and bool(address.unix)
        host = f"{address.host}/{address.user}/{address.network}" if shares else ""
        entry = f"{address.id}.{self._serial}"
        return HolderRecord(entry, address.id, host, selection.key, is_complete, address.encode())

    async def announce(self, held: HeldVersion, manifest: bytes, before: Version) -> None:
        """Give a version to readers, and make it the newest after ``before``. Raises the errors of the table."""
        record = self._record(held.selection, is_complete=True)
        self.port.offer(held, record.entry)
        held.version = await self.table.announce(held.version, manifest, record, before)

    async def drop(self, held: HeldVersion) -> None:
        """Give a version to readers no more. Its memory is used again when those that read it now have ended."""
        self.port.drop(held)
        if held.entry:
            await self.table.withdraw(held.version, held.entry)

    async def fetch(self, version: Version, manifest: Manifest, selection: Selection) -> HeldVersion:
        """Get a version from those that have it; give it to others already while it arrives.

        Raises:
            DigestError: No source is left, and one has sent bytes that were not published.
            WeightsError: No source is left.
        """
        held = self.port.new_held(version, selection, manifest)
        self.port.take_base(held)
        record = self._record(selection, is_complete=False)
        self.port.offer(held, record.entry)
        try:
            async with self.table.holders(version) as holders:
                if not holders:
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
        finally:
            held.end_base()

    async def _fill(
        self,
        held: HeldVersion,
        manifest: Manifest,
        holders: Mapping[str, HolderRecord],
        order: Sequence[str],
        record: HolderRecord,
    ) -> None:
        failures: dict[str, Exception] = {}
        num_blocks = len(held.blocks)
        while not held.is_complete or held.memory is None:
            sources = ranked_sources(order, holders, record, num_blocks, failures)
            if not sources:
                order = await self.table.order(held.version)
                sources = ranked_sources(order, holders, record, num_blocks, failures)
            if not sources and held.base is not None:
                held.end_base()
                failures.clear()
                continue
            if not sources:
                raise self._no_source(held.version, list(failures.values()))
            try:
                await self.port.get(held, manifest, sources[0].entry, ChannelAddress.decode(sources[0].address))
            except (AsyncdistError, TimeoutError) as error:
                if isinstance(error, DigestError) and held.base is not None:
                    held.end_base()
                    text = "%s: the differences do not lead to its digests, so it is read whole: %s"
                    log.warning(text, held.version, describe_error(error))
                    continue
                failures[sources[0].entry] = error
                level = logging.WARNING if isinstance(error, DigestError) else logging.INFO
                log.log(level, "%s: trying another source: %s", held.version, describe_error(error))

    @staticmethod
    def _no_source(version: Version, failures: Sequence[Exception]) -> WeightsError:
        for error in failures:
            if isinstance(error, DigestError):
                return error
        tried = "; ".join(map(describe_error, failures)) or "no process has it"
        return WeightsError(f"{version} cannot be read: {tried}")
