"""Tells whether programs other than the ranks keep the cores busy, from the kernel's counters of processor time.

The time that a thread waits for a core (`wait_policy`) does not tell: the threads of the ranks and the kernel's network
code delay each other too. Linux counts processor time in ticks, so a reading covers some tenths of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import monotonic
from typing import NamedTuple

from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.net.process_identity import pids_of_machine, processor_ticks

_LOOK_EVERY = 0.3
"""Seconds between two readings, at least."""
_BUSY, _OTHERS = 0.8, 0.25
"""The shares of the processor time, of all programs and of those that are not ranks, from which on these compete."""
_OTHERS_LEFT = 0.12
"""The share of the others below which they no longer compete."""


class Ticks(NamedTuple):
    """Ticks since the machine started: of the cores, of all programs on them, and of the processes of the ranks."""

    cores: frozenset[int]
    pids: frozenset[int]
    passed: int
    busy: int
    ranks: int


class CoreUse:
    """The use of the cores on which the process of ``host`` may run."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._look_at = 0.0
        self._before: Ticks | None = None
        self.compete = False
        """Whether others competed at the last look. Any thread may ask."""

    def others_compete(self) -> bool:
        """Return whether no core is free and other programs use a part of them. Called under the driver's lock."""
        now = monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY
            self._look()
        return self.compete

    def _look(self) -> None:
        host = self._host
        pids = pids_of_machine(host.processes, host.rank) if host.rank in host.processes else [os.getpid()]
        before, self._before = self._before, None if pids is None else read_ticks(pids)
        after = self._before
        if before is None or after is None or (before.cores, before.pids) != (after.cores, after.pids):
            self.compete = False
            return
        passed = after.passed - before.passed
        if passed <= 0:
            return
        busy = (after.busy - before.busy) / passed
        others = busy - (after.ranks - before.ranks) / passed
        self.compete = busy >= _BUSY and others >= (_OTHERS_LEFT if self.compete else _OTHERS)


def read_ticks(pids: Iterable[int]) -> Ticks | None:
    """Read ``/proc``; return None if it does not tell.

    The time of interrupts counts for no program: the kernel's network code runs in them.
    """
    try:
        cores = frozenset(os.sched_getaffinity(0))
        passed = busy = 0
        with open("/proc/stat", "rb") as counters:
            for line in counters:
                name, *fields = line.split()
                if not name.startswith(b"cpu"):
                    break
                if name[3:] and int(name[3:]) in cores:
                    user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, fields[:8])
                    programs = user + nice + system + stolen
                    busy += programs
                    passed += programs + idle + waiting + interrupts + soft
        ranks = sum(map(processor_ticks, pids))
    # Not Linux, a sandbox without these files, or a process that has ended.
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return Ticks(cores, frozenset(pids), passed, busy, ranks)
