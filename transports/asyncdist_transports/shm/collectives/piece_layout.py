"""The layout of an area: how blocks of memory are cut into pieces that fit into it. Used by `large` and `small`."""

from __future__ import annotations

import torch

from asyncdist.kernel.memory.buffers import Memory
from asyncdist.kernel.memory.shared_arena import ALIGNMENT
from asyncdist_transports.shm.collectives.staging import CollectiveState


def head_nbytes(members: int) -> int:
    """Return the bytes of a table of two words for each member at the start of an area."""
    return -(-16 * members // ALIGNMENT) * ALIGNMENT


class Pieces:
    """The pieces of ``blocks`` equally large blocks in an area: ``step`` elements of each, one block after the other."""

    __slots__ = ("blocks", "dtype", "head", "number", "slots", "state", "step", "stride")

    def __init__(self, state: CollectiveState, blocks: int, dtype: torch.dtype, *, head: int = 0) -> None:
        self.state, self.slots, self.number = state, state.slots, state.number
        self.dtype, self.blocks = dtype, blocks
        self.head = head
        self.stride = (state.slots.area_nbytes - self.head) // blocks // ALIGNMENT * ALIGNMENT
        self.step = self.stride // dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The most bytes of an area that a round uses."""
        return self.head + self.blocks * self.stride

    def round_count(self, count: int) -> int:
        """Return the number of pieces for that many elements; at least one."""
        return max(1, -(-count // self.step))

    def of(self, memory: Memory, k: int) -> torch.Tensor:
        """Return the k-th piece of a memory."""
        if memory.count <= self.step:
            return memory.tensor if k == 0 else memory.tensor[:0]
        return memory.tensor[k * self.step : (k + 1) * self.step]

    def reserve(self, blocks: int, count: int) -> None:
        """Reserve memory for that many blocks of up to ``count`` elements, in both halves."""
        nbytes = self.head + (blocks - 1) * self.stride + min(count, self.step) * self.dtype.itemsize
        for half in (0, 1):
            self.slots.reserve(self.number, half, nbytes)

    def stage(self, block: int, source: Memory, k: int, round_index: int) -> None:
        """Copy the k-th piece of a memory into this member's area of a round."""
        piece = self.of(source, k)
        count = piece.numel()
        start = self.head + block * self.stride
        # Memory for the second half is reserved before any piece has been exchanged.
        if k == 0 and source.count > self.step:
            self.slots.reserve(self.number, round_index + 1, start + count * self.dtype.itemsize)
        self.slots.own_area(self.number, round_index, start, count, self.dtype).copy_(piece)

    def staged(self, rank: int, block: int, count: int, round_index: int) -> torch.Tensor:
        return self.slots.area(self.number, round_index, rank, self.head + block * self.stride, count, self.dtype)
