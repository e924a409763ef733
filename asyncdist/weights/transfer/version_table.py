"""The versions of published weights at a store, and the processes that have them.

next_incarnation         the number of publishers that there have been
latest                   the record of the newest version; changed by compare-and-set only
manifest/<version>       its manifest
order/<version>          the entries of all that began to read it, in that order; only appended to
holder/<version>/<entry> the record of a process that has it or reads it; ephemeral
reader/<process>         what a subscriber uses; ephemeral

All keys belong to one lease: they are deleted when the last publisher and the last subscriber have gone or died. A
publisher takes over when it enters: the record names its incarnation from then on, and an earlier publisher, which may
only have been stopped, can publish no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from asyncdist.errors import StoreConnectionError
from asyncdist.store import AsyncPrefixStore, AsyncStoreBase
from asyncdist.store.protocol import operations
from asyncdist.weights.errors import PublisherReplacedError
from asyncdist.weights.transfer.fan_out import HolderRecord, StoreRecord

_LATEST, _MANIFEST, _ORDER, _HOLDER, _READER = "latest", "manifest/", "order/", "holder/", "reader/"
_ABSENT = b"\0"


@dataclass(frozen=True, slots=True)
class Version(StoreRecord):
    """A published version.

    Attributes:
        number: 1 for the first, and one more for each further one. The version with the highest number is the newest.
        step: The step that the publisher gave, such as the number of training steps; None without one.
        incarnation: The number of the publisher: 1 for the first, and one more for each that entered later.
        nbytes: The bytes of its tensors.
        published_at: When it was published, in seconds since the epoch by the publisher's clock.
        key: The name of the version at the store, which no other version has.
    """

    number: int
    step: int | None
    incarnation: int
    nbytes: int
    published_at: float
    key: str

    def __str__(self) -> str:
        return f"version {self.number}" + (f" (step {self.step})" if self.step is not None else "")


NO_VERSION = Version(0, None, 0, 0, 0.0, "")
"""The record before the first version."""


@dataclass(frozen=True, slots=True)
class ReaderStatus(StoreRecord):
    """What a subscriber has announced.

    Attributes:
        process: The subscriber; no two have the same.
        host: The name of its host.
        pid: Its process id.
        version: The number of the version that its requests use; 0 before the first.
        incarnation: The publisher of that version.
    """

    process: str
    host: str
    pid: int
    version: int = 0
    incarnation: int = 0


class VersionTable:
    """The keys of one set of weights in the part of a ``store`` that belongs to the job. The caller closes the store."""

    def __init__(self, store: AsyncStoreBase, name: str) -> None:
        self._prefix = f"versions/{operations.key_part(name)}"
        self._whole_store = store
        self.store = AsyncPrefixStore(self._prefix, store)

    async def open(self) -> None:
        """Keep the keys from now on.

        If all that kept them are disconnected, wait until one of them comes back or the keys are deleted.
        """
        await self._whole_store.request(operations.acquire_lease(f"{self._prefix}/"))

    async def close(self) -> None:
        await self._whole_store.request(operations.release_lease(f"{self._prefix}/"))

    async def latest(self) -> Version:
        value = await self._value(_LATEST)
        return NO_VERSION if value is None else Version.decode(value)

    async def watch_latest(self) -> AsyncIterator[Version]:
        """Yield the newest version now and after each change; `NO_VERSION` when the store has lost it."""
        async with self.store.watch(_LATEST) as values:
            async for value in values:
                yield NO_VERSION if value is None else Version.decode(value)

    async def manifest(self, version: Version) -> bytes | None:
        """Return the manifest of a version; None if the publisher keeps it no more."""
        return await self._value(_MANIFEST + version.key)

    async def _value(self, key: str) -> bytes | None:
        # A comparison that fails reads a key without waiting for it.
        value = await self.store.compare_set(key, _ABSENT, _ABSENT)
        return None if value == _ABSENT else value

    async def become_publisher(self) -> int:
        """Take over from the publisher before, and return the number of this incarnation."""
        incarnation = await self.store.add("next_incarnation", 1)
        while True:
            before = await self.latest()
            if before.incarnation > incarnation:
                raise PublisherReplacedError(incarnation, before.incarnation)
            if await self._exchange(before, replace(before, incarnation=incarnation)):
                return incarnation

    async def announce(self, version: Version, manifest: bytes, record: HolderRecord, before: Version) -> Version:
        """Make a version the newest, whose number is one more than that of the newest so far, and at least its own.

        The ``record`` is that of the publisher as its first holder, and ``before`` is probably the newest version.

        Raises:
            PublisherReplacedError: A later incarnation has taken over. The version stays unknown.
        """
        # The store executes the requests of a client in their order, so a reader that sees the version finds its keys.
        earlier = [
            self.store.set(_MANIFEST + version.key, manifest),
            self.update(version, record),
            self.store.append(_ORDER + version.key, f"{record.entry};"),
        ]
        try:
            while before.incarnation <= version.incarnation:
                announced = replace(version, number=max(before.number + 1, version.number))
                if await self._exchange(before, announced):
                    return announced
                before = await self.latest()
        finally:
            await asyncio.gather(*earlier)
        await self.withdraw(version, record.entry)
        await self.forget([version.key])
        raise PublisherReplacedError(version.incarnation, before.incarnation)

    async def _exchange(self, before: Version, after: Version) -> bool:
        expected = b"" if before is NO_VERSION else before.encode()
        desired = after.encode()
        return await self.store.compare_set(_LATEST, expected, desired) == desired

    async def forget_all_but(self, kept: Collection[str], incarnation: int) -> None:
        """Delete what the store knows of versions of a publisher and those before it whose keys are not in ``kept``."""
        for kind in (_MANIFEST, _ORDER):
            keys = [key.removeprefix(kind) for key in await self.store.list_keys(kind)]
            # A version's key begins with the incarnation that made it.
            old = [key for key in keys if key not in kept and int(key.partition(".")[0]) <= incarnation]
            await self.forget(old)

    async def forget(self, keys: Iterable[str]) -> None:
        """Delete what the store knows of versions with these keys."""
        await asyncio.gather(*(self.store.delete_key(kind + key) for kind in (_MANIFEST, _ORDER) for key in keys))

    async def enroll(self, version: Version, record: HolderRecord) -> list[str]:
        """Record that this process has a version or begins to read it; return the entries so far, as `order` does."""
        # An entry in the order without a record is that of a process that has ended: the record is set before.
        *_, order = await asyncio.gather(
            self.update(version, record),
            self.store.append(_ORDER + version.key, f"{record.entry};"),
            self.order(version),
        )
        return order

    def update(self, version: Version, record: HolderRecord) -> asyncio.Future[None]:
        return self.store.set(f"{_HOLDER}{version.key}/{record.entry}", record.encode(), ephemeral=True)

    async def withdraw(self, version: Version, entry: str) -> None:
        await self.store.delete_key(f"{_HOLDER}{version.key}/{entry}")

    @contextlib.asynccontextmanager
    async def holders(self, version: Version) -> AsyncIterator[Mapping[str, HolderRecord]]:
        """Yield the records of the holders of a version by entry, which are kept current inside the block."""
        prefix, present = f"{_HOLDER}{version.key}/", dict[str, HolderRecord]()

        async def follow() -> None:
            # Without the store the last known holders may still answer.
            with contextlib.suppress(StoreConnectionError):
                async for key, value in changes:
                    entry = key.removeprefix(prefix)
                    present.pop(entry, None)
                    if value is not None:
                        present[entry] = HolderRecord.decode(value)

        async with self.store.watch_keys(prefix) as changes:
            following = asyncio.create_task(follow())
            try:
                # Until the holders that are there now have been read, which are in the buffer of the stream.
                await asyncio.sleep(0)
                yield present
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def order(self, version: Version) -> list[str]:
        """Return the entries of all that began to read a version since its publisher gave it up, or ever if it has not."""
        return (await self._value(_ORDER + version.key) or b"").decode().split(";")[:-1]

    async def report(self, status: ReaderStatus) -> None:
        await self.store.set(_READER + status.process, status.encode(), ephemeral=True)

    async def leave(self, process: str) -> None:
        await self.store.delete_key(_READER + process)

    async def readers(self) -> list[ReaderStatus]:
        """Return what all living subscribers have announced, in the order of their arrival."""
        values = await asyncio.gather(*(self._value(key) for key in await self.store.list_keys(_READER)))
        return [ReaderStatus.decode(value) for value in values if value is not None]

    async def watch_readers(self) -> AsyncGenerator[list[ReaderStatus], None]:
        """Yield what all living subscribers have announced, now and after each change."""
        async with self.store.watch_keys(_READER) as changes:
            yield await self.readers()
            async for _ in changes:
                yield await self.readers()


def new_version(incarnation: int, serial: int, step: int | None, at_least: int) -> Version:
    """Return a version that is not announced yet, of the publisher with a number, with a serial number of its own."""
    return Version(at_least, step, incarnation, 0, 0.0, f"{incarnation}.{serial}.{secrets.token_hex(4)}")
