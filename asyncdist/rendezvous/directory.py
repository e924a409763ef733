"""The address records of a job: who offers what, in the store of the job, each under a key with a lease.

A process publishes a record under a name. The store deletes it when the process withdraws it, closes its client, or dies;
the processes that watch the name are told. Keys, below ``channels/<job>/<service>/``:

    token               the token of the job, if none is set: a random one, which the first process stores
    at/<name>/<id>      a record; ``id`` is that of the port
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import InitVar, dataclass
from typing import Any, Self
from urllib.parse import unquote

import msgpack

from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.config import Config
from asyncdist.errors import ProtocolError, StoreError
from asyncdist.net.connection.handshake import ChannelAddress
from asyncdist.rendezvous.addresses import own_host
from asyncdist.rendezvous.init_method import InitMethod, daemon_address
from asyncdist.rendezvous.sources import check_token, host_of
from asyncdist.store.base import AsyncStoreBase
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.prefix import AsyncPrefixStore
from asyncdist.store.protocol.operations import key_part

log = logging.getLogger("asyncdist")

_ABSENT = b"\0"
_TOKEN = "token"
_LEASE = 2.0
"""Seconds after which a process that has disconnected from the store counts as gone."""


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What a process has published under a name: where it accepts channels, and plain data of the service, as a rank."""

    name: str
    address: ChannelAddress
    about: Any

    @property
    def key(self) -> str:
        return f"{_folder(self.name)}{self.address.id}"

    def encode(self) -> bytes:
        packed: bytes = msgpack.packb([self.name, self.address.encode(), self.about])
        return packed

    @classmethod
    def decode(cls, data: bytes) -> PeerRecord:
        """Return a record. Raises ProtocolError for other bytes."""
        try:
            name, address, about = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException) as cause:
            raise ProtocolError(f"a record of the job is not legible: {cause}") from cause
        return cls(str(name), ChannelAddress.decode(address), about)


@dataclass(frozen=True, slots=True)
class RecordChange:
    """A record of the port ``id`` that was published or, if ``record`` is None, has ended."""

    id: str
    record: PeerRecord | None


@dataclass(eq=False, repr=False)
class JobDirectory:
    """The records of one service of one job. Make it with `open`, on the loop that uses it, and `close` it.

    This process should listen at ``host``, so that the others reach it. ``where`` is the job in messages.
    """

    _base: InitVar[AsyncStoreBase]
    _prefix: str
    job: str
    where: str
    host: str
    token: str | None
    _client: AsyncStore | None
    _config: Config

    def __post_init__(self, base: AsyncStoreBase) -> None:
        self.store: AsyncStoreBase = AsyncPrefixStore(self._prefix, base)
        """The part of the store that belongs to this service, for further keys of its own."""
        self._published: dict[str, PeerRecord] = {}

    @classmethod
    async def open(cls, job: str | AsyncStoreBase, service: str, *, config: Config, timeout: Timeout = None) -> Self:
        """Connect to the store of a job.

        Args:
            job: ``asyncdist://host:port/job`` of a store daemon, or a store that the processes of the job share, which
                the caller closes.
            timeout: Seconds to connect, and of each operation; None for ASYNCDIST_TIMEOUT.

        Raises:
            UsageError: The URL names no job at a store.
            AuthenticationError: There is no token, and other hosts can read in the store what processes tell each other.
            StoreConnectionError: No store has answered in time.
            AddressError: A host does not resolve.
        """
        limit = seconds(timeout, config.timeout)
        deadline = Deadline.after(limit)
        async with contextlib.AsyncExitStack() as stack:
            client: AsyncStore | None = None
            store: AsyncStoreBase
            if isinstance(job, AsyncStoreBase):
                store, name, where = job, "job", repr(job)
                master = host_of(InitMethod("store", 0, 1), job)
            else:
                master, port, name = daemon_address(job)
                config = config.with_(store_lease=min(_LEASE, config.store_lease))
                client = await AsyncStore.connect(master, port, token=config.token, timeout=limit, config=config)
                store = client
                stack.push_async_callback(client.close)
                where = job
            check_token(
                master, config, f"a generated token cannot be passed to other hosts through the store at {master}"
            )
            host = await own_host(master, config, deadline)
            prefix = f"channels/{key_part(name)}/{key_part(service)}"
            directory = cls(store, prefix, name, where, host, config.token, client, config)
            directory.token = directory.token or await directory._agreed_token(secrets.token_hex(16))
            stack.pop_all()
            return directory

    async def _agreed_token(self, proposed: str) -> str:
        """Return the token that the first process of the job has stored."""
        return (await self.store.compare_set(_TOKEN, "", proposed)).decode()

    async def publish(self, record: PeerRecord) -> None:
        """Publish a record, or replace that of this port under this name."""
        await self.store.set(record.key, record.encode(), ephemeral=True)
        self._published[record.key] = record

    async def withdraw(self, record: PeerRecord) -> None:
        self._published.pop(record.key, None)
        await self.store.delete_key(record.key)

    async def keep(self, use_token: Callable[[str], object]) -> None:
        """Connect to each store that follows at the job's address when one is lost for good, and publish the records there.

        Run it as a task, and cancel it before `close`. The log tells of each loss: others find nothing of this process
        until then. Without a token in the settings, ``use_token`` is called with the one that was stored there first. It
        returns if the caller of `open` passed the store.
        """
        while True:
            try:
                async with self.store.watch(_TOKEN) as changes:
                    async for _ in changes:
                        pass
            except StoreError as error:
                log.error("%s: no process finds what this one has published there: %s", self.where, error.summary)
            if self._client is None:
                return
            self._client = await self._client.successor()
            self.store = AsyncPrefixStore(self._prefix, self._client)
            # An error of the store is that of the next watch, too.
            with contextlib.suppress(StoreError):
                if not self._config.token:
                    self.token = await self._agreed_token(self.token or "")
                    use_token(self.token)
                for record in list(self._published.values()):
                    await self.publish(record)
                log.warning("%s: published %d records again in its new store", self.where, len(self._published))

    async def names(self) -> list[str]:
        """Return the names under which there are records."""
        keys = await self.store.list_keys("at/")
        return list(dict.fromkeys(unquote(key.split("/")[1]) for key in keys if key.count("/") == 2))

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[AsyncIterator[RecordChange]]:
        """Return the records under a name, and then each change, as an iterator.

        Example:
            >>> async with directory.watch("policy") as changes:
            ...     async for change in changes:
            ...         print(change.record or f"{change.id} has ended")
        """
        async with self.store.watch_keys(_folder(name)) as changes:
            yield _RecordChanges(changes)

    async def records(self, name: str) -> list[PeerRecord]:
        keys = await self.store.list_keys(_folder(name))
        # A comparison that fails reads a key without waiting for it.
        values = await asyncio.gather(*[self.store.compare_set(key, _ABSENT, _ABSENT) for key in keys])
        return [PeerRecord.decode(value) for value in values if value != _ABSENT]

    async def close(self) -> None:
        """Delete the records of this process, and close the connection if `open` made it. Idempotent."""
        if self._client is not None:
            await self._client.close()


class _RecordChanges:
    """Changes of keys as changes of records. A limit of the caller ends its waiting for one, and not the iteration."""

    def __init__(self, changes: AsyncIterator[tuple[str, bytes | None]]) -> None:
        self._changes = changes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RecordChange:
        key, value = await anext(self._changes)
        return RecordChange(key.rpartition("/")[2], None if value is None else PeerRecord.decode(value))


def _folder(name: str) -> str:
    return f"at/{key_part(name)}/"
