"""Assign parameters to buckets, in the order in which their gradients arrive. Called by `reducer`.

Backward visits the layers in reverse. Before the first step the expected order is therefore the reverse order of
definition; afterwards it is the observed order. The first bucket is small, so that communication starts early.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

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
