"""Pairwise exchange: every block goes directly from its source rank to its destination.

This path is the shortest if every block has one destination, and small blocks can all be sent at once. In round k, rank r
sends to rank r + k and receives from rank r - k (modulo the size), so that no rank receives two blocks in one round.

A place that is ``None`` has no bytes, on both ranks. It is neither sent nor received.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncdist.kernel.algorithms.schedule import Action, Blocks, Place, Recv, Reduce, Schedule, Send, Step


def all_to_all(rank: int, size: int, outgoing: Blocks, incoming: Blocks) -> Schedule:
    """Send ``outgoing[peer]`` to each peer and receive its ``incoming[peer]``; the caller copies a rank's own block.

    Costs P-1 rounds, in each of which a rank sends and receives 1/P of its tensor.
    """
    for left, right in _circle(rank, size):
        if step := _present((Send(right, outgoing[right]), Recv(left, incoming[left]))):
            yield step


def reduce_scatter(rank: int, size: int, blocks: Blocks, own: Place) -> Schedule:
    """Fold every rank's ``blocks[rank]`` into ``own``, which holds the caller's block; ``blocks`` are only read.

    Costs P-1 rounds, in each of which a rank sends, receives and reduces 1/P of the tensor.
    """
    for left, right in _circle(rank, size):
        if step := _present((Send(right, blocks[right]), Reduce(left, own))):
            yield step


def all_gather(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Copy each rank's ``blocks[rank]`` to all ranks, every rank to every other at once.

    Costs one round of P-1 messages in and P-1 out; a rank sends and receives (P-1)/P of the tensor.
    """
    sends = (Send(right, blocks[rank]) for _, right in _circle(rank, size))
    receives = (Recv(left, blocks[left]) for left, _ in _circle(rank, size))
    if step := _present((*sends, *receives)):
        yield step


def gather(rank: int, size: int, root: int, own: Place, blocks: Blocks) -> Schedule:
    """Receive each rank's ``own`` into the root's ``blocks[rank]``; the caller copies the root's.

    ``blocks`` may be anything on other ranks. Costs one round in which the root receives P-1 messages.
    """
    if rank != root:
        actions: Iterable[Action] = (Send(root, own),)
    else:
        actions = (Recv(left, blocks[left]) for left, _ in _circle(rank, size))
    if step := _present(actions):
        yield step


def scatter(rank: int, size: int, root: int, own: Place, blocks: Blocks) -> Schedule:
    """Send the root's ``blocks[rank]`` to each rank's ``own``; the caller copies the root's.

    ``blocks`` may be anything on other ranks. Costs one round in which the root sends P-1 messages.
    """
    if rank != root:
        actions: Iterable[Action] = (Recv(root, own),)
    else:
        actions = (Send(right, blocks[right]) for _, right in _circle(rank, size))
    if step := _present(actions):
        yield step


def _circle(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks 1, 2, … P-1 to the left and right, so that each rank starts with a different peer."""
    return (((rank - distance) % size, (rank + distance) % size) for distance in range(1, size))


def _present(actions: Iterable[Action]) -> Step:
    return tuple(action for action in actions if action.place is not None)
