"""A world that is coming together, or has: who we are in it, the store that its ranks share, and the way out.

Keys of one world in rank 0's store, all under ``world/<id>/``:

    size               the number of ranks, as rank 0 knows it; its presence proves that a record is not stale
    joined/<rank>      which process claims the rank; the first one keeps it
    left/<rank>        the rank is done with the store
    payload/<n>/<rank> the rank's part of the n-th exchange, or why there will be none
    kv/                what users of `RendezvousSession.store` keep
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncdist.base.deadline import Deadline
from asyncdist.errors import (
    RendezvousError,
    RendezvousTimeoutError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
)
from asyncdist.rendezvous.record_store import AddressRecord, RecordStore
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.prefix import AsyncPrefixStore
from asyncdist.store.server.server import StoreServer

T = TypeVar("T")
FAREWELL = 5.0
_PAYLOAD, _VERDICT = b"\x01", b"\x00"
_LAST_LOOK = 5.0
_HEAD_COUNT_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of one world's keys."""

    world_id: str

    def __call__(self, *parts: object) -> str:
        return "/".join(("world", self.world_id, *map(str, parts)))

    def each(self, what: str, ranks: Sequence[int]) -> list[str]:
        return [self(what, rank) for rank in ranks]


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The time that a whole rendezvous has: the seconds that the user gave, and the deadline made of them once."""

    timeout: float
    deadline: Deadline


class RendezvousSession:
    """This rank's place in a world. It belongs to the loop that made it; close it when the world is destroyed.

    Attributes: ``rank``, ``world_size``; ``world_id``, the same on every rank and never used twice; ``token`` (None in
    a world without one); ``listen_host``, the address to listen on and to tell the peers; ``server``, on rank 0;
    ``where`` in words, a ``tcp://`` URL if ranks meet at rank 0's store, else the name of the meeting place; ``store``,
    for the use of the world's own members.
    """

    def __init__(
        self,
        record: AddressRecord,
        rank: int,
        client: AsyncStore,
        *,
        token: str | None,
        listen_host: str,
        where: str,
        limit: TimeLimit,
    ) -> None:
        self.rank = rank
        self.world_size = record.world_size
        self.world_id = record.world_id
        self.token = token
        self.listen_host = listen_host
        self.where = where
        self.server: StoreServer | None = None
        self.keys = Keys(record.world_id)
        self.store = AsyncPrefixStore(self.keys("kv"), client)
        self._record = record
        self._client = client
        self._limit = limit
        self._resources = AsyncExitStack()
        self._place: RecordStore | None = None
        self._exchanges = 0
        self._promised = [0]  # the exchanges in which others may wait for us
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Meeting rank {self.rank} of {self.world_size} at {self.where}, world {self.world_id}>"

    def own(self, resources: AsyncExitStack, place: RecordStore | None = None) -> None:
        """Take over what `close` shall close, and the place from which rank 0 shall take its record back."""
        self._resources = resources.pop_all()
        self._place = place

    def remaining(self) -> float:
        """Return the seconds that are left of the rendezvous's own time."""
        return self._limit.deadline.remaining()

    async def exchange(self, payload: bytes, *, timeout: float | None = None, more: bool = False) -> list[bytes]:
        """Give this rank's payload and return every rank's, in order of rank. Every rank calls it equally often.

        ``more`` says that another exchange follows at once, without which the world is not complete.

        One flight: the payload goes out together with the wait for all of them. The time allowed is what is left of
        the rendezvous's own, or ``timeout`` seconds.

        Raises RendezvousTimeoutError, on every rank that waits, as soon as the first of them runs out of time; and
        RendezvousError when a rank gave up or rank 0's store is gone. Then close the meeting.
        """
        limit = self._limit if timeout is None else TimeLimit(timeout, Deadline.after(timeout))
        number, self._exchanges = self._exchanges, self._exchanges + 1
        self._promised = [number, number + 1] if more else [number]
        keys = [self.keys("payload", number, rank) for rank in range(self.world_size)]
        try:
            values = await self._offer_and_wait(keys, _PAYLOAD + payload, limit)
        except StoreConnectionError as error:
            raise self._deserted() from error
        self._promised = [number + 1] if more else []
        for value in values:
            if not value.startswith(_PAYLOAD):
                raise _verdict(value, self.where)
        return [value[len(_PAYLOAD) :] for value in values]

    async def before_exchange(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do something before the next exchange; RendezvousError as soon as there will be none.

        Then a verdict stands where our payload would, or rank 0's store is gone.
        """
        told = self._client.get(self.keys("payload", self._exchanges, self.rank), timeout=math.inf)
        done = asyncio.ensure_future(doing)
        either: list[asyncio.Future[Any]] = [told, done]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return await done
            raise _verdict(await told, self.where)
        except StoreConnectionError as error:
            raise self._deserted() from error
        finally:
            told.cancel()
            done.cancel()
            await asyncio.gather(told, done, return_exceptions=True)

    def _deserted(self) -> RendezvousError:
        return RendezvousError(
            f"rank 0 left or died before the world was complete: its store (met at {self.where}) hung up; "
            "look at rank 0's own log first"
        )

    async def _offer_and_wait(self, keys: list[str], offer: bytes, limit: TimeLimit) -> list[bytes]:
        # Compare and set, not set: a rank that comes after the others gave up finds their verdict in its place.
        offering = asyncio.ensure_future(self._client.compare_set(keys[self.rank], b"", offer))
        try:
            return await self._client.multi_get(keys, timeout=limit.deadline.remaining())
        except StoreTimeoutError:
            return await self._give_up(keys, limit)
        finally:
            offering.cancel()
            await asyncio.gather(offering, return_exceptions=True)

    async def _give_up(self, keys: list[str], limit: TimeLimit) -> list[bytes]:
        """Put the verdict where payloads are missing, so that every waiting rank hears it now; raise it here.

        Returns the payloads if the last of them came in just now.
        """
        present = set(await self._client.list_keys(keys[0].removesuffix("0")))
        joined = [rank for rank, key in enumerate(keys) if key in present]
        missing = [rank for rank, key in enumerate(keys) if key not in present]
        verdict = _VERDICT + json.dumps({"joined": joined, "missing": missing, "timeout": limit.timeout}).encode()
        await asyncio.gather(*(self._client.compare_set(keys[rank], b"", verdict) for rank in missing))
        return await self._client.multi_get(keys, timeout=_LAST_LOOK)

    async def refuse(self, reason: str, rank: int) -> None:
        """Tell the ranks that wait for ``rank`` that there will be no world, and why."""
        verdict = _VERDICT + json.dumps({"reason": reason}).encode()
        await self._client.compare_set(self.keys("payload", self._exchanges, rank), b"", verdict)

    async def close(self, timeout: float = FAREWELL) -> None:
        """Say goodbye and let go of everything; rank 0 first waits until the others are done, ``timeout`` at most.

        Where the loop that made it was closed before, as `asyncio.run` does at its end, there is nobody to say goodbye.
        """
        if self._closed:
            return
        self._closed = True
        if self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # from what can be closed on its own loop only, and ended with that
                await self._resources.aclose()
            return
        try:
            async with asyncio.timeout(timeout):
                await (self._lead_out() if self.rank == 0 else self._leave())
        except (TimeoutError, StoreError, RendezvousError):
            pass  # whoever would have heard it is gone
        finally:
            await self._resources.aclose()

    async def _leave(self) -> None:
        if not self._exchanges:  # nobody has seen us yet: a second attempt as this rank is welcome
            await self._client.delete_key(self.keys("joined", self.rank))
            return
        await self._break_promise()
        await self._client.set(self.keys("left", self.rank), b"1")

    async def _lead_out(self) -> None:
        if self._place is not None:
            await self._place.withdraw(self._record.encode())
        await self._client.set(self.keys("left", 0), b"1")
        await self._break_promise()
        prefix = self.keys("joined", "")
        joined = [int(key.removeprefix(prefix)) for key in await self._client.list_keys(prefix)]
        await self._until_deserted([rank for rank in joined if rank != 0])
        for key in await self._client.list_keys(self.keys("")):  # the server may go on for other worlds
            await self._client.delete_key(key)

    async def _until_deserted(self, ranks: list[int]) -> None:
        """Wait until all of them said goodbye, or nobody is connected any more: the dead do not say goodbye."""
        goodbyes = self._client.wait(self.keys.each("left", ranks), timeout=math.inf)
        try:
            while self.server is not None and self.server.num_connections > 1 and not goodbyes.done():
                await asyncio.wait([goodbyes], timeout=_HEAD_COUNT_PAUSE)
        finally:
            goodbyes.cancel()
            await asyncio.gather(goodbyes, return_exceptions=True)

    async def _break_promise(self) -> None:
        """If we leave an exchange before it is complete, let those who wait, or come later, hear that instead."""
        if not self._promised:
            return
        reason = f"rank {self.rank} gave up before the world was complete; look at its own log first"
        verdict = _VERDICT + json.dumps({"reason": reason}).encode()
        for number in self._promised:
            keys = [self.keys("payload", number, rank) for rank in range(self.world_size)]
            await self._client.set(keys[self.rank], verdict)
            await asyncio.gather(*(self._client.compare_set(key, b"", verdict) for key in keys))


def _verdict(value: bytes, where: str) -> RendezvousError:
    said = json.loads(value[len(_VERDICT) :])
    if "missing" in said:
        return RendezvousTimeoutError(said["joined"], said["missing"], said["timeout"], where)
    return RendezvousError(said["reason"])
