"""A version, or a selection of one, in the memory of a process that has it or is reading it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from asyncdist.errors import ProtocolError
from asyncdist.kernel import ReadMapping
from asyncdist.weights.content.difference import difference, restore
from asyncdist.weights.content.digest import digest
from asyncdist.weights.content.layout import Block
from asyncdist.weights.content.selection import Selection, flat_range
from asyncdist.weights.transfer.segments import OwnSegment
from asyncdist.weights.transfer.version_table import Version


class HeldVersion:
    """Blocks of a version that have arrived in order and are verified, and who uses them. Belongs to one loop.

    The ``digests`` are those of the blocks of the selection's layout; of a part, they arrive with its blocks. ``on_unused``
    is called once, when the version is dropped and no use of it is left.

    Attributes:
        memory: Where the blocks are; None until it is known.
        num_blocks: The number of blocks that are here.
        is_lost: Whether a process that had mapped the memory vanished, so that it may still read it.
        is_abandoned: Whether no further block will arrive.
        entry: The name by which readers ask for it; empty until it is offered.
        base: Another version of this process, from which blocks may arrive as differences; in use until `end_base`.
        differences: Those that are known, by the key of the other version and the number of the block.
    """

    def __init__(
        self,
        version: Version,
        selection: Selection,
        digests: NDArray[np.uint64],
        on_unused: Callable[[HeldVersion], None],
    ) -> None:
        self.version, self.selection, self.digests = version, selection, digests
        self.memory: OwnSegment | ReadMapping | None = None
        self.num_blocks = 0
        self.is_lost = False
        self.is_abandoned = False
        self.entry = ""
        self.base: HeldVersion | None = None
        self.differences: dict[tuple[str, int], bytes] = {}
        self._on_unused = on_unused
        self._uses = 1
        self._waiters: list[asyncio.Future[None]] = []
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._array = self._bytes.numpy()

    @property
    def blocks(self) -> list[Block]:
        return self.selection.layout.blocks

    @property
    def is_complete(self) -> bool:
        return self.num_blocks == len(self.blocks)

    def place(self, memory: OwnSegment | ReadMapping) -> None:
        """Set where the blocks are.

        Raises:
            ProtocolError: The memory is too small.
        """
        if memory.nbytes < self.selection.layout.nbytes:
            raise ProtocolError(f"memory of {memory.nbytes} bytes for {self.selection.layout.nbytes} of {self.version}")
        self.memory, self._bytes, self._array = memory, memory.bytes, memory.bytes.numpy()

    def widen(self, selection: Selection, digests: NDArray[np.uint64]) -> None:
        """Hold all of the version instead of the selection, before any block is here."""
        self.selection, self.digests = selection, digests

    def array(self, block: Block) -> NDArray[np.uint8]:
        return self._array[block.offset : block.offset + block.nbytes]

    def is_like(self, other: HeldVersion) -> bool:
        """Return whether the blocks of two versions are of the same parts of the same tensors."""
        ours, theirs = self.selection, other.selection
        return ours.key == theirs.key and ours.layout.key == theirs.layout.key

    def end_base(self) -> None:
        """Take no differences any more. Idempotent."""
        base, self.base = self.base, None
        if base is not None:
            base.release()

    def difference(self, number: int, key: str, base: HeldVersion | None) -> bytes | None:
        """Return how a block differs from that of the version with a key; None if it is not known or the block is shorter.

        Any thread may call it. ``base`` is that version, if this process has it.
        """
        known = self.differences.get((key, number))
        if known is None and base is not None:
            block = self.blocks[number]
            is_equal = base.digests[number] == self.digests[number]
            known = b"" if is_equal else difference(base.array(block), self.array(block), block.place.dtype.itemsize)
        return known

    def keep_differences(self, key: str, first: int, buffers: Sequence[memoryview]) -> None:
        """Note blocks from a number on, of which those that are shorter than their blocks are differences, for readers."""
        for number, buffer in enumerate(buffers, first):
            if buffer.nbytes < self.blocks[number].nbytes and (key, number) not in self.differences:
                self.differences[key, number] = bytes(buffer)

    def tensor(self, name: str) -> torch.Tensor:
        place = self.selection.layout.places[name]
        flat = self._bytes[place.offset : place.offset + place.nbytes]
        return flat.view(place.dtype).view(place.shape)

    def part(self, selection: Selection, name: str) -> torch.Tensor:
        """Return a tensor of another selection, which this one contains, in place."""
        return self.tensor(name) if selection.key == self.selection.key else selection.part(name, self.tensor(name))

    def bytes_of(self, selection: Selection, block: Block) -> NDArray[np.uint8]:
        """Return the bytes of a block of another selection, which this one contains; copied where they lie apart."""
        if selection.key == self.selection.key:
            return self.array(block)
        place, itemsize = block.place, block.place.dtype.itemsize
        start = (block.offset - place.offset) // itemsize
        part = flat_range(self.part(selection, place.name), start, start + block.nbytes // itemsize)
        return part.view(torch.uint8).numpy()

    def arrive(self, number: int, buffer: memoryview, base: HeldVersion | None) -> bool:
        """Take a block, or how it differs from that of ``base``; return whether its bytes have its digest."""
        block = self.blocks[number]
        array = self.array(block)
        if buffer.nbytes == block.nbytes:
            found = digest(array)
        elif base is None:
            return False
        else:
            try:
                found = restore(base.array(block), buffer, block.place.dtype.itemsize, array)
            except ProtocolError:
                return False
        return found == int(self.digests[number])

    def advance(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._wake()

    def abandon(self) -> None:
        self.is_abandoned = True
        self._wake()

    async def changed(self, timeout: float) -> bool:
        """Wait until a block arrives or the version is abandoned; return False if neither happens in time."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait([waiter], timeout=timeout)
            return waiter.done()
        finally:
            if not waiter.done():
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        while self._waiters:
            self._waiters.pop().set_result(None)

    def use(self) -> None:
        """Keep the memory until a matching call of `release`."""
        self._uses += 1

    def release(self) -> None:
        """End one use. The first one is that of the process that made this object."""
        self._uses -= 1
        if self._uses == 0:
            self._on_unused(self)
