"""A rendezvous session: this rank's place in a world, the store that the ranks share, and the orderly exit.

`join` creates it; `groups.world` uses it to exchange addresses, and closes it.

Keys of one world in rank 0's store, all under ``world/<id>/``:

    size               the number of ranks, as rank 0 knows it; present unless the record is stale
    joined/<rank>      the process that claims the rank; the first claim wins
    left/<rank>        the rank does not use the store any more
    payload/<n>/<rank> the rank's payload of the n-th exchange
    part<k>/<n>/<rank> the payloads that the first rank of BLOCK**k ranks has combined
    result/<n>         what rank 0 has combined of all, or the reason why the exchange failed; the first one counts
    note/<name>        what ranks have appended for those that need it, as `RendezvousSession.note`
    kv/                the keys of `RendezvousSession.store`
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgpack

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
_RESULT, _ERROR = b"\x01", b"\x00"
BLOCK = 64
"""The number of ranks whose payloads the first of them combines, and of blocks whose results the first of them combines."""
_LAST_READ_TIMEOUT = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time limit of one rendezvous: the user's timeout in seconds, and its deadline."""

    timeout: float
    deadline: Deadline


class Summary(Protocol):
    """Combines what the ranks pass to `RendezvousSession.combine`."""

    async def merge(self, parts: Sequence[bytes], level: int) -> bytes:
        """Combine the payloads of consecutive ranks, from this one on; at a ``level`` above 0 what this has returned."""


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
        """All-gather one payload of each rank, in order of rank. `combine` has the arguments and the errors."""
        return list(msgpack.unpackb(await self.combine(payload, _Listed(), timeout=timeout, more=more)))

    async def combine(
        self, payload: bytes, summary: Summary, *, timeout: float | None = None, more: bool = False
    ) -> bytes:
        """Combine one payload of each rank along a tree, and return the result. Every rank calls it equally often.

        Close the session after a failed call.

        Args:
            payload: The payload of this rank.
            summary: Combines payloads; equal on all ranks.
            timeout: Seconds to wait; by default until the deadline of the rendezvous.
            more: Whether another exchange follows at once, without which the world is not complete.

        Raises:
            RendezvousTimeoutError: The first of the waiting ranks ran out of time; raised on all of them.
            RendezvousError: A rank gave up, or the connection to rank 0's store was lost.
        """
        limit = self._limit if timeout is None else TimeLimit(timeout, Deadline.after(timeout))
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._pending_exchanges = [number, number + 1] if more else [number]
        try:
            value = await self._offer_and_wait(number, payload, summary, limit)
        except StoreConnectionError as error:
            raise self._host_lost() from error
        self._pending_exchanges = [number + 1] if more else []
        if not value.startswith(_RESULT):
            raise self._error_in(value)
        return value[len(_RESULT) :]

    async def offered(self, rank: int) -> bytes:
        """Return what another rank has passed to the last call of `combine`."""
        return await self._client.get(self.keys("payload", self._exchanges - 1, rank))

    async def note(self, notes: Mapping[str, bytes]) -> None:
        """Append to notes of the world. What is appended in `Summary.merge` is there when `combine` returns."""
        await asyncio.gather(*(self._client.append(self.keys("note", name), note) for name, note in notes.items()))

    async def noted(self, name: str) -> bytes:
        """Return a note of the world."""
        return await self._client.get(self.keys("note", name))

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

        It has failed if it has a result before this rank takes part, or if rank 0's store has ended.
        """
        failed = self._client.get(self.keys("result", self._exchanges), timeout=math.inf)
        done = asyncio.ensure_future(coroutine)
        either: list[asyncio.Future[Any]] = [failed, done]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return await done
            raise self._error_in(await failed)
        except StoreConnectionError as error:
            raise self._host_lost() from error
        finally:
            await cancel_all(failed, done)

    def _host_lost(self) -> RendezvousError:
        return RendezvousError(
            f"rank 0 left or died before the world was complete: its store (at {self.where}) closed the connection; "
            "read rank 0's log first"
        )

    async def _offer_and_wait(self, number: int, payload: bytes, summary: Summary, limit: TimeLimit) -> bytes:
        climbing = asyncio.ensure_future(self._climb(number, payload, summary))
        result = self._client.get(self.keys("result", number), timeout=limit.deadline.remaining())
        awaited: set[asyncio.Future[Any]] = {climbing, result}
        # Rank 0 alone speaks for all that have joined.
        pause = FIRST_NOTICE if self.rank == 0 else None
        try:
            while not result.done():
                done, _ = await asyncio.wait(awaited, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if climbing in done and not result.done():
                    await climbing
                    awaited.discard(climbing)
                elif pause is not None and not done:
                    missing = await self._missing(number)
                    log.warning(
                        "still waiting for rank %s at %s: %d of %d have joined",
                        ranks(missing), self.where, self.world_size - len(missing), self.world_size,
                    )  # fmt: skip
                    pause *= 2
            return await result
        except StoreTimeoutError:
            return await self._give_up(number, limit)
        finally:
            await cancel_all(result, climbing)

    async def _climb(self, number: int, payload: bytes, summary: Summary) -> None:
        """Offer a payload, combine those of this rank's blocks, and pass the result on; rank 0 writes that of all."""
        offering = self._client.set(self.keys("payload", number, self.rank), payload)
        step, level, parts = 1, 0, "payload"
        while self.rank % (step * BLOCK) == 0 and (level == 0 or step < self.world_size):
            members = range(self.rank + step, min(self.rank + step * BLOCK, self.world_size), step)
            keys = [self.keys(parts, number, member) for member in members]
            others = await self._client.multi_get(keys, timeout=math.inf) if keys else []
            payload = await summary.merge([payload, *others], level)
            step, level, parts = step * BLOCK, level + 1, f"part{level + 1}"
        await offering
        if self.rank == 0:
            await self._client.compare_set(self.keys("result", number), b"", _RESULT + payload)
        elif level:
            await self._client.set(self.keys(parts, number, self.rank), payload)

    async def _missing(self, number: int) -> list[int]:
        """Return the ranks without a payload; without any, the ranks that have not combined the payloads of a block."""
        missing, step, level = await self._without("payload", number, 1), BLOCK, 1
        while not missing and step < self.world_size:
            missing = [rank for rank in await self._without(f"part{level}", number, step) if rank % (step * BLOCK)]
            step, level = step * BLOCK, level + 1
        return missing

    async def _without(self, parts: str, number: int, step: int) -> list[int]:
        prefix = self.keys(parts, number, "")
        present = {int(key.removeprefix(prefix)) for key in await self._client.list_keys(prefix)}
        return [rank for rank in range(0, self.world_size, step) if rank not in present]

    async def _give_up(self, number: int, limit: TimeLimit) -> bytes:
        """Write a timeout error in place of the result, so that every rank raises it.

        Returns the result: that of `combine`, if the last payload arrived just now.
        """
        key = self.keys("result", number)
        # One rank speaks for those that run out of time together, unless it ends.
        if await self._client.add(self.keys("late", number), 1) > 1:
            with contextlib.suppress(StoreTimeoutError):
                return await self._client.get(key, timeout=_LAST_READ_TIMEOUT)
        failure = _failure(missing=await self._missing(number), timeout=limit.timeout)
        await self._client.compare_set(key, b"", failure)
        return await self._client.get(key, timeout=_LAST_READ_TIMEOUT)

    async def refuse(self, reason: str) -> None:
        """Fail the exchange on all ranks, with a reason."""
        await self._client.compare_set(self.keys("result", self._exchanges), b"", _failure(reason=reason))

    def _error_in(self, value: bytes) -> RendezvousError:
        fields = json.loads(value[len(_ERROR) :])
        if "missing" not in fields:
            return RendezvousError(fields["reason"])
        missing = set(fields["missing"])
        joined = [rank for rank in range(self.world_size) if rank not in missing]
        return RendezvousTimeoutError(joined, fields["missing"], fields["timeout"], self.where)

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
        await asyncio.gather(*map(self._client.delete_key, await self._client.list_keys(self.keys(""))))

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
            await self._client.compare_set(self.keys("result", number), b"", failure)


class _Listed:
    """Combines payloads into the list of all."""

    async def merge(self, parts: Sequence[bytes], level: int) -> bytes:
        lists = [parts] if level == 0 else map(msgpack.unpackb, parts)
        return bytes(msgpack.packb([*itertools.chain.from_iterable(lists)]))


def _failure(**fields: Any) -> bytes:
    """Return the value that a rank writes in place of a result when an exchange fails."""
    return _ERROR + json.dumps(fields).encode()
