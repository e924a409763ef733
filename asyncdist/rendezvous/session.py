"""A rendezvous session: this rank's place in a world, the store that the ranks share, and the orderly exit.

`join` creates it; `groups.world` uses it to exchange addresses, and closes it.

Keys of one world in rank 0's store, all under ``world/<id>/``:

    size               the number of ranks, as rank 0 knows it; present unless the record is stale
    joined/<rank>      the process that claims the rank; the first claim wins
    left/<rank>        the rank does not use the store any more
    payload/<n>/<rank> the rank's payload of the n-th exchange, or the reason why it failed
    kv/                the keys of `RendezvousSession.store`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdist.base.background_loop import cancel_all
from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline
from asyncdist.errors import (
    RendezvousError,
    RendezvousTimeoutError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    ranks,
)
from asyncdist.rendezvous.record_store import AddressRecord, RecordStore
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.prefix import AsyncPrefixStore

if TYPE_CHECKING:
    from asyncdist.store.server.server import StoreServer

log = logging.getLogger("asyncdist")

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
FIRST_NOTICE = 10.0
"""Seconds after which a rank logs for whom it waits. Each further notice comes after twice the time of the one before."""
_PAYLOAD, _ERROR = b"\x01", b"\x00"
_LAST_READ_TIMEOUT = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time limit of one rendezvous: the user's timeout in seconds, and its deadline."""

    timeout: float
    deadline: Deadline


