"""A search for the processes of a job that have published a name: it follows their records, and connects to them.

The sessions of `rpc` derive from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from typing import Any, Generic, Self, TypeVar

from asyncdist.base.background_loop import cancel_all
from asyncdist.base.backoff import Backoff
from asyncdist.errors import PeerLostError
from asyncdist.rendezvous.directory import JobDirectory, PeerRecord, RecordChange

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds between attempts to connect to one process, which may refuse connections because it has too many."""
_NEXT = 0.5
"""Seconds for which `JobSearch.first` waits for one process alone."""


class JobSearch(ABC, Generic[T]):
    """Connects to the processes that have published a name, and again to those that do not answer, in ``async with``.

    ``found`` is what the processes offer, by their ids. ``seen`` has for each its name, or why it does not answer.
    """

    def __init__(self, directory: JobDirectory, name: str) -> None:
        self._directory, self._name = directory, name
        self.found: dict[str, T] = {}
        self.seen: dict[str, str] = {}
        self._records: dict[str, PeerRecord] = {}
        self._untried: dict[str, PeerRecord] = {}
        self._unanswered: set[str] = set()
        """The processes of which an attempt runs, and none has ended."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    @abstractmethod
    def is_wanted(self, record: PeerRecord) -> bool:
        """Return whether a record counts."""

    @abstractmethod
    async def connect(self, record: PeerRecord) -> T:
        """Connect to the process of a record, and return what it offers.

        Raises PeerLostError for a process that does not answer. Any other error ends the search.
        """

    @abstractmethod
    def is_enough(self) -> bool:
        """Return whether `found` is enough for `all`."""

    async def __aenter__(self) -> Self:
        self._start("", self._follow())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await cancel_all(*self._tasks.values())

    async def first(self) -> T:
        """Return what the first process offers that answers. It tries them in turn, and does not wait for slow ones."""
        while not self.found:
            if self._untried:
                self._try(next(iter(self._untried)))
            await self._wait(_NEXT if self._untried else None)
        return next(iter(self.found.values()))

    async def all(self) -> None:
        """Wait until ``found`` is enough, and each process that is known has answered, or failed to answer once."""
        for record in await self._directory.records(self._name):
            self._note(RecordChange(record.address.id, record))
        while True:
            for each in list(self._untried):
                self._try(each)
            if not self._unanswered and self.is_enough():
                return
            await self._wait(None)

    async def _wait(self, limit: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    def _start(self, key: str, running: Any) -> None:
        task = self._tasks[key] = asyncio.get_running_loop().create_task(running, name="asyncdist-search")
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._error = error
        self._changed.set()

    async def _follow(self) -> None:
        async with self._directory.watch(self._name) as changes:
            async for change in changes:
                self._note(change)

    def _note(self, change: RecordChange) -> None:
        record = change.record
        if record is not None and self._records.get(change.id) == record:
            return
        for known in (self.found, self.seen, self._records, self._untried):
            known.pop(change.id, None)
        self._unanswered.discard(change.id)
        if (task := self._tasks.get(change.id)) is not None:
            task.cancel()
        if record is not None:
            self._records[change.id] = record
            self.seen[change.id] = record.address.name
            if self.is_wanted(record):
                self._untried[change.id] = record
        self._changed.set()

    def _try(self, each: str) -> None:
        self._unanswered.add(each)
        self._start(each, self._reach(each, self._untried.pop(each)))

    async def _reach(self, each: str, record: PeerRecord) -> None:
        async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE):
            try:
                self.found[each] = await self.connect(record)
            except PeerLostError as error:
                self.seen[each] = error.summary
            self._unanswered.discard(each)
            self._changed.set()
            if each in self.found:
                return
