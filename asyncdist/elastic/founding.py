"""How processes that wait name a generation of a job without a living member: the first, or one after all were lost.

Every one of them may: the store's compare-and-set decides. So that they seldom meet each other, those that came later let
the earlier ones go first.
"""

from __future__ import annotations

import contextlib

from asyncdist.base.deadline import Deadline
from asyncdist.elastic.job import GenerationRecord, Job

SETTLE = 0.2
"""Seconds without a further arrival after which waiting processes form the first generation."""
MEETING_TIMEOUT = 10.0
"""Seconds within which the members of a generation must have met, and those that come first must have named one."""


class Founding:
    """The part of a process that waits: ``min_size`` processes name a generation, ``start_size`` that of a new job."""

    def __init__(self, job: Job, min_size: int, start_size: int) -> None:
        self._job, self._min_size, self._start_size = job, min_size, start_size

    async def next_record(self, seen: int, deadline: Deadline) -> GenerationRecord:
        """Return the record of the generation after ``seen``. This process names it if the job has no living member."""
        job = self._job

        def is_named() -> bool:
            return job.record.number > seen

        while not is_named():
            await job.until_present(lambda: is_named() or self._may_found(), deadline, self._founders)
            first = self._first
            if first and not is_named():
                # One of them may be stopped. The others do not give up at the same moment, and then one names them all.
                patience = Deadline.after(MEETING_TIMEOUT + SETTLE * len(first))
                with contextlib.suppress(TimeoutError):
                    await job.until(
                        lambda: is_named() or not self._may_found() or not self._first,
                        Deadline(min(deadline.at, patience.at)),
                    )
                    continue
                if deadline.expired():
                    raise job.overdue(self._founders)
            if not is_named():
                await self._found(job.record, self._first)
        return job.record

    @property
    def _founders(self) -> int:
        return self._min_size if self._job.record.begun else self._start_size

    def _may_found(self) -> bool:
        """Return whether the job has no living member, and enough processes wait for a generation."""
        candidates = self._job.candidates()
        return not self._job.members and self._job.id in candidates and len(candidates) >= self._founders

    @property
    def _first(self) -> set[int]:
        """The processes that this one lets go first: they may be about to name a generation, or to meet for the last."""
        job, record = self._job, self._job.record
        first = {each for each in job.candidates() if each < job.id}
        if record.begun < record.number and job.id not in record.members:
            first.update(each for each in record.members if each in job.waiting)
        return first

    async def _found(self, record: GenerationRecord, without: set[int]) -> None:
        """Name waiting processes as the members of a generation, once no further one has arrived for a while."""
        job = self._job
        present = job.candidates()
        with contextlib.suppress(TimeoutError):
            await job.until(lambda: job.candidates() != present or job.record != record, Deadline.after(SETTLE))
            return
        chosen = tuple(each for each in present if each not in without)
        # The news of this process may be older than a member that is back.
        if not self._may_found() or len(chosen) < self._founders or await job.has_members():
            return
        if not await job.begin_generation(record, record.number + 1, chosen, record.begun):
            await job.until(lambda: job.has_replaced(record))
