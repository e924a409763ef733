"""Assign parameters to buckets, in the order in which their gradients arrive, and find the best size. Called by `reducer`.

Backward visits the layers in reverse. Before the first step the expected order is therefore the reverse order of
definition; afterwards it is the observed order. The first bucket is small, so that communication starts early.

`BucketTuning` tries several sizes in the first steps, for ``bucket_cap_mb="auto"``. All ranks try the same caps in the same
steps, whatever they measure. At the end of a stage they combine their medians, and so make the same choice.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from statistics import median

from asyncdist.errors import UsageError

MIB = 1 << 20
FIRST_CAP_NBYTES = 1 * MIB
DEFAULT_CAP_NBYTES = 25 * MIB
_SECONDS_ON_LINK = 0.02
"""The time that a bucket takes on a link for which `cap_for_link` finds a cap."""

Layout = tuple[tuple[int, ...], ...]


def caps(bucket_cap_mb: float | str) -> tuple[int, int]:
    """Return the caps in bytes of the first bucket and of all later ones, for a cap in MiB."""
    if not isinstance(bucket_cap_mb, int | float):
        raise UsageError(f"bucket_cap_mb is a number of MiB or 'auto', not {bucket_cap_mb!r}")
    cap = int(bucket_cap_mb * MIB)
    if cap <= 0:
        raise UsageError(f"bucket_cap_mb must be greater than 0 (MiB), not {bucket_cap_mb!r}")
    return limits_of(cap)


def limits_of(cap: int) -> tuple[int, int]:
    """Return the caps in bytes of the first bucket, which is small, and of all later ones."""
    return min(FIRST_CAP_NBYTES, cap), cap


def cap_for_link(seconds_per_byte: float) -> int:
    """Return the cap in bytes for buckets that pass a link: about what it moves in 20 ms, from 1 to 25 MiB.

    It is a power of two MiB or 25 MiB, so that small differences between two measurements of a link change nothing.
    """
    if seconds_per_byte * DEFAULT_CAP_NBYTES <= _SECONDS_ON_LINK:
        return DEFAULT_CAP_NBYTES
    size = _SECONDS_ON_LINK / seconds_per_byte / MIB
    return min(DEFAULT_CAP_NBYTES, MIB << max(0, round(math.log2(size))))


def assign(nbytes: Sequence[int], kinds: Sequence[Hashable], order: Iterable[int], limits: Sequence[int]) -> Layout:
    """Assign parameters to buckets of one kind (dtype and device) each.

    A bucket is full when it has reached its cap, so it exceeds the cap by less than its last parameter.

    Args:
        nbytes: Size of each parameter in bytes.
        kinds: Kind of each parameter.
        order: Every parameter's number once, in the order in which gradients are expected.
        limits: Caps in bytes of each kind's buckets in turn; the last one applies to all further buckets.

    Returns:
        The parameters' numbers, bucket by bucket. Buckets are ordered by their last parameter, after which they can
        be sent.
    """
    done: list[tuple[int, list[int]]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    closed: dict[Hashable, int] = {}
    last_at: dict[int, int] = {}
    for position, parameter in enumerate(order):
        if parameter in last_at:
            raise ValueError(f"parameter {parameter} appears twice in the order")
        last_at[parameter] = position
        kind = kinds[parameter]
        members, filled = filling.pop(kind, ([], 0))
        members.append(parameter)
        filled += nbytes[parameter]
        count = closed.get(kind, 0)
        if filled >= limits[min(count, len(limits) - 1)]:
            done.append((position, members))
            closed[kind] = count + 1
        else:
            filling[kind] = (members, filled)
    if len(last_at) != len(nbytes):
        raise ValueError(f"the order contains {len(last_at)} of {len(nbytes)} parameters")
    done += [(last_at[members[-1]], members) for members, _ in filling.values()]
    return tuple(tuple(members) for _, members in sorted(done))


def definition_order(count: int) -> list[int]:
    """Return the order in which gradients are expected before the first step: the reverse order of definition."""
    return list(range(count - 1, -1, -1))


def arrival_order(arrived: Iterable[int], count: int) -> list[int]:
    """Return ``arrived`` without duplicates, followed by the other ones of ``count`` parameters."""
    known = dict.fromkeys(arrived)
    return [*known, *(parameter for parameter in definition_order(count) if parameter not in known)]


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
