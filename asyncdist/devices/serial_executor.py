"""Who puts operations into a device's queues: one after the other, in the order in which they were called.

A call that may block its thread is done there and then if nobody is before it; anything else is done by a thread of the
line's own, which comes when it is needed and goes when it is not.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("asyncdist")

_LINGER = 5.0  # seconds for which the thread waits for another call

Call = Callable[[], None]


class SerialExecutor:
    """Does calls in order, never two at a time. Calls report their own failures: what they raise is only logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._doing = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def put(self, call: Call, *, here: bool = False) -> None:
        """Have a call done; before this returns if ``here`` and none is before it."""
        with self._changed:
            here = here and not self._doing and not self._calls
            if here:
                self._doing = True
            else:
                self._calls.append(call)
                self._wake()
        if here:
            self._do(call)

    def close(self, last: Call) -> None:
        """Have one more call done, here if none is before it; after it the thread goes."""
        self.put(last, here=True)
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._changed.notify()

    def _do(self, call: Call) -> None:
        try:
            call()
        except Exception:  # the line must go on: others stand in it
            log.exception("a call on a device's line failed")
        finally:
            with self._changed:
                self._doing = False
                if self._calls:
                    self._wake()
                else:
                    self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due, _LINGER)
                if self._doing:
                    continue  # somebody is still at the call before
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
                self._doing = True
            self._do(call)
            del call  # or its tensors live on while we wait

    def _due(self) -> bool:
        return not self._doing and (bool(self._calls) or self._ended)
