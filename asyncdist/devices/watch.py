"""Who notices that the device has done an operation, that it takes too long, or that the group has failed meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any

from asyncdist.collectives.operation import Plan
from asyncdist.devices.streams import Mark
from asyncdist.devices.work import DeviceWork
from asyncdist.observe.recorder import Entry

_SHORTEST, _LONGEST = 20e-6, 2e-3  # seconds between two looks, the longer the longer it has lasted
_SLOW = 0.05  # seconds after which it is asked whether the peers are still there


@dataclass(slots=True, eq=False)
class Pending:
    """An operation that was called. It holds the tensors, which the device uses until the mark."""

    work: DeviceWork
    plan: Plan
    entry: Entry
    issued: float
    deadline: float
    mark: Mark | None = None
    value: Any = None


class Watch:
    """Looks after pending operations, in a thread that is there while there are any.

    ``slow(pending)`` is called again and again for the oldest one when it has lasted for some time; ``late(pending)``
    when its deadline has passed, ``broken(pending, cause)`` when the device reports a failure.
    """

    def __init__(
        self,
        name: str,
        slow: Callable[[Pending], None],
        late: Callable[[Pending], None],
        broken: Callable[[Pending, Exception], None],
    ) -> None:
        self._name = name
        self._slow, self._late, self._broken = slow, late, broken
        self._pending: list[Pending] = []
        self._lock = threading.Lock()
        self._watched = False

    def add(self, pending: Pending) -> None:
        """Look after an operation until it is over."""
        with self._lock:
            self._pending.append(pending)
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def take_all(self) -> list[Pending]:
        """Return what is pending, and look after it no more."""
        with self._lock:
            pending, self._pending = self._pending, []
        return pending

    def _run(self) -> None:
        pause = _SHORTEST
        while True:
            with self._lock:
                pending = list(self._pending)
                if not pending:
                    self._watched = False
                    return
            over = [self._look(one) for one in pending]
            if any(over):
                pause = _SHORTEST
                continue
            if monotonic() - pending[0].issued > _SLOW:
                self._slow(pending[0])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _look(self, pending: Pending) -> bool:
        """Return whether an operation is over."""
        try:
            over = pending.mark is not None and pending.mark.query()
        except Exception as cause:
            self._broken(pending, cause)
            return True
        if over:
            with self._lock:
                if pending not in self._pending:
                    return True  # taken, to be failed
                self._pending.remove(pending)
            pending.entry.finished = perf_counter()
            pending.work.finish(pending.value)
            return True
        if monotonic() >= pending.deadline:
            self._late(pending)
        return False
