"""Seconds that processes could use: those for which they stood in line for a processor do not count.

A failure is to be known everywhere within a second; but where others want the processors too, more than that may pass
before anybody gets to look::

    since = Stopwatch(*(rank.pid for rank in ranks))
    ranks[2].kill()
    ...                                        # the others say when they heard of it, by `time.monotonic`
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
    """Counts from when it is made, for this process and those with the numbers ``pids``.

    Linux says of each thread how long it wanted to run and could not. Elsewhere all seconds count; and everywhere those
    for which a process slept. Of one that has ended, ``ended`` says what `stood_in_line` said last, if it says anything.
    """

    def __init__(self, *pids: int, ended: Mapping[int, float] = _NOBODY) -> None:
        self._pids, self._ended = {os.getpid(), *pids}, ended
        self._stood = self._standing()
        self._began = monotonic()

    def seconds(self, at: float | None = None) -> float:
        """Return the seconds until now, or until the monotonic time ``at``, whichever process has taken it."""
        elapsed = (monotonic() if at is None else at) - self._began
        return elapsed - sum(seconds - self._stood.get(thread, 0.0) for thread, seconds in self._standing().items())

    def _standing(self) -> dict[Path, float]:
        """Return for how long each thread has stood in line in its life."""
        stood = {_main_thread(pid): seconds for pid, seconds in self._ended.items() if pid in self._pids}
        for pid in self._pids:
            for thread in _threads(pid):
                with contextlib.suppress(OSError):  # it has ended meanwhile
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
