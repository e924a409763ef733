"""What each rank of a world has published for all others, in compressed *pages* of `BLOCK` consecutive ranks.

`groups.introductions` makes the pages, which the world's store keeps. A rank of a small world holds all of them. In a large
one it holds those of its `neighbours`, and reads another one when it first needs it.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from asyncdist.base.background_loop import on_loop
from asyncdist.base.error_text import describe_error
from asyncdist.errors import StoreError
from asyncdist.rendezvous import session
from asyncdist.rendezvous.session import RendezvousSession

PAGES = "pages of all ranks"
"""The name of the note with all pages of a small world. No machine is named so."""
ADDRESSES, STATUS_PORTS, HOSTS = range(3)
"""The values that each rank publishes for all: its addresses by transport, its status port, and a digest of its host."""
_PATIENCE = 2.0
"""Seconds after which a store that has not answered is no longer waited for."""
_MOST_NEAR = 8
"""The number of pages nearest to a rank whose ranks are asked for it."""

Found = Callable[[str], None]
"""Is called with an empty text when a page is there, else with the reason why it cannot be read."""


def page_name(block: int) -> str:
    """Return the name of the note with the page of a block of a large world."""
    return f"page {block}"


def neighbours(rank: int, size: int) -> list[int]:
    """Return the blocks whose pages a rank of a large world holds: about two for each doubling of the world.

    They are those of the ranks at distances 1, 2, 4, … in both directions, which trees, recursive doubling and notices of
    failures use, also after the store has ended, and that of rank 0.
    """
    distances = [sign << power for power in range((size - 1).bit_length()) for sign in (1, -1)]
    return sorted({(rank + distance) % size // session.BLOCK for distance in (0, -rank, *distances)})


class Pages:
    """The pages that a rank holds, and those that it reads: an `AddressBook`. Any thread may ask.

    Args:
        meeting: The session of the world, on the loop that makes this object.
        held: The pages that the rank holds, by block.
    """

    def __init__(self, meeting: RendezvousSession, held: dict[int, bytes]) -> None:
        self._meeting, self._held, self._loop = meeting, held, asyncio.get_running_loop()
        self._awaited: dict[int, list[Found]] = {}
        self._reading: set[asyncio.Future[None]] = set()
        # Most readers go through the ranks in order, so the page that was read last is kept.
        self._entries_of = functools.lru_cache(maxsize=1)(lambda block: unpacked(self._held[block]))

    def column(self, number: int) -> Column:
        """Return one of the values that each rank has published: `ADDRESSES`, `STATUS_PORTS` or `HOSTS`."""
        return Column(self._meeting.world_size, functools.partial(self._value, number))

    def _value(self, number: int, rank: int) -> Any:
        block = rank // session.BLOCK
        if not self.holds(rank):
            return None
        return msgpack.unpackb(self._entries_of(block)[rank % session.BLOCK])[number]

    # -- what a search for an address uses ------------------------------------------------------

    def holds(self, rank: int) -> bool:
        return rank // session.BLOCK in self._held

    def page_near(self, rank: int) -> bytes:
        """Return the page that is nearest to a rank."""
        (block,) = self._blocks_near(rank, 1)
        return bytes(msgpack.packb([block, self._held[block]]))

    def add(self, page: bytes) -> None:
        """Hold a page that another rank has returned. Raises ValueError for other bytes."""
        block, data = msgpack.unpackb(page)
        try:
            if len(unpacked(data)) != len(self._ranks_of(block)):
                raise ValueError(f"not a page of block {block}")
        except zlib.error as error:
            raise ValueError("not a page") from error
        self._held.setdefault(block, data)

    def ranks_near(self, rank: int) -> list[int]:
        """Return ranks whose pages are held, of those nearest to a rank first; of each page one, then a second one."""
        own, found = self._meeting.rank, list[int]()
        for further in (0, session.BLOCK // 2):
            for block in self._blocks_near(rank, _MOST_NEAR):
                ranks = self._ranks_of(block)
                found.append(ranks[(own + further) % len(ranks)])
        return found

    def _ranks_of(self, block: int) -> range:
        return range(self._meeting.world_size)[block * session.BLOCK :][: session.BLOCK]

    def _blocks_near(self, rank: int, most: int) -> list[int]:
        wanted, count = rank // session.BLOCK, -(-self._meeting.world_size // session.BLOCK)
        return heapq.nsmallest(
            most, list(self._held), lambda block: min((block - wanted) % count, (wanted - block) % count)
        )

    # -- the store ------------------------------------------------------------------------------

    def request(self, rank: int, found: Found) -> None:
        """Read the page of a rank from the store, and call ``found`` afterwards, on any thread."""
        try:
            self._loop.call_soon_threadsafe(self._read_for, rank // session.BLOCK, found)
        except RuntimeError as error:  # the loop is closed
            found(self._unread(error))

    async def load(self, ranks: range) -> None:
        """Read the pages of consecutive ranks that are not held, on any loop. Raises StoreError."""
        blocks = range(ranks.start // session.BLOCK, -(-ranks.stop // session.BLOCK))
        if missing := [block for block in blocks if block not in self._held]:
            try:
                async with asyncio.timeout(_PATIENCE):
                    await on_loop(self._loop, self._read(missing, _PATIENCE))
            except (RuntimeError, TimeoutError) as error:  # the loop is closed, or its thread computes
                raise StoreError("the addresses of other ranks cannot be read") from error

    async def _read(self, blocks: Sequence[int], timeout: float) -> None:
        notes = await self._meeting.notes(list(map(page_name, blocks)), timeout)
        self._held.update(msgpack.unpackb(page) for pages in notes.values() for page in pages)

    def _read_for(self, block: int, found: Found) -> None:
        """Read a page, once for all who ask until it is there."""
        if block in self._held:
            found("")
            return
        self._awaited.setdefault(block, []).append(found)
        if len(self._awaited[block]) == 1:
            reading = asyncio.ensure_future(self._read([block], _PATIENCE))
            self._reading.add(reading)
            reading.add_done_callback(functools.partial(self._end_reading, block))

    def _end_reading(self, block: int, reading: asyncio.Future[None]) -> None:
        self._reading.discard(reading)
        error = asyncio.CancelledError("the event loop has ended") if reading.cancelled() else reading.exception()
        reason = "" if error is None else self._unread(error)
        for found in self._awaited.pop(block):
            found(reason)

    def _unread(self, error: BaseException) -> str:
        return f"its address could not be read from rank 0's store, at {self._meeting.where}: {describe_error(error)}"


class Column(Sequence[Any]):
    """One of the values that each rank has published, by rank; None for a rank whose page is not held."""

    def __init__(self, size: int, value: Callable[[int], Any]) -> None:
        self._size, self._value = size, value

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self._size:
            raise IndexError(rank)
        return self._value(rank)


def packed(data: Any) -> bytes:
    """Return compressed data for `unpacked`."""
    return zlib.compress(msgpack.packb(data), 1)


def unpacked(data: bytes) -> Any:
    return msgpack.unpackb(zlib.decompress(data))
