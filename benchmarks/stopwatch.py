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

_NONE: Mapping[int, float] = MappingProxyType({})


class Stopwatch:
    """Counts from its creation, for this process and the processes ``pids``.

    Linux reports for each thread how long it was runnable without running. On other systems all seconds count. Time in
    which a process sleeps always counts. ``ended`` has the last value of `stood_in_line` of processes that have ended,
    by process id.
    """

    def __init__(self, *pids: int, ended: Mapping[int, float] = _NONE) -> None:
        self._pids, self._ended = {os.getpid(), *pids}, ended
        self._waited = self._waiting_seconds()
        self._began = monotonic()

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
                    waited[thread] = _waiting_time(thread)
        return waited


def stood_in_line(pid: int) -> float:
    """Return for how many seconds the main thread of a process has waited for a processor; 0 if that is unknown."""
    with contextlib.suppress(OSError):
        return _waiting_time(_main_thread(pid))
    return 0.0


def _threads(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _main_thread(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}")


def _waiting_time(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[1]) / 1e9
