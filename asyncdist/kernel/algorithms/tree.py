"""Trees: broadcast from one rank to all, and reduce from all to one.

In a binomial tree the number of ranks that have the tensor doubles in each round. No algorithm has fewer rounds, but the
root sends the whole tensor in each. In a chain every rank sends the tensor once, to the next rank. A chain is fast if the
tensor is cut into segments, because different ranks then send different segments at the same time. Ranks are numbered
relative to the root, which is 0:

    broadcast, 8 ranks     round 1   0-4
                           round 2   0-2   4-6
                           round 3   0-1   2-3   4-5   6-7

A reduce uses the same pairs, from the last round to the first.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005); for the chain, Watts, van de Geijn, "A pipelined broadcast for multidimensional
meshes", Parallel Process. Lett. 5 (1995).
"""

from __future__ import annotations

from asyncdist.kernel.algorithms.cost import Cost, in_whole
from asyncdist.kernel.algorithms.schedule import Place, Recv, Reduce, Schedule, Send


def broadcast(rank: int, size: int, root: int, data: Place) -> Schedule:
    """Copy the root's ``data`` to all ranks along a binomial tree.

    Costs ceil(log2 P) rounds for P ranks. The root sends the whole tensor in each round.
    """
    parent, children = _parent_and_children(rank, size, root)
    if parent is not None:
        yield (Recv(parent, data),)
    for child in children:
        yield (Send(child, data),)


def reduce(rank: int, size: int, root: int, data: Place) -> Schedule:
    """Reduce ``data`` of all ranks into the root's, along a binomial tree. Other ranks' ``data`` is overwritten.

    Costs ceil(log2 P) rounds for P ranks. The root receives and reduces a whole tensor in each round.
    """
    parent, children = _parent_and_children(rank, size, root)
    for child in reversed(children):
        yield (Reduce(child, data),)
    if parent is not None:
        yield (Send(parent, data),)


def all_reduce(rank: int, size: int, data: Place) -> Schedule:
    """Reduce ``data`` over all ranks, in place: to rank 0, which then broadcasts it.

    Costs 2 ceil(log2 P) rounds for P ranks, but only 2 (P-1) messages in all.
    """
    yield from reduce(rank, size, 0, data)
    yield from broadcast(rank, size, 0, data)


def barrier(rank: int, size: int, nothing_out: Place, nothing_in: Place) -> Schedule:
    """Complete on every rank once every rank has started: a reduce to rank 0 and a broadcast of nothing.

    Costs 2 ceil(log2 P) rounds for P ranks, but only 2 (P-1) messages in all.
    """
    parent, children = _parent_and_children(rank, size, 0)
    if children:
        yield tuple(Recv(child, nothing_in) for child in children)
    if parent is not None:
        yield (Send(parent, nothing_out),)
        yield (Recv(parent, nothing_in),)
    if children:
        yield tuple(Send(child, nothing_out) for child in children)


def chain_broadcast(rank: int, size: int, root: int, segment: Place) -> Schedule:
    """Copy one segment of the root's tensor to all ranks: each rank receives it and sends it to the next.

    Run the schedules of all segments concurrently: a rank then sends one segment while it receives the following one.
    For P ranks the first segment costs P-1 rounds, and each further one costs one round.
    """
    relative_rank = (rank - root) % size
    if relative_rank > 0:
        yield (Recv((rank - 1) % size, segment),)
    if relative_rank < size - 1:
        yield (Send((rank + 1) % size, segment),)


def chain_broadcast_cost(size: int, nbytes: int, segments: int = 1) -> Cost:
    """Return the cost of `chain_broadcast` of ``nbytes`` in ``segments`` equal segments."""
    if size == 1:
        return Cost()
    return in_whole(size - 2 + segments, nbytes / segments)


def segment_count(nbytes: int, segment_nbytes: int) -> int:
    """Return the number of segments, each of at most ``segment_nbytes``, into which a chain cuts a tensor; at least one."""
    return max(1, -(-nbytes // segment_nbytes))


def neighbours(rank: int, size: int) -> list[int]:
    """Return the ranks to which a rank is joined in the binomial tree of rank 0."""
    parent, children = _parent_and_children(rank, size, 0)
    return children if parent is None else [parent, *children]


def _parent_and_children(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return a rank's parent (None for the root) and its children in the binomial tree, the largest subtree first.

    The lowest set bit of the relative rank is the distance to the parent. Each lower power of two is the distance to a
    child, if there is a rank at that distance.
    """
    relative_rank = (rank - root) % size
    distance = relative_rank & -relative_rank if relative_rank else 1 << (size - 1).bit_length()
    parent = (rank - distance) % size if relative_rank else None
    children = []
    while distance > 1:
        distance //= 2
        if relative_rank + distance < size:
            children.append((rank + distance) % size)
    return parent, children
