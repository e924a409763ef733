"""A rendezvous session: this rank's place in a world, the store that the ranks share, and the orderly exit.

`join` creates it; `groups.world` uses it to exchange addresses, and closes it.

Keys of one world in rank 0's store, all under ``world/<id>/``:

    size               the number of ranks, as rank 0 knows it; present until rank 0 leaves
    joined/<rank>      the process that claims the rank; the first claim wins
    left/<rank>        the rank does not use the store any more
    part0/<n>/<rank>   the rank's payload of the n-th exchange
    part<k>/<n>/<rank> the payloads that the first rank of BLOCK**k ranks has combined
    note/<name>        what only some ranks read of the payloads; see `Summary.notes`
    failed/<n>         the reason why the exchange failed; the first one counts
    late/<n>           how many ranks have run out of time in it
    kv/                the keys of `RendezvousSession.store`

All ranks read the parts of the highest level, of which there are at most BLOCK. In a world of one block these are the
payloads. An exchange fails for all ranks if one of these parts is `_FAILED`: the first value of a part counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

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
from asyncdist.store.protocol.operations import Command, Op

if TYPE_CHECKING:
    from asyncdist.store.server.server import StoreServer

log = logging.getLogger("asyncdist")

T = TypeVar("T")
CLOSE_TIMEOUT = 5.0
FIRST_NOTICE = 10.0
"""Seconds after which a rank logs for whom it waits. Each further notice comes after twice the time of the one before."""
_FAILED = msgpack.packb(None)
"""In place of a part: the exchange has failed."""
BLOCK = 32
"""The number of ranks whose payloads the first of them combines, and of blocks whose parts the first of them combines."""
_LAST_READ_TIMEOUT = 5.0
_UNWATCHED = 0.1
"""Seconds for which what a rank does between two exchanges does not end if the next one fails."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time limit of one rendezvous: the user's timeout in seconds, and its deadline."""

    timeout: float
    deadline: Deadline


