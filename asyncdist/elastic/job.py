"""A job at a store: who waits to join it, who is a member, and the record of its present generation. Used by `session`.

next_id              the number of member ids given so far
waiting/<id>         a process that waits to join; ephemeral
member/<id>          a member of the present generation, and the record of its status port; ephemeral
generation           the record of the present generation; changed by compare-and-set only
world/<generation>   the rendezvous of that generation
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncdist.base.deadline import Deadline
from asyncdist.errors import StoreConnectionError
from asyncdist.store.base import AsyncStoreBase
from asyncdist.store.prefix import AsyncPrefixStore

_WAITING, _MEMBER, _RECORD = "waiting/", "member/", "generation"


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """A generation of a job.

    Attributes:
        number: The number of the generation; 0 before the first.
        members: The ids of the members, in order of rank.
    """

    number: int = 0
    members: tuple[int, ...] = ()

    def encode(self) -> bytes:
        return json.dumps([self.number, *self.members]).encode()

    @classmethod
    def decode(cls, value: bytes) -> GenerationRecord:
        number, *members = json.loads(value) if value else [0]
        return cls(number, tuple(members))


class Job:
    """This process's view of a job. The store keeps it current.

    Args:
        store: The store that all processes of the job share. The caller closes it.
        name: The name of the job there.
        arrived: Called with the id of each further process that waits to join.

    Attributes:
        id: The id of this process, which no other process of the job ever gets.
        waiting: The processes that wait to join, by id: the number of times that each has announced it.
        members: The ids of the living members of the present generation.
        record: The present generation.
    """

    def __init__(self, store: AsyncStoreBase, name: str, arrived: Callable[[int], object] = bool) -> None:
        self.store = AsyncPrefixStore(f"elastic/{name}", store)
        self._arrived = arrived
        self.id = -1
        self.waiting: dict[int, int] = {}
        self.members: set[int] = set()
        self.record = GenerationRecord()
        self._refused: dict[int, int] = {}
        self._announced = 0
        self._change = asyncio.Event()
        self._error: Exception | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Get an id, and begin to watch the job."""
        self.id = await self.store.add("next_id", 1)
        ready = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch(ready))
        await asyncio.wait([ready, self._watching], return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Stop watching, and stop waiting and being a member."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
            with contextlib.suppress(StoreConnectionError):
                await self.leave()

    async def _watch(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.store.watch_keys() as changes:
                ready.set_result(None)
                async for key, value in changes:
                    before = self.candidates()
                    self._apply(key, value)
                    self._change.set()
                    for process in self.candidates().keys() - before.keys():
                        self._arrived(process)
        except Exception as error:
            self._error = error
            self._change.set()

    def _apply(self, key: str, value: bytes | None) -> None:
        if key == _RECORD:
            self.record = GenerationRecord.decode(value or b"")
        elif key.startswith(_WAITING):
            process = int(key.removeprefix(_WAITING))
            self.waiting.pop(process, None)
            if value is not None:
                self.waiting[process] = int(value)
        elif key.startswith(_MEMBER):
            process = int(key.removeprefix(_MEMBER))
            self.members = self.members | {process} if value is not None else self.members - {process}

    async def until(self, condition: Callable[[], bool], deadline: Deadline | None = None) -> None:
        """Wait until a condition on the attributes holds.

        Raises:
            TimeoutError: The deadline passed.
            StoreConnectionError: The connection to the store ended for good.
        """
        async with asyncio.timeout(deadline.remaining_or_none() if deadline is not None else None):
            while not condition():
                if self._error is not None:
                    raise self._error
                self._change.clear()
                await self._change.wait()

    # -- this process --------------------------------------------------------------------------

    async def wait_to_join(self) -> None:
        """Announce that this process waits to join, and is no member."""
        self._announced += 1
        await self.store.set(f"{_WAITING}{self.id}", str(self._announced), ephemeral=True)
        await self.store.delete_key(f"{_MEMBER}{self.id}")

    async def become_member(self, record: bytes = b"") -> None:
        """Announce that this process is a member of the present generation, with the record of its status port."""
        await self.store.set(f"{_MEMBER}{self.id}", record, ephemeral=True)
        await self.store.delete_key(f"{_WAITING}{self.id}")

    def candidates(self) -> dict[int, int]:
        """Return the processes that wait to join, like `waiting`, but not those that were refused and did nothing since."""
        return {
            each: count
            for each, count in sorted(self.waiting.items())
            # One that has just become a member withdraws after that.
            if each not in self.members and self._refused.get(each) != count
        }

    def refuse(self, candidates: Mapping[int, int]) -> None:
        """Pass over candidates that did not come to their generation, until they announce again that they wait."""
        self._refused.update(candidates)

    async def leave(self) -> None:
        """Withdraw what this process has announced."""
        await self.store.delete_key(f"{_MEMBER}{self.id}")
        await self.store.delete_key(f"{_WAITING}{self.id}")

    # -- generations ---------------------------------------------------------------------------

    async def begin_generation(self, after: GenerationRecord, number: int, members: tuple[int, ...]) -> bool:
        """Replace the record ``after`` by a next one; return False if another process has replaced it."""
        expected = after.encode() if after.number else b""
        desired = GenerationRecord(number, members).encode()
        if await self.store.compare_set(_RECORD, expected, desired) != desired:
            return False
        if after.number:
            for key in await self.store.list_keys(f"world/{after.number}/"):
                await self.store.delete_key(key)
        await self.until(lambda: self.record.number > after.number)
        return True

    def meeting_point(self, record: GenerationRecord) -> AsyncPrefixStore:
        """Return the store in which the members of a generation meet."""
        return AsyncPrefixStore(f"world/{record.number}", self.store)

    def is_present(self, process: int) -> bool:
        """Return whether a process is a member or waits to join."""
        return process in self.members or process in self.waiting
