"""A job at a store: who waits to join it, who is a member, and the record of its present generation. Used by `session`.

next_id              the number of member ids given so far
waiting/<id>         a process that waits to join: the number of the last generation that it has seen; ephemeral
member/<id>          a member of the present generation, and the record of its status port; ephemeral
generation           the record of the present generation; changed by compare-and-set only
world/<generation>   the rendezvous of that generation
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from asyncdist.base.background_loop import cancel_all
from asyncdist.base.callables import Callback, Predicate, Supplier
from asyncdist.base.deadline import Deadline
from asyncdist.base.error_text import describe_error
from asyncdist.elastic.errors import JobTimeoutError
from asyncdist.elastic.presence import Presence
from asyncdist.errors import StoreConnectionError, StoreError
from asyncdist.store import AsyncPrefixStore, AsyncStoreBase
from asyncdist.store.protocol.operations import key_part

log = logging.getLogger("asyncdist")

T = TypeVar("T")

_WAITING, _MEMBER, _RECORD = "waiting/", "member/", "generation"
_LEAVES_WITHIN = 2.0
"""Seconds for which a process that leaves waits for the store."""
_REPETITIONS = 3
"""How often a request is repeated whose outcome is unknown, because the store was restarted or has ended the lease."""


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """A generation of a job, with the ids of its members in order of rank."""

    number: int = 0
    members: tuple[int, ...] = ()
    begun: int = 0
    """The number of the last generation whose members have met; 0 before the first."""

    def encode(self) -> bytes:
        return json.dumps([self.number, self.begun, *self.members]).encode()

    @classmethod
    def decode(cls, value: bytes) -> GenerationRecord:
        number, begun, *members = json.loads(value) if value else [0, 0]
        return cls(number, tuple(members), begun)


class Job:
    """This process's view of a job. The store keeps it current.

    ``arrived`` is called with the id of each further process that waits to join, and ``replaced`` when the record of the
    generation has changed. The caller closes the store.

    Attributes:
        id: The id of this process, which no other process of the job ever gets.
        waiting: The processes that wait to join, by id: the number of the last generation that each has seen.
        members: The ids of the living members of the present generation.
        record: The present generation.
        presence: The key of this process as a member.
    """

    def __init__(
        self, store: AsyncStoreBase, name: str, arrived: Callable[[int], object] = bool, replaced: Callback = bool
    ) -> None:
        self.name = name
        self.store = AsyncPrefixStore(f"elastic/{key_part(name)}", store)
        self._arrived, self._replaced = arrived, replaced
        self.id = -1
        self.waiting: dict[int, int] = {}
        self.members: set[int] = set()
        self.record = GenerationRecord()
        self._waits_since = 0.0
        self._change = asyncio.Event()
        self.presence = Presence(self.store, self._change.set)
        self._claimed: int | None = None
        """The number of the generation of which this process is a member."""
        self._error: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self.id = await _repeated(lambda: self.store.add("next_id", 1))
        ready = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(self._watch(ready))
        self._tasks = [watching, asyncio.create_task(self._keep())]
        await asyncio.wait([ready, watching], return_when=asyncio.FIRST_COMPLETED)
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        if self._tasks:
            await cancel_all(*self._tasks)
            # A store that does not answer deletes the keys when the connection is closed.
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_LEAVES_WITHIN):
                    await self.leave()

    async def _watch(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self.store.watch_keys() as changes:
                ready.set_result(None)
                async for key, value in changes:
                    before = self.candidates()
                    self._apply(key, value)
                    self._change.set()
                    for process in set(self.candidates()).difference(before):
                        self._arrived(process)
                    if key == _RECORD:
                        self._replaced()
        except Exception as error:
            self._fail(error)

    async def _keep(self) -> None:
        try:
            await self.presence.keep()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Note that the store is lost for good."""
        if self._error is None:
            self._error = error
            log.error(
                "process %d of job %r has lost the store for good, and commits no further step: %s", self.id, self.name,
                describe_error(error),
            )  # fmt: skip
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

    async def until(self, condition: Predicate, deadline: Deadline | None = None) -> None:
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

    async def wait_to_join(self, seen: int) -> None:
        """Announce that this process waits to be named in a generation after ``seen``, and is no member."""
        self._withdraw()
        await self.store.set(f"{_WAITING}{self.id}", str(seen), ephemeral=True)
        await _repeated(lambda: self.store.delete_key(f"{_MEMBER}{self.id}"))

    async def become_member(self, record: bytes = b"") -> None:
        """Announce that this process is a member of the present generation, with the record of its status port."""
        await self.presence.announce(f"{_MEMBER}{self.id}", record)
        await _repeated(lambda: self.store.delete_key(f"{_WAITING}{self.id}"))

    def candidates(self) -> list[int]:
        """Return the processes that wait to join, in order of their ids.

        A process that waits announces itself again after each new generation. One that has not is passed over: it was
        named and did not come, is stopped, or its host has vanished.
        """
        return sorted(
            each
            for each, seen in self.waiting.items()
            # One that has just become a member withdraws after that.
            if each not in self.members and seen >= self.record.number
        )

    async def leave(self) -> None:
        self._withdraw()
        for key in (f"{_MEMBER}{self.id}", f"{_WAITING}{self.id}"):
            await _repeated(functools.partial(self.store.delete_key, key))

    def _withdraw(self) -> None:
        self._claimed = None
        self.presence.withdraw()

    # -- generations ---------------------------------------------------------------------------

    async def begin_generation(
        self, after: GenerationRecord, number: int, members: tuple[int, ...], begun: int
    ) -> bool:
        """Replace the record ``after`` by the next one; return False if another process has replaced it.

        ``begun`` is the number of the next generation itself if its members need no new world.
        """
        if not await self._replace(after, GenerationRecord(number, members, begun)):
            return False
        if after.number:
            for key in await self.store.list_keys(f"world/{after.number}/"):
                await _repeated(functools.partial(self.store.delete_key, key))
        return True

    async def confirm_generation(self, record: GenerationRecord) -> bool:
        """Note in the record that the members have met; return False if another process has replaced it."""
        return await self._replace(record, dataclasses.replace(record, begun=record.number))

    async def _replace(self, record: GenerationRecord, desired: GenerationRecord) -> bool:
        expected, value = record.encode() if record.number else b"", desired.encode()
        # Records do not repeat, so a repeated request finds what the first one has done.
        if await _repeated(lambda: self.store.compare_set(_RECORD, expected, value)) != value:
            return False
        await self.until(lambda: self.has_replaced(record))
        return True

    def begin_wait(self) -> None:
        """Count the time that `overdue` tells from now on."""
        self._waits_since = monotonic()

    async def until_present(self, condition: Predicate, deadline: Deadline, size: int) -> None:
        """Wait for ``size`` processes, until a condition holds. Raises JobTimeoutError at the deadline."""
        try:
            await self.until(condition, deadline)
        except TimeoutError:
            raise self.overdue(size) from None

    def overdue(self, size: int) -> JobTimeoutError:
        """Return the error of a wait for ``size`` processes."""
        present, spent = len(self.members) + len(self.candidates()), monotonic() - self._waits_since
        return JobTimeoutError(self.name, present, len(self.members), size, self.record.number, spent)

    def has_replaced(self, record: GenerationRecord) -> bool:
        return self.record != record

    async def has_members(self) -> bool:
        """Ask the store whether a member of any generation is alive."""
        return bool(await self.store.list_keys(_MEMBER))

    def claim(self, number: int) -> None:
        """Note that a generation was recorded or confirmed after this process has last announced that it is a member."""
        self._claimed = number
        self.presence.claim()

    @property
    def is_superseded(self) -> bool:
        """Whether the job went on without this process, which was a member."""
        record, own = self.record, self._claimed
        return own is not None and record.number > own and self.id not in record.members

    @property
    def is_shown(self) -> bool:
        """Whether this process is sure, now, that no other process has begun a generation. Any thread may ask."""
        return self._error is None and self.presence.is_shown and not self.is_superseded

    async def show(self) -> bool:
        """Return whether this process is sure, at a moment after the call, that no other process has begun a generation.

        It asks the store if its lease may have ended, and waits at most as long as the lease.
        """
        with contextlib.suppress(TimeoutError, StoreConnectionError):
            await self.until(
                lambda: self.is_shown or self.is_superseded or not self.presence.is_claimed,
                Deadline.after(self.presence.lease),
            )
        return self.is_shown

    def meeting_point(self, record: GenerationRecord) -> AsyncPrefixStore:
        return AsyncPrefixStore(f"world/{record.number}", self.store)

    def is_present(self, process: int) -> bool:
        return process in self.members or process in self.waiting


async def _repeated(request: Supplier[Awaitable[T]]) -> T:
    """Make a request that may be applied twice, and repeat it if it is unknown whether the store has applied it."""
    for _ in range(_REPETITIONS):
        with contextlib.suppress(StoreConnectionError):
            return await request()
    return await request()
