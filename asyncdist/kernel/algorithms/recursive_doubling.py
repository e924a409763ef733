"""Recursive doubling and halving: the distance to the peer doubles (or halves) in each round.

If P is a power of two, ranks that differ in one bit form pairs, and after log2 P rounds every rank has the data of all:

    distance 1     0-1   2-3   4-5   6-7
    distance 2     0-2   1-3   4-6   5-7
    distance 4     0-4   1-5   2-6   3-7

With any other P, the *core* has as many ranks as the largest power of two below P. The first ranks form pairs (0, 1),
(2, 3), …, one for each rank outside the core. The even rank of a pair is outside: it sends its data to the odd rank first,
and receives the result last. All other ranks are in the core.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from asyncdist.kernel.algorithms.cost import Cost, in_whole
from asyncdist.kernel.algorithms.schedule import Blocks, Combine, Place, Recv, Reduce, Schedule, Send


def floor_power_of_two(size: int) -> int:
    """Return the largest power of two that is not above ``size``: the number of ranks in the core."""
    return 1 << (size.bit_length() - 1)


# -- all-reduce -----------------------------------------------------------------------------------


def all_reduce(rank: int, size: int, data: Place, scratch: Place) -> Schedule:
    """Reduce ``data`` over all ranks, in place; ``scratch`` is as large and is overwritten.

    Costs log2 P rounds, in each of which a rank sends, receives and reduces the whole tensor; if P is not a power of
    two, one more round before and one after.

    Both ranks of a pair compute the same sum, so they name the lower rank's operand first. Before a round at distance d,
    all ranks that differ only in their lowest log2 d bits hold the same result. The round extends this to distance 2 d.
    """

    def core() -> Schedule:
        for _, peer in _pairs(rank, size):
            yield Send(peer, data), Recv(peer, scratch)
            yield (Combine(data, scratch, swapped=peer < rank),)

    return _with_outside(rank, size, data, core())


def all_reduce_cost(size: int, nbytes: int) -> Cost:
    """Return the cost of `all_reduce` over ``nbytes``."""
    return in_whole(_core_rounds(size), nbytes, reduces=True) + _outside_cost(size, nbytes)


def halving_all_reduce(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Reduce ``floor_power_of_two(size)`` blocks over all ranks, in place.

    Recursive halving leaves one complete block on every rank of the core: each rank of a pair reduces one half of the
    blocks that both hold, and its peer the other half. Recursive doubling gathers the blocks. It uses runs
    ``blocks[lo:hi]``.

    Costs 2 log2 P rounds; a rank sends and receives 2(P-1)/P of the tensor and reduces (P-1)/P of it. If P is not a
    power of two, two more rounds with the whole tensor. Source: Rabenseifner, "Optimization of Collective Reduction
    Operations", ICCS 2004.
    """

    def core() -> Schedule:
        start = 0
        for distance, peer in reversed(list(_pairs(rank, size))):
            lower, upper = blocks[start : start + distance], blocks[start + distance : start + 2 * distance]
            if rank < peer:
                yield Send(peer, upper), Reduce(peer, lower)
            else:
                yield Send(peer, lower), Reduce(peer, upper)
                start += distance
        yield from all_gather(rank, size, blocks)

    return _with_outside(rank, size, blocks[0 : floor_power_of_two(size)], core())


def halving_all_reduce_cost(size: int, nbytes: int) -> Cost:
    """Return the cost of `halving_all_reduce` over ``nbytes``, all blocks together."""
    rounds, core = _core_rounds(size), floor_power_of_two(size)
    moved = (core - 1) * nbytes / core
    return Cost(2 * rounds, 2 * rounds, 2 * moved, moved) + _outside_cost(size, nbytes)


# -- all-gather -----------------------------------------------------------------------------------


def all_gather(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Copy each rank's block to all ranks of the core, in runs ``blocks[lo:hi]`` of 1, 2, 4, … blocks.

    Block i is that of the i-th rank of the core, so for all ranks ``size`` must be a power of two. Costs log2 P rounds; a
    rank sends and receives (P-1)/P of the tensor.
    """
    for distance, peer in _pairs(rank, size):
        own = _place(rank, size) & -distance
        other = own ^ distance
        yield Send(peer, blocks[own : own + distance]), Recv(peer, blocks[other : other + distance])


# -- barrier --------------------------------------------------------------------------------------


def barrier(rank: int, size: int, nothing_out: Place, nothing_in: Place) -> Schedule:
    """Return when every rank has entered; the places are empty.

    Dissemination: in each round a rank sends to the rank at distance 1, 2, 4, … to its right. The message implies all
    messages that the sender has received. Costs ceil(log2 P) rounds, for any P. Source: Hensgen, Finkel, Manber, "Two
    algorithms for barrier synchronization", Int. J. Parallel Program. 17 (1988).
    """
    distance = 1
    while distance < size:
        yield Send((rank + distance) % size, nothing_out), Recv((rank - distance) % size, nothing_in)
        distance *= 2


# -- ranks outside the core -----------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _pairs(rank: int, size: int) -> Sequence[tuple[int, int]]:
    """Return (distance, peer) for the distances 1, 2, 4, … of a rank of the core."""
    core = floor_power_of_two(size)
    outside = size - core
    place = _place(rank, size)
    others = [(1 << bit, place ^ 1 << bit) for bit in range(core.bit_length() - 1)]
    return [(distance, 2 * other + 1 if other < outside else other + outside) for distance, other in others]


def _place(rank: int, size: int) -> int:
    """Return the index of a rank in the core."""
    outside = size - floor_power_of_two(size)
    return rank // 2 if rank < 2 * outside else rank - outside


def _with_outside(rank: int, size: int, data: Place, core: Schedule) -> Schedule:
    """Run ``core`` on the ranks of the core; the others send them their ``data`` before and receive the result after."""
    is_power_of_two = size & (size - 1) == 0
    if is_power_of_two or rank >= 2 * (size - floor_power_of_two(size)):
        return core
    return _pair_with_core(rank, data, core)


def _pair_with_core(rank: int, data: Place, core: Schedule) -> Schedule:
    if rank % 2:
        yield (Reduce(rank - 1, data),)
        yield from core
        yield (Send(rank - 1, data),)
    else:
        yield (Send(rank + 1, data),)
        yield (Recv(rank + 1, data),)


def _outside_cost(size: int, nbytes: int) -> Cost:
    return Cost() if size == floor_power_of_two(size) else Cost(rounds=2, messages=2, nbytes=2 * nbytes, reduced=nbytes)


def _core_rounds(size: int) -> int:
    return size.bit_length() - 1
