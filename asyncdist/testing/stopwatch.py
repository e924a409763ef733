"""Measures seconds in which processes could run: time spent waiting for a processor does not count.

Tests of failures use it. A failure has to be known on all ranks within a second. On a busy machine more time may pass
before a rank is scheduled::

    since = Stopwatch(*(rank.pid for rank in ranks))
    ranks[2].kill()
    ...                                        # the other ranks send when they noticed it, by `time.monotonic`
    assert since.seconds(heard_at) < 1.0
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import MappingProxyType

_NOBODY: Mapping[int, float] = MappingProxyType({})


class Stopwatch:
    """Counts from its creation, for this process and the processes ``pids``.

    Linux reports for each thread how long it was runnable without running. On other systems all seconds count. Time in
    which a process slept always counts. ``ended`` holds the last value of `stood_in_line` for processes that have
    ended.
    """

    def __init__(self, *pids: int, ended: Mapping[int, float] = _NOBODY) -> None:
        self._pids, self._ended = {os.getpid(), *pids}, ended
        self._stood = self._standing()
        self._began = monotonic()

    def seconds(self, at: float | None = None) -> float:
        """Return the seconds until now, or until the monotonic time ``at``, which any process may have taken."""
        elapsed = (monotonic() if at is None else at) - self._began
        return elapsed - sum(seconds - self._stood.get(thread, 0.0) for thread, seconds in self._standing().items())

    def _standing(self) -> dict[Path, float]:
        """Return for how long each thread has stood in line in its life."""
        stood = {_main_thread(pid): seconds for pid, seconds in self._ended.items() if pid in self._pids}
        for pid in self._pids:
            for thread in _threads(pid):
                with contextlib.suppress(OSError):  # it has ended
                    stood[thread] = _stood(thread)
        return stood


def stood_in_line(pid: int) -> float:
    """Return for how many seconds the main thread of a process, which may have ended, has stood in line for a processor."""
    with contextlib.suppress(OSError):
        return _stood(_main_thread(pid))
    return 0.0


def _threads(pid: int) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def _main_thread(pid: int) -> Path:
    return Path(f"/proc/{pid}/task/{pid}")


def _stood(thread: Path) -> float:
    return int((thread / "schedstat").read_text().split()[1]) / 1e9
