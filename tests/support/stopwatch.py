"""Measures the seconds in which processes could run: time spent waiting for a processor does not count.

Tests of failures use it. All ranks must notice a failure within a second, but on a busy machine more time may pass before
a rank is scheduled::

    since = Stopwatch(*(rank.pid for rank in ranks))
    ranks[2].kill()
    ...                                        # the other ranks send the `time.monotonic` at which they noticed it
    assert since.seconds(heard_at) < 1.0
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Self

from benchmarks.processes import Nursery, waiting_time

_NONE: Mapping[int, float] = MappingProxyType({})


class Stopwatch:
    """Counts from its creation, for this process and the processes ``pids``.

    Linux reports for each thread how long it was runnable without running. On other systems all seconds count. Time in
    which a process sleeps always counts. ``ended`` says for how many seconds the main threads of processes that
    have ended have waited, by process id.
    """

    def __init__(self, *pids: int, ended: Mapping[int, float] = _NONE) -> None:
        self._pids, self._ended = {os.getpid(), *pids}, ended
        self._waited = self._waiting_seconds()
        self._began = monotonic()

    @classmethod
    def of(cls, nursery: Nursery) -> Self:
        """Return a stopwatch that begins now, for all ranks of a nursery that have not ended."""
        return cls(*(rank.pid for rank in nursery.running), ended=nursery.waited)

    def seconds(self, at: float | None = None) -> float:
        """Return the seconds until now, or until the monotonic time ``at``, which another process may have measured."""
        elapsed = (monotonic() if at is None else at) - self._began
        waited = self._waiting_seconds()
        return elapsed - sum(seconds - self._waited.get(thread, 0.0) for thread, seconds in waited.items())

    def _waiting_seconds(self) -> dict[Path, float]:
        """Return for how long each thread has waited for a processor since it started."""
        waited = {_main_thread(pid): seconds for pid, seconds in self._ended.items() if pid in self._pids}
        for pid in self._pids:
            for thread in _threads(pid):
                with contextlib.suppress(OSError):  # the thread has ended
                    waited[thread] = waiting_time(thread)
        return waited


def _threads(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _main_thread(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}")
