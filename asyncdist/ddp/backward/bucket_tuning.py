"""Find the bucket size with which the last all-reduce of a step ends soonest, by trying several in the first steps.

Used by `reducer` for ``bucket_cap_mb="auto"``. All ranks try the same caps in the same steps, whatever they measure. At the
end of a stage they combine their medians, and so make the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from statistics import median

from asyncdist.ddp.buckets import DEFAULT_CAP_NBYTES, MIB, limits_of

_TRIED_MB = (1, 4, 10, 25, 50, 100)
_WARM_UPS = 1
"""Steps after a change of the buckets that are not timed: the first one touches new memory."""
_TIMED = 3
"""Timed steps between two changes of the buckets."""
_FINALISTS = 3
_FINAL_TURNS = 3
"""How often each finalist is tried again, in turns with the others."""


class BucketTuning:
    """The caps that ``bucket_cap_mb="auto"`` tries, what they took, and which one it has chosen.

    In a first stage each cap is tried once: one step that is not timed and three that are. In a second stage the three best
    ones are tried three times more, in turns. ``print(model.bucket_tuning)`` shows the result.

    Args:
        nbytes: The bytes of all gradients. Caps above it make one bucket, which is tried too.
        tries: Whether there is anything to choose; a world of one rank uses the default.

    Attributes:
        chosen: The cap that was chosen in bytes; None while caps are tried.
        seconds: For each cap in bytes, the median from the start of backward to the end of its last all-reduce, in the last
            stage in which it was tried, on the slowest rank.
    """

    def __init__(self, nbytes: int, *, tries: bool = True) -> None:
        caps = [size * MIB for size in _TRIED_MB if size * MIB < nbytes]
        self.chosen: int | None = None
        self.seconds: dict[int, float] = {}
        self._nbytes = nbytes
        self._steps = 0
        self._is_final = False
        self._turns: list[int] = []
        self._times: dict[int, list[float]] = {}
        if tries and caps:
            self._begin([*caps, nbytes], turns=1)
        else:
            self.chosen = DEFAULT_CAP_NBYTES

    @property
    def cap(self) -> int:
        """The cap of the next step's buckets in bytes."""
        return self._turns[0] if self.chosen is None else self.chosen

    @property
    def limits(self) -> tuple[int, int]:
        """The caps of the next step's first bucket and of its later ones in bytes."""
        return limits_of(self.cap) if self.cap < self._nbytes else (self.cap, self.cap)

    def record(self, seconds: float) -> bool:
        """Count one step; return whether a stage is over, so that the ranks combine their `medians`.

        Args:
            seconds: From the start of backward to the end of the last all-reduce; 0 on a rank that has computed nothing.
        """
        if self.chosen is not None:
            return False
        self._steps += 1
        if self._steps > _WARM_UPS:
            self._times[self.cap].append(seconds)
        if self._steps == _WARM_UPS + _TIMED:
            self._steps = 0
            self._turns.pop(0)
        return not self._turns

    @property
    def medians(self) -> list[float]:
        """The median of each cap of this stage, in the order of the caps."""
        return [median(times) for times in self._times.values()]

    def decide(self, medians: Sequence[float]) -> bool:
        """Begin the next stage, or choose a cap and return True, by the medians that all ranks have agreed on."""
        found = dict(zip(self._times, medians, strict=True))
        self.seconds |= found
        ranked = sorted(found, key=found.__getitem__)
        if self._is_final or len(ranked) == 1:
            self.chosen = ranked[0]
        else:
            self._begin(sorted(ranked[:_FINALISTS]), turns=_FINAL_TURNS)
        return self.chosen is not None

    def _begin(self, caps: Sequence[int], turns: int) -> None:
        self._is_final = turns > 1
        self._turns = list(chain.from_iterable([caps] * turns))
        self._times = {cap: [] for cap in caps}

    def __str__(self) -> str:
        if self.chosen is None:
            return f"trying buckets of {_mb(self.cap)}"
        if not self.seconds:
            return f"buckets of {_mb(self.chosen)}: there was nothing to choose"
        tried = ", ".join(
            f"{'one bucket' if cap >= self._nbytes else _mb(cap)} {1000 * seconds:.2f} ms"
            for cap, seconds in sorted(self.seconds.items())
        )
        return f"buckets of {_mb(self.chosen)}, by the time until the last all-reduce had ended: {tried}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / MIB:.3g} MiB"