class Summary(ABC):
    """Combines what the ranks pass to `RendezvousSession.combine`: plain data for msgpack."""

    @abstractmethod
    def merge(self, parts: Sequence[Any]) -> Any:
        """Combine payloads of consecutive ranks, or what this has returned for them, to data of the same form."""

    def notes(self, first: int, payloads: Sequence[Any]) -> Mapping[str, bytes]:
        """Return what only some ranks read of the payloads of a block, the first of which is that of a rank, by name.

        The exchanges of a session have different names.
        """
        return {}


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
        self._level = next(level for level in itertools.count() if self.world_size <= BLOCK ** (level + 1))
        """The level of the parts that all ranks read."""
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
        return list((await self.combine([payload], Listed(), timeout=timeout, more=more))[0])

    async def combine(
        self,
        payload: Any,
        summary: Summary,
        *,
        notes: Sequence[str] = (),
        timeout: float | None = None,
        more: bool = False,
    ) -> tuple[Any, dict[str, list[bytes]]]:
        """Combine one payload of each rank along a tree. Every rank calls it equally often.

        Close the session after a failed call.

        Args:
            payload: The payload of this rank.
            summary: Combines payloads; equal on all ranks.
            notes: The names of the notes that this rank reads.
            timeout: Seconds to wait; by default until the deadline of the rendezvous.
            more: Whether another exchange follows at once, without which the world is not complete.

        Returns:
            What is combined of all payloads, and the notes by name, one of each block that has such a note.

        Raises:
            RendezvousTimeoutError: The first of the waiting ranks ran out of time; raised on all of them.
            RendezvousError: A rank gave up, or the connection to rank 0's store was lost.
        """
        limit = self._limit if timeout is None else TimeLimit(timeout, Deadline.after(timeout))
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._pending_exchanges = [number, number + 1] if more else [number]
        top, keys = self._top(number), [self.keys("note", name) for name in notes] if self._level else []
        offer: Command[list[bytes]] = Command(
            Op.OFFER, (self.keys("part0", number, self.rank), msgpack.packb(payload), top, keys)
        )
        try:
            values = await self._offer_and_wait(number, offer, payload, summary, limit)
            self._pending_exchanges = [number + 1] if more else []
            if _FAILED in values[: len(top)]:
                raise self._error_in(await self._client.get(self.keys("failed", number)))
        except StoreConnectionError as error:
            raise self._host_lost() from error
        parts = list(map(msgpack.unpackb, values[: len(top)]))
        if self._level:
            return summary.merge(parts), dict(zip(notes, map(_in_stream, values[len(top) :]), strict=True))
        made = summary.notes(0, parts) if notes else {}
        return summary.merge(parts), {name: [made[name]] for name in notes}

    async def notes(self, names: Sequence[str], timeout: float | None = None) -> dict[str, list[bytes]]:
        """Return notes of an exchange that is complete, by name, in a world of several blocks. Raises StoreError."""
        streams = await self._client.multi_get([self.keys("note", name) for name in names], timeout)
        return dict(zip(names, map(_in_stream, streams), strict=True))

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

        It has also failed if rank 0's store has ended.
        """
        done = asyncio.ensure_future(coroutine)
        watched: list[asyncio.Future[Any]] = [done]
        try:
            # A world of many ranks saves many requests if what takes a moment is not watched.
            await asyncio.wait(watched, timeout=_UNWATCHED)
            if not done.done():
                watched.append(self._client.get(self.keys("failed", self._exchanges), timeout=math.inf))
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return await done
            raise self._error_in(await watched[-1])
        except StoreConnectionError as error:
            raise self._host_lost() from error
        finally:
            await cancel_all(*watched)

    def _host_lost(self) -> RendezvousError:
        return RendezvousError(
            f"rank 0 left or died before the world was complete: its store (at {self.where}) closed the connection; "
            "read rank 0's log first"
        )

    def _top(self, number: int) -> list[str]:
        """Return the keys of the parts that all ranks read."""
        return [
            self.keys(f"part{self._level}", number, first) for first in range(0, self.world_size, BLOCK**self._level)
        ]

    async def _offer_and_wait(
        self, number: int, offer: Command[list[bytes]], payload: Any, summary: Summary, limit: TimeLimit
    ) -> list[bytes]:
        """Offer a payload; return the parts that all ranks read, once they are there, and the notes."""
        result = self._client.request(offer, limit.deadline.remaining())
        climbing = asyncio.ensure_future(self._climb(number, payload, summary))
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
            return await self._give_up(number, offer, limit)
        finally:
            await cancel_all(result, climbing)

    async def _climb(self, number: int, payload: Any, summary: Summary) -> None:
        """Combine the payloads of this rank's blocks, and offer the part that comes of it."""
        level, part, step = 0, payload, 1
        while level < self._level and self.rank % (step * BLOCK) == 0:
            members = range(self.rank + step, min(self.rank + step * BLOCK, self.world_size), step)
            keys = [self.keys(f"part{level}", number, member) for member in members]
            parts = [part, *map(msgpack.unpackb, await self._client.multi_get(keys, timeout=math.inf) if keys else ())]
            if level == 0:
                notes = summary.notes(self.rank, parts).items()
                noting = (self._client.append(self.keys("note", name), msgpack.packb(note)) for name, note in notes)
                # Who reads a part of the highest level then finds the notes.
                await asyncio.gather(*noting)
            level, part, step = level + 1, summary.merge(parts), step * BLOCK
        if level:
            # The exchange may have failed before.
            await self._client.compare_set(self.keys(f"part{level}", number, self.rank), b"", msgpack.packb(part))

    async def _missing(self, number: int) -> list[int]:
        """Return the ranks without a payload; without any, the ranks that have not combined the payloads of a block."""
        missing, step = [], 1
        for level in range(self._level + 1):
            present = await self._present(level, number)
            # A rank that combines several blocks offers the part of the highest level alone.
            alone = level in (0, self._level)
            every = range(0, self.world_size, step)
            missing = [rank for rank in every if rank not in present and (alone or rank % (step * BLOCK))]
            if missing:
                break
            step *= BLOCK
        return missing

    async def _present(self, level: int, number: int) -> set[int]:
        prefix = self.keys(f"part{level}", number, "")
        return {int(key.removeprefix(prefix)) for key in await self._client.list_keys(prefix)}

    async def _give_up(self, number: int, offer: Command[list[bytes]], limit: TimeLimit) -> list[bytes]:
        """Let the exchange fail with a timeout error, which every rank raises.

        Returns the parts that all ranks read: those of an exchange that has not failed if the last one arrived just now.
        """
        # One rank speaks for those that run out of time together, unless it ends.
        if await self._client.add(self.keys("late", number), 1) > 1:
            with contextlib.suppress(StoreTimeoutError):
                return await self._client.request(offer, _LAST_READ_TIMEOUT)
        await self._fail(number, missing=await self._missing(number), timeout=limit.timeout)
        return await self._client.request(offer, _LAST_READ_TIMEOUT)

    async def refuse(self, reason: str) -> None:
        """Fail the exchange on all ranks, with a reason."""
        await self._fail(self._exchanges, reason=reason)

    async def _fail(self, number: int, **failure: Any) -> None:
        """Fail an exchange on the ranks that wait now or later, unless it is complete."""
        writing = [self._client.compare_set(self.keys("failed", number), b"", json.dumps(failure).encode())]
        writing += [self._client.compare_set(key, b"", _FAILED) for key in self._top(number)]
        await asyncio.gather(*writing)

    def _error_in(self, value: bytes) -> RendezvousError:
        fields = json.loads(value)
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
        await asyncio.gather(self._client.delete_key(self.keys("size")), self._client.set(self.keys("left", 0), b"1"))
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
        """Fail the exchanges that wait for this rank's payload."""
        for number in self._pending_exchanges:
            await self._fail(
                number, reason=f"rank {self.rank} gave up before the world was complete; read its log first"
            )


class Listed(Summary):
    """Combines lists into one."""

    def merge(self, parts: Sequence[Any]) -> list[Any]:
        return list(itertools.chain.from_iterable(parts))


def _in_stream(data: bytes) -> list[bytes]:
    stream = msgpack.Unpacker()
    stream.feed(data)
    return list(stream)
