"""Which gradients travel together: parameters are dealt into buckets in the order in which gradients come.

Backward meets the layers in reverse, so before the first step the order is guessed to be the reverse of the order of
definition; after it, it is known. The first bucket is kept small, so that the wire has something to do early.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

MIB = 1 << 20
FIRST_CAP_NBYTES = 1 * MIB
DEFAULT_CAP_NBYTES = 25 * MIB

Layout = tuple[tuple[int, ...], ...]


def caps(bucket_cap_mb: float | None = None) -> tuple[int, int]:
    """Return the caps in bytes of the first bucket and of every later one, from the cap in MiB that a user gave."""
    if bucket_cap_mb is None:
        return FIRST_CAP_NBYTES, DEFAULT_CAP_NBYTES
    cap = int(bucket_cap_mb * MIB)
    if cap <= 0:
        raise ValueError(f"bucket_cap_mb is a number of MiB above 0, not {bucket_cap_mb!r}")
    return min(FIRST_CAP_NBYTES, cap), cap


def assign(nbytes: Sequence[int], kinds: Sequence[Hashable], order: Iterable[int], limits: Sequence[int]) -> Layout:
    """Deal parameters into buckets of one kind (dtype and device) each; return their numbers, bucket by bucket.

    ``nbytes[p]`` and ``kinds[p]`` describe parameter ``p``; ``order`` names every parameter once, as its gradient is
    expected. A bucket is full when it has reached its cap, so it exceeds it by less than its last parameter;
    ``limits`` are the caps of each kind's buckets in turn, the last one holding for all that follow. Buckets are
    ordered by their last parameter, which is when they can be sent.
    """
    done: list[tuple[int, list[int]]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    closed: dict[Hashable, int] = {}
    last_at: dict[int, int] = {}
    for position, parameter in enumerate(order):
        if parameter in last_at:
            raise ValueError(f"parameter {parameter} comes twice in the order")
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
        raise ValueError(f"the order names {len(last_at)} of {len(nbytes)} parameters")
    done += [(last_at[members[-1]], members) for members, _ in filling.values()]
    return tuple(tuple(members) for _, members in sorted(done))


def definition_order(count: int) -> list[int]:
    """Return the order in which gradients are expected before the first step: last defined, first come."""
    return list(range(count - 1, -1, -1))


def arrival_order(arrived: Iterable[int], count: int) -> list[int]:
    """Return ``arrived`` followed by those of ``count`` parameters that did not come, so that each is there once."""
    known = dict.fromkeys(arrived)
    return [*known, *(parameter for parameter in definition_order(count) if parameter not in known)]
