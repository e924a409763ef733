"""Trees: from one rank to all, and from all to one.

`selection` prices it; `collectives` builds its plans of it. A binomial tree doubles in each round the ranks that have
the tensor, which is as fast as news can spread; but each of them sends the whole of it, again and again. A chain sends
every byte just once, and is fast where the tensor is cut into segments that follow each other closely. Ranks count
from the root, so that it may be any rank:

    binomial tree of 8     round 1   0-4
                           round 2   0-2   4-6
                           round 3   0-1   2-3   4-5   6-7

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005); for the chain, Watts, van de Geijn, "A pipelined broadcast for multidimensional
meshes", Parallel Process. Lett. 5 (1995).
"""

from __future__ import annotations

from asyncdist.algorithms.cost import Cost
from asyncdist.algorithms.schedule import Place, Recv, Reduce, Schedule, Send


def broadcast(rank: int, size: int, root: int, data: Place) -> Schedule:
    """Copy the root's ``data`` to all ranks along a binomial tree.

    Costs ceil(log2 P) rounds, in each of which the root, for one, sends the whole tensor.
    """
    parent, children = _family(rank, size, root)
    if parent is not None:
        yield (Recv(parent, data),)
    for child in children:
        yield (Send(child, data),)


def broadcast_cost(size: int, nbytes: int) -> Cost:
    """Price `broadcast` of ``nbytes``."""
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds, rounds * nbytes)


def reduce(rank: int, size: int, root: int, data: Place) -> Schedule:
    """Leave in the root's ``data`` its reduction along a binomial tree; on other ranks ``data`` is clobbered.

    Costs ceil(log2 P) rounds, in each of which the root, for one, receives and reduces the whole tensor.
    """
    parent, children = _family(rank, size, root)
    for child in reversed(children):
        yield (Reduce(child, data),)
    if parent is not None:
        yield (Send(parent, data),)


def reduce_cost(size: int, nbytes: int) -> Cost:
    """Price `reduce` over ``nbytes``."""
    rounds = (size - 1).bit_length()
    return Cost(rounds, rounds, rounds * nbytes, rounds * nbytes)


def chain_broadcast(rank: int, size: int, root: int, segment: Place) -> Schedule:
    """Copy one segment of the root's tensor to all ranks, each of which passes it on to the next.

    This is the schedule of one segment: run those of all segments at once, and while a rank passes one on it receives
    the following one. Costs P-1 rounds for the first segment and one for each further one.
    """
    behind_root = (rank - root) % size
    if behind_root > 0:
        yield (Recv((rank - 1) % size, segment),)
    if behind_root < size - 1:
        yield (Send((rank + 1) % size, segment),)


def chain_broadcast_cost(size: int, nbytes: int, segments: int = 1) -> Cost:
    """Price the `chain_broadcast` of ``nbytes`` in ``segments`` equal segments."""
    if size == 1:
        return Cost()
    rounds = size - 2 + segments
    return Cost(rounds, rounds, rounds * nbytes / segments)


def segment_count(nbytes: int, segment_nbytes: int) -> int:
    """Return how many segments of at most ``segment_nbytes`` a tensor is cut into for a chain; at least one."""
    return max(1, -(-nbytes // segment_nbytes))


def _family(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return a rank's parent (``None`` for the root) and children in the binomial tree, the largest subtree first.

    Counted from the root, a rank's lowest set bit is its distance to its parent, and all lower powers of two are those
    to its children.
    """
    place = (rank - root) % size
    reach = place & -place if place else 1 << (size - 1).bit_length()
    parent = (rank - reach) % size if place else None
    children = []
    while reach > 1:
        reach //= 2
        if place + reach < size:
            children.append((rank + reach) % size)
    return parent, children