@dataclass(eq=False, repr=False)
class RendezvousSession:
    """This rank's place in a world. It belongs to the loop that created it; close it when the world is destroyed.

    Attributes:
        token: The job's token; None without one.
        listen_host: The address on which to listen, and which peers dial.
        where: The meeting point for messages: a ``tcp://`` URL of rank 0's store, or the name of the record store.
        server: The store's server on rank 0; None on other ranks.
        world_id: Identifier of the world, equal on every rank and never used twice.
        store: A store for the members of the world.
    """

    _record: AddressRecord
    rank: int
    _client: AsyncStore
    token: str | None
    listen_host: str
    where: str
    _limit: TimeLimit
    server: StoreServer | None = None

    def __post_init__(self) -> None:
        self.world_size, self.world_id = self._record.world_size, self._record.world_id
        self.keys = self._record.key
        self.store = AsyncPrefixStore(self.keys("kv"), self._client)
        self._resources = AsyncExitStack()
        self._records: RecordStore | None = None
        self._exchanges = 0
        self._pending_exchanges = [0]
        """Numbers of the exchanges in which other ranks may wait for this rank's payload."""
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def __repr__(self) -> str:
        return f"<RendezvousSession rank {self.rank} of {self.world_size} at {self.where}, world {self.world_id}>"

    def adopt(self, resources: AsyncExitStack, records: RecordStore | None = None) -> None:
        """Take over the resources that `close` closes, and the record store from which rank 0 withdraws its record."""
        self._resources = resources.pop_all()
        self._records = records

    def remaining(self) -> float:
        """Return the seconds left until the deadline of the rendezvous."""
        return self._limit.deadline.remaining()

    async def exchange(self, payload: bytes, *, timeout: float | None = None, more: bool = False) -> list[bytes]:
        """All-gather one payload of each rank, in one round trip to the store. Every rank calls it equally often.

        Close the session after a failed exchange.

        Args:
            payload: The payload of this rank.
            timeout: Seconds to wait; by default until the deadline of the rendezvous.
            more: Whether another exchange follows at once, without which the world is not complete.

        Returns:
            The payloads in order of rank.

        Raises:
            RendezvousTimeoutError: The first of the waiting ranks ran out of time; raised on all of them.
            RendezvousError: A rank gave up, or the connection to rank 0's store was lost.
        """
        limit = self._limit if timeout is None else TimeLimit(timeout, Deadline.after(timeout))
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._pending_exchanges = [number, number + 1] if more else [number]
        try:
            values = await self._offer_and_wait(self._payload_keys(number), _PAYLOAD + payload, limit)
        except StoreConnectionError as error:
            raise self._host_lost() from error
        self._pending_exchanges = [number + 1] if more else []
        for value in values:
            if not value.startswith(_PAYLOAD):
                raise _error_in(value, self.where)
        return [value[len(_PAYLOAD) :] for value in values]

    def status_record(self, ports: Sequence[tuple[int, str, int]]) -> AddressRecord:
        """Return the world's record with the rank, host and port of status ports."""
        return replace(self._record, status=tuple(ports))

    async def publish_status(self, ports: Sequence[tuple[int, str, int]]) -> None:
        """On rank 0, add the status ports of all ranks to the record that it has published."""
        if self._records is not None:
            record = self.status_record(ports)
            if await self._records.swap(self._record.encode(), record.encode()) == record.encode():
                self._record = record

    async def before_exchange(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine before the next exchange; raise RendezvousError as soon as that exchange has failed.

        It has failed if another rank wrote an error in place of this rank's payload, or if rank 0's store has ended.
        """
        failed = self._client.get(self.keys("payload", self._exchanges, self.rank), timeout=math.inf)
        done = asyncio.ensure_future(coroutine)
        either: list[asyncio.Future[Any]] = [failed, done]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return await done
            raise _error_in(await failed, self.where)
        except StoreConnectionError as error:
            raise self._host_lost() from error
        finally:
            await cancel_all(failed, done)

    def _payload_keys(self, exchange: int) -> list[str]:
        return [self.keys("payload", exchange, rank) for rank in range(self.world_size)]

    def _host_lost(self) -> RendezvousError:
        return RendezvousError(
            f"rank 0 left or died before the world was complete: its store (at {self.where}) closed the connection; "
            "read rank 0's log first"
        )

    async def _offer_and_wait(self, keys: list[str], offer: bytes, limit: TimeLimit) -> list[bytes]:
        # Not a plain set: the other ranks may have written an error in place of the payload of a late rank.
        offering = asyncio.ensure_future(self._client.compare_set(keys[self.rank], b"", offer))
        values = self._client.multi_get(keys, timeout=limit.deadline.remaining())
        pause = FIRST_NOTICE
        try:
            # Rank 0 alone speaks for all that have joined.
            while not (await asyncio.wait([values], timeout=pause if self.rank == 0 else None))[0]:
                joined, missing = await self._presence(keys)
                log.warning(
                    "still waiting for rank %s at %s: %d of %d have joined",
                    ranks(missing), self.where, len(joined), self.world_size,
                )  # fmt: skip
                pause *= 2
            return await values
        except StoreTimeoutError:
            return await self._give_up(keys, limit)
        finally:
            await cancel_all(values, offering)

    async def _presence(self, keys: list[str]) -> tuple[list[int], list[int]]:
        """Return the ranks whose keys are present, and the others."""
        present = set(await self._client.list_keys(keys[0].removesuffix("0")))
        joined = [rank for rank, key in enumerate(keys) if key in present]
        return joined, [rank for rank, key in enumerate(keys) if key not in present]

    async def _give_up(self, keys: list[str], limit: TimeLimit) -> list[bytes]:
        """Write a timeout error in place of the missing payloads, so that every waiting rank raises it.

        Returns the values of ``keys``: only payloads, if the last of them arrived just now.
        """
        joined, missing = await self._presence(keys)
        failure = _failure(joined=joined, missing=missing, timeout=limit.timeout)
        await asyncio.gather(*(self._client.compare_set(keys[rank], b"", failure) for rank in missing))
        return await self._client.multi_get(keys, timeout=_LAST_READ_TIMEOUT)

    async def refuse(self, reason: str, rank: int) -> None:
        """Fail the exchange on the ranks that wait for ``rank``, with a reason."""
        await self._client.compare_set(self.keys("payload", self._exchanges, rank), b"", _failure(reason=reason))

    async def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Leave the world and close all connections. Rank 0 first waits for the other ranks, at most ``timeout`` seconds.

        If the loop that created the session is closed, as after `asyncio.run`, only resources of other loops are closed.
        """
        if self._closed:
            return
        self._closed = True
        if self._loop.is_closed():
            # A connection can be closed only on its own loop, and ended with that loop.
            with contextlib.suppress(RuntimeError):
                await self._resources.aclose()
            return
        try:
            async with asyncio.timeout(timeout):
                await (self._close_as_host() if self.rank == 0 else self._close_as_member())
        except (TimeoutError, StoreError, RendezvousError):
            pass  # rank 0 or its store has ended
        finally:
            await self._resources.aclose()

    async def _close_as_member(self) -> None:
        # No rank has seen this one yet, so another process may claim the rank.
        if not self._exchanges:
            await self._client.delete_key(self.keys("joined", self.rank))
            return
        await self._fail_pending_exchanges()
        await self._client.set(self.keys("left", self.rank), b"1")

    async def _close_as_host(self) -> None:
        if self._records is not None:
            await self._records.withdraw(self._record.encode())
        await self._client.set(self.keys("left", 0), b"1")
        await self._fail_pending_exchanges()
        prefix = self.keys("joined", "")
        joined = [int(key.removeprefix(prefix)) for key in await self._client.list_keys(prefix)]
        await self._until_alone([rank for rank in joined if rank != 0])
        # The server may continue to serve other worlds.
        for key in await self._client.list_keys(self.keys("")):
            await self._client.delete_key(key)

    async def _until_alone(self, ranks: list[int]) -> None:
        """Wait until all of ``ranks`` have left, or no other client is connected, because a dead rank writes no key."""
        left = self._client.wait([self.keys("left", rank) for rank in ranks], timeout=math.inf)
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        try:
            while self.server is not None and self.server.num_connections > 1 and not left.done():
                await asyncio.wait([left], timeout=backoff.next_pause())
        finally:
            await cancel_all(left)

    async def _fail_pending_exchanges(self) -> None:
        """Fail the exchanges that wait for this rank's payload, on the ranks that wait now or later."""
        failure = _failure(reason=f"rank {self.rank} gave up before the world was complete; read its log first")
        for number in self._pending_exchanges:
            keys = self._payload_keys(number)
            await self._client.set(keys[self.rank], failure)
            await asyncio.gather(*(self._client.compare_set(key, b"", failure) for key in keys))


def _failure(**fields: Any) -> bytes:
    """Return the value that a rank writes in place of a payload when an exchange fails."""
    return _ERROR + json.dumps(fields).encode()


def _error_in(value: bytes, where: str) -> RendezvousError:
    fields = json.loads(value[len(_ERROR) :])
    if "missing" in fields:
        return RendezvousTimeoutError(fields["joined"], fields["missing"], fields["timeout"], where)
    return RendezvousError(fields["reason"])
