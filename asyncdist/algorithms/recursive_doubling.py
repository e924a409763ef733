"""Recursive doubling and halving: the distance to the peer doubles (or halves) in each round.

`selection` compares its cost; `collectives` runs it. If P is a power of two, ranks that differ in one bit form
pairs, and after log2 P rounds every rank has the data of all:

    distance 1     0-1   2-3   4-5   6-7
    distance 2     0-2   1-3   4-6   5-7
    distance 4     0-4   1-5   2-6   3-7

With any other P, the *core* is the largest power of two below it. The first ranks go in pairs (0, 1), (2, 3), … of
which the even rank sends its data to the odd one, sits out, and receives the result. There are as many pairs as P exceeds
the core. The remaining ranks keep their order.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from asyncdist.algorithms.cost import Cost
from asyncdist.algorithms.schedule import Blocks, Combine, Place, Recv, Reduce, Schedule, Send


def floor_power_of_two(size: int) -> int:
    """Return the largest power of two that is not above ``size``: how many ranks the core has."""
    return 1 << (size.bit_length() - 1)


# -- all-reduce -----------------------------------------------------------------------------------


def all_reduce(rank: int, size: int, data: Place, scratch: Place) -> Schedule:
    """Leave in ``data`` of all ranks its reduction; ``scratch`` is as large and is clobbered.

    Costs log2 P rounds, in each of which a rank sends, receives and reduces the whole tensor; if P is not a power of
    two, one more round before and one after.

    Both ranks of a pair compute the same sum, so they name the lower one's operand first. Before a round at distance d
    all ranks that agree but for their lowest log2 d bits hold the same bits; so they do after it.
    """

    def core() -> Schedule:
        for _, peer in _pairs(rank, size):
            yield Send(peer, data), Recv(peer, scratch)
            yield (Combine(data, scratch, swapped=peer < rank),)

    return _lend(rank, size, data, core())


def all_reduce_cost(size: int, nbytes: int) -> Cost:
    """Price `all_reduce` over ``nbytes``."""
    rounds = _core_rounds(size)
    return Cost(rounds, rounds, rounds * nbytes, rounds * nbytes) + _lend_cost(size, nbytes)


def halving_all_reduce(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Leave in all blocks of all ranks their reduction; there are ``floor_power_of_two(size)`` blocks.

    Recursive halving (each rank of a pair reduces one half of what they have in common and leaves the other to its
    peer) brings every rank of the core one complete block; recursive doubling gathers them. It uses runs
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
        yield from _gather_runs(rank, size, blocks)

    return _lend(rank, size, blocks[0 : floor_power_of_two(size)], core())


def halving_all_reduce_cost(size: int, nbytes: int) -> Cost:
    """Price `halving_all_reduce` over ``nbytes``, all blocks together."""
    rounds, core = _core_rounds(size), floor_power_of_two(size)
    moved = (core - 1) * nbytes / core
    return Cost(2 * rounds, 2 * rounds, 2 * moved, moved) + _lend_cost(size, nbytes)


# -- all-gather -----------------------------------------------------------------------------------


def all_gather(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Copy each rank's ``blocks[rank]`` to all ranks; ``size`` must be a power of two.

    It uses runs ``blocks[lo:hi]``. Costs log2 P rounds; a rank sends and receives (P-1)/P of the
    tensor.
    """
    if size != floor_power_of_two(size):
        raise ValueError(f"recursive doubling gathers among a power of two of ranks, not {size}")
    yield from _gather_runs(rank, size, blocks)


def all_gather_cost(size: int, nbytes: int) -> Cost:
    """Price `all_gather` of ``nbytes``, all blocks together."""
    return Cost(_core_rounds(size), _core_rounds(size), (size - 1) * nbytes / size)


# -- barrier --------------------------------------------------------------------------------------


def barrier(rank: int, size: int, nothing_out: Place, nothing_in: Place) -> Schedule:
    """Return when every rank has entered; the places are empty.

    Dissemination: tell the rank at distance 1, 2, 4, … to the right; what one has heard by then is passed on with it.
    Costs ceil(log2 P) rounds, for any P. Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization",
    Int. J. Parallel Program. 17 (1988).
    """
    distance = 1
    while distance < size:
        yield Send((rank + distance) % size, nothing_out), Recv((rank - distance) % size, nothing_in)
        distance *= 2


def barrier_cost(size: int, nbytes: int = 0) -> Cost:
    """Price `barrier`; there are no bytes."""
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds)


# -- the core and the other ranks -----------------------------------------------------------------


@lru_cache(maxsize=1024)
def _pairs(rank: int, size: int) -> Sequence[tuple[int, int]]:
    """Return (distance, peer) for the distances 1, 2, 4, … of a rank of the core."""
    core = floor_power_of_two(size)
    lent = size - core
    place = _place(rank, size)
    others = [(1 << bit, place ^ 1 << bit) for bit in range(core.bit_length() - 1)]
    return [(distance, 2 * other + 1 if other < lent else other + lent) for distance, other in others]


def _place(rank: int, size: int) -> int:
    """Return which one of the core a rank is, in the order of the ranks."""
    lent = size - floor_power_of_two(size)
    return rank // 2 if rank < 2 * lent else rank - lent


def _gather_runs(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Recursive doubling: swap runs of 1, 2, 4, … blocks, each aligned to its own length."""
    for distance, peer in _pairs(rank, size):
        mine = _place(rank, size) & -distance
        theirs = mine ^ distance
        yield Send(peer, blocks[mine : mine + distance]), Recv(peer, blocks[theirs : theirs + distance])


def _lend(rank: int, size: int, data: Place, core: Schedule) -> Schedule:
    """Run ``core`` on its ranks; the others lend them their ``data`` before and are given the result after."""
    is_power_of_two = size & (size - 1) == 0
    if is_power_of_two or rank >= 2 * (size - floor_power_of_two(size)):
        return core
    return _lend_in_pairs(rank, data, core)


def _lend_in_pairs(rank: int, data: Place, core: Schedule) -> Schedule:
    if rank % 2:
        yield (Reduce(rank - 1, data),)
        yield from core
        yield (Send(rank - 1, data),)
    else:
        yield (Send(rank + 1, data),)
        yield (Recv(rank + 1, data),)


def _lend_cost(size: int, nbytes: int) -> Cost:
    return Cost() if size == floor_power_of_two(size) else Cost(rounds=2, messages=2, nbytes=2 * nbytes, reduced=nbytes)


def _core_rounds(size: int) -> int:
    return size.bit_length() - 1
