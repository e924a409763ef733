"""How blocks of memory go through an area in pieces."""

from __future__ import annotations

import torch

from asyncdist.memory.buffers import Memory
from asyncdist_transports.shm.collectives.staging import CollectiveState

_LINE_NBYTES = 64


def head_nbytes(members: int) -> int:
    """Return what a table of two words for each member takes at the head of an area."""
    return -(-16 * members // _LINE_NBYTES) * _LINE_NBYTES


class Pieces:
    """How the pieces of ``blocks`` equally large places lie in an area: ``step`` elements of each, one after the other."""

    __slots__ = ("blocks", "dtype", "head", "number", "slots", "state", "step", "stride")

    def __init__(self, state: CollectiveState, blocks: int, dtype: torch.dtype, *, head: int = 0) -> None:
        self.state, self.slots, self.number = state, state.slots, state.number
        self.dtype, self.blocks = dtype, blocks
        self.head = head
        self.stride = (state.slots.area_nbytes - self.head) // blocks // _LINE_NBYTES * _LINE_NBYTES
        self.step = self.stride // dtype.itemsize

    @property
    def nbytes(self) -> int:
        """How much of an area a round uses at most."""
        return self.head + self.blocks * self.stride

    def round_count(self, count: int) -> int:
        """Return in how many pieces so many elements go through; at least one."""
        return max(1, -(-count // self.step))

    def of(self, memory: Memory, k: int) -> torch.Tensor:
        """Return the k-th piece of memory."""
        if memory.count <= self.step:
            return memory.tensor if k == 0 else memory.tensor[:0]
        return memory.tensor[k * self.step : (k + 1) * self.step]

    def reserve(self, blocks: int, count: int) -> None:
        """See that there is memory for so many blocks of up to ``count`` elements, in both halves."""
        nbytes = self.head + (blocks - 1) * self.stride + min(count, self.step) * self.dtype.itemsize
        for half in (0, 1):
            self.slots.reserve(self.number, half, nbytes)

    def stage(self, block: int, source: Memory, k: int, round_index: int) -> None:
        """Copy the k-th piece of memory into our area of a round."""
        piece = self.of(source, k)
        count = piece.numel()
        start = self.head + block * self.stride
        if k == 0 and source.count > self.step:  # now, before anything is half done
            self.slots.reserve(self.number, round_index + 1, start + count * self.dtype.itemsize)
        self.slots.own_area(self.number, round_index, start, count, self.dtype).copy_(piece)

    def staged(self, rank: int, block: int, count: int, round_index: int) -> torch.Tensor:
        """Return a piece as a member has staged it in a round."""
        return self.slots.area(self.number, round_index, rank, self.head + block * self.stride, count, self.dtype)
