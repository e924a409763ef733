"""The limit of a collective between hosts: the link, the processors, or the delays between the messages.

Every host needs to send and to receive a least number of bytes, whatever the algorithm (Patarasuk and Yuan, 2009, for
all-reduce). A call that takes little longer than that at the rate of the link is limited by the link. Otherwise it is
limited by the processors if they had hardly any idle time, and else by latency. No torch here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(bit|bps)", re.IGNORECASE)
_FULL_LINK, _FULL_CPU = 0.85, 0.9
"""From which share of the link, or of the processors' time, on these limit a call."""


def rate_in_bytes(rate: str) -> float:
    """Return the bytes per second of a rate in the words of ``tc``, such as ``1gbit``; ``bps`` means bytes.

    Raises:
        ValueError: ``tc`` would not accept the rate.
    """
    match = _RATE.fullmatch(rate.strip())
    if match is None:
        raise ValueError(f"{rate!r} is not a rate such as 1gbit or 200mbit")
    number, unit, binary, kind = match.groups()
    scale = _UNITS[unit.lower()]
    if binary:
        scale = 1024.0 ** ("", "k", "m", "g", "t").index(unit.lower())
    return float(number) * scale / (8 if kind.lower() == "bit" else 1)


def least_nbytes(collective: str, nbytes: int, hosts: int, ranks_per_host: int) -> float:
    """Return the bytes that cross the busiest link, in its busier direction, at least; 0 for a barrier.

    ``nbytes`` is the size of all blocks of a rank together, as in `ResultRow.nbytes`.
    """
    others = (hosts - 1) / hosts
    if collective == "all_reduce":
        return 2 * others * nbytes
    if collective in ("broadcast", "reduce"):
        return float(nbytes)
    if collective == "all_to_all":
        return ranks_per_host * others * nbytes
    return others * nbytes


def limit_of(link: float, cpu: float | None) -> str:
    """Return what limits a call: "link", "CPU" or "latency".

    Args:
        link: The share of the link's rate that the least number of bytes takes up.
        cpu: The share of the processors' time in which any process used them; None if unknown.
    """
    if link >= _FULL_LINK:
        return "link"
    return "CPU" if cpu is not None and cpu >= _FULL_CPU else "latency"


class CpuMeter:
    """Adds up, for each contender, how long the machine's processors were busy and how long they existed."""

    def __init__(self) -> None:
        self._ticks: dict[str, tuple[int, int]] = {}
        self._before: tuple[int, int] | None = None

    def begin(self) -> None:
        self._before = _ticks()

    def end(self, contender: str) -> None:
        after, before = _ticks(), self._before
        if after is not None and before is not None:
            busy, whole = self._ticks.get(contender, (0, 0))
            self._ticks[contender] = busy + after[0] - before[0], whole + after[1] - before[1]

    def shares(self) -> dict[str, float]:
        """Return the busy share of the processors' time by contender, as far as the system tells it."""
        return {name: busy / whole for name, (busy, whole) in self._ticks.items() if whole > 0}


def _ticks(path: str = "/proc/stat") -> tuple[int, int] | None:
    """Return the clock ticks of all processors since the start of the system: the busy ones, and all."""
    if not os.path.exists(path):
        return None
    line = Path(path).read_text(encoding="ascii").partition("\n")[0]
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(number) for number in line.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
