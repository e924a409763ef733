"""The log lines of refused connections, whose number a stranger chooses."""

from __future__ import annotations

import logging
from collections import Counter
from time import monotonic

PERIOD = 10.0
"""The least number of seconds between two lines of one log."""
_MOST_REASONS = 8
"""The most reasons that one line names: a reason may quote what a stranger has sent."""


class RefusalLog:
    """Logs the refused connections of one port: the first at once, the further ones together, one line a `PERIOD`.

    A line is a warning, whose subject is ``what``. It is written when a connection is refused, or by `flush`. One thread at
    a time uses it.
    """

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._reasons: Counter[str] = Counter()
        self.count = 0
        """How many connections were refused."""
        self._began = self._next_line = 0.0

    def add(self, reason: str, who: str = "a connection") -> None:
        """Note that a connection was refused. Equal reasons are counted together; ``who`` is for a line about it alone."""
        self.count += 1
        now = monotonic()
        if not self._reasons:
            self._began = now
        known = reason in self._reasons or len(self._reasons) < _MOST_REASONS
        self._reasons[reason if known else "another reason"] += 1
        if now >= self._next_line:
            self.flush(who)

    def flush(self, who: str = "a connection") -> None:
        if not self._reasons:
            return
        now = monotonic()
        count = self._reasons.total()
        reasons = ", ".join(f"{reason} ({n})" for reason, n in self._reasons.most_common())
        if count == 1:
            self._logger.warning("%s refused %s: %s", self._what, who, next(iter(self._reasons)))
        else:
            self._logger.warning(
                "%s refused %d connections in %.0f s: %s", self._what, count, max(1.0, now - self._began), reasons
            )
        self._reasons.clear()
        self._next_line = now + PERIOD
