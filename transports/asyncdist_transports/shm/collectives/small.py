"""Every collective of small tensors as a `SmallExchange`: the data that each member stages and reads.

`native` asks `small_exchange_for` for the exchange of a call signature. A member stages all blocks that it provides one
after the other: one large copy costs less than leaving a block out. Blocks are copied by address, because making a
view of a block takes longer than copying it.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asyncdist.base.ops import Collective
from asyncdist.kernel.algorithms.schedule import ScheduleOf
from asyncdist.kernel.memory.buffers import view_at
from asyncdist.kernel.memory.reduce_kernels import COPIED_ARRAY_NBYTES, MOST_ARRAY_NBYTES, Arithmetic, on_arrays
from asyncdist.kernel.memory.shared_arena import ALIGNMENT
from asyncdist.kernel.transport.native import CallSignature, PreparedCall
from asyncdist_transports.shm.collectives.slot_table import DONE, LINE, LOCATION, RESULT, SLOTS, SlotTable
from asyncdist_transports.shm.collectives.small_exchange import Bind, Moves, MovesOf, NonUniformBlocks, SmallExchange
from asyncdist_transports.shm.collectives.staging import POSTED, STAGED, head_nbytes

MOST_NBYTES = 256 << 10
"""Most bytes that a member stages, except in an all-reduce. Larger tensors use rounds or zero-copy access.

Up to here staging costs less than a second synchronisation, also for registered tensors. An all-gather between two ranks
takes 15 µs for 64 KiB (35 µs in place), and 29 µs for 256 KiB (48 µs in place).
"""

# Most bytes that one member reduces alone before the work is divided.
_ADDED_NBYTES = 256 << 10

# memmove takes half as long as `copy_` for less than a page. PyDLL keeps the GIL: releasing it takes longer than the copy.
move = ctypes.PyDLL(None).memmove
move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
move.restype = None

Blocks = torch.Tensor | Sequence[torch.Tensor]
"""One block for each member: consecutive in one tensor, or one tensor each."""
Tensors = tuple[Any, ...]
"""The tensors and blocks of a call."""


def every_member_reduces(size: int, nbytes: int) -> bool:
    """Return whether every member of an all-reduce reduces the whole tensor, at most an area at a time.

    Two members gain nothing by dividing the work.
    """
    return size == 2 or nbytes * (size - 1) <= _ADDED_NBYTES


def small_exchange_for(slots: SlotTable, signature: CallSignature, fallback: ScheduleOf | None) -> SmallExchange | None:
    """Return the exchange for calls with a signature; None if they are too large.

    All members decide alike, except in an all-to-all, where only one member may have blocks of equal size;
    ``fallback(signature, number, *tensors)`` continues there.
    """
    small = _SmallCall(slots, signature, fallback)
    if signature.collective is Collective.all_reduce:
        fits = small.nbytes <= slots.area_nbytes and every_member_reduces(slots.size, small.nbytes)
    else:
        fits = small.nbytes * small.blocks <= min(MOST_NBYTES, slots.area_nbytes - small.header)
    return _KINDS[signature.collective](small) if fits else None


class _SmallCall:
    """Calls with one signature. A member stages ``blocks`` blocks after a header of ``header`` bytes."""

    def __init__(self, slots: SlotTable, signature: CallSignature, fallback: ScheduleOf | None) -> None:
        self.slots, self.signature = slots, signature
        self.fallback = None if fallback is None else functools.partial(fallback, signature)
        self.blocks = slots.size if signature.collective in _OF_BLOCKS else 1
        self.header = head_nbytes(slots.size) if signature.collective is Collective.all_to_all else 0
        self.rank, self.size, self.root = slots.rank, slots.size, signature.root
        self.count = signature.count
        self.nbytes = self.count * signature.dtype.itemsize
        self.others = slots.others
        self.result_offset = -(-self.nbytes // ALIGNMENT) * ALIGNMENT
        """Offset in an area, after the staged data, at which a member shows a result."""
        shows = signature.collective is Collective.all_reduce and self.size > 2 and slots.oversubscribed
        self.shares_result = shows and self.result_offset + self.nbytes <= slots.area_nbytes
        self.area_nbytes = self.header + self.blocks * self.nbytes
        """Bytes of its area that a member uses."""
        if self.shares_result:
            self.area_nbytes = self.result_offset + self.nbytes
        elif signature.collective is Collective.barrier:
            self.area_nbytes = 0

    # -- areas ---------------------------------------------------------------------------------

    def staged_block(self, number: int, rank: int, block: int = 0) -> torch.Tensor:
        """Return a block of a member's area as a tensor of the result's shape."""
        signature, count = self.signature, self.count
        area = self.slots.first_half(number, rank, self.header, self.blocks * count, signature.dtype)
        return area[block * count : (block + 1) * count].view(signature.shape)

    def address(self, number: int, rank: int, block: int = 0) -> int:
        """Return the address of a block of a member's area."""
        return self.staged_block(number, rank, block).data_ptr()

    def addresses(self, blocks: Blocks) -> Sequence[int]:
        """Return the addresses of all members' blocks, in one tensor or in several."""
        if isinstance(blocks, torch.Tensor):
            start, nbytes = blocks.data_ptr(), self.nbytes
            return [start + rank * nbytes for rank in range(self.size)]
        return [block.data_ptr() for block in blocks]

    def stage_blocks(self, number: int) -> Callable[[Blocks], None]:
        """Return a function that copies one block for each member into this member's area."""
        to, nbytes, whole = self.address(number, self.rank), self.nbytes, self.size * self.nbytes

        def stage(blocks: Blocks) -> None:
            if isinstance(blocks, torch.Tensor):
                move(to, blocks.data_ptr(), whole)
            else:
                for index, block in enumerate(blocks):
                    move(to + index * nbytes, block.data_ptr(), nbytes)

        return stage

    # -- patterns ------------------------------------------------------------------------------

    def with_all(
        self, moves: MovesOf, goal: int = STAGED, fallback: PreparedCall | None = None, bind: Bind | None = None
    ) -> SmallExchange:
        slots, call = self.slots, self.signature.fingerprint
        return SmallExchange(
            slots, call, self.area_nbytes, moves, self.others, first=goal, goal=goal, fallback=fallback, bind=bind
        )

    def with_root(self, send: MovesOf, read: MovesOf, *, outward: bool) -> SmallExchange:
        """Move data from the root to the others if ``outward``, else from the others to the root."""
        slots, call, at_root = self.slots, self.signature.fingerprint, self.rank == self.root
        # A member that reads nothing has reached its last step at once.
        if at_root == outward:
            return SmallExchange(slots, call, self.area_nbytes, send, (), first=DONE, goal=STAGED)
        sources = self.others if at_root else (slots.members_by_rank[self.root],)
        return SmallExchange(slots, call, self.area_nbytes, read, sources, first=POSTED, goal=STAGED)


# -- reducing -----------------------------------------------------------------------------------------


def _all_reduce(small: _SmallCall) -> SmallExchange:
    """Every member reduces all areas in rank order; where members share cores, the first shows the sum to the others."""
    arithmetic, rank, nbytes = small.signature.arithmetic, small.rank, small.nbytes
    if 0 < nbytes <= MOST_ARRAY_NBYTES and not small.shares_result:
        on = on_arrays(arithmetic, small.signature.dtype)
        if on is not None:
            return _all_reduce_as_arrays(small, *on)
    combine = arithmetic.of_two if small.size == 2 else None

    def moves(number: int) -> Moves:
        to = small.address(number, rank)
        areas = [small.staged_block(number, each) for each in range(small.size)]

        def stage(tensors: Tensors) -> None:
            move(to, tensors[0].data_ptr(), nbytes)

        if small.shares_result:
            return Moves(stage, _found_or_reduced(small, number, areas))
        if combine is None:
            return Moves(stage, lambda tensors: arithmetic.reduce(areas, tensors[0]))
        # This member's own tensor is still in its cache, and is read instead of its area.
        lower, higher = areas
        if rank == 0:
            return Moves(stage, lambda tensors: combine(tensors[0], higher, out=tensors[0]))
        return Moves(stage, lambda tensors: combine(lower, tensors[0], out=tensors[0]))

    return small.with_all(moves)


def _all_reduce_as_arrays(small: _SmallCall, arithmetic: Arithmetic, dtype: type[np.generic]) -> SmallExchange:
    """Every member reduces all areas in rank order into its tensor, as arrays of numpy.

    Copies between views take a fifth of the time of `move`. numpy adds one element in place in the time of a tensor, so
    the areas of less than a page include this member's own.
    """
    nbytes = small.nbytes

    def moves(number: int) -> Moves:
        own = view_at(small.address(number, small.rank), nbytes)
        areas: list[Any] = [
            np.frombuffer(view_at(small.address(number, each), nbytes), dtype) for each in range(small.size)
        ]
        # Functions in C, which enter no Python frame.
        stage = functools.partial(operator.setitem, own, slice(None))
        if small.size == 2:
            combine, (lower, higher) = arithmetic.combine, areas
            if nbytes <= COPIED_ARRAY_NBYTES:
                return Moves(stage, functools.partial(combine, lower, higher))
            # This member's own array is still in its cache, and is read instead of its area.
            if small.rank == 0:
                return Moves(stage, lambda target: combine(target, higher, target))
            return Moves(stage, lambda target: combine(lower, target, target))
        return Moves(stage, functools.partial(arithmetic.reduce, areas))

    def bind(tensor: torch.Tensor) -> tuple[memoryview, Any]:
        view = view_at(tensor.data_ptr(), nbytes)
        return view, np.frombuffer(view, dtype)

    return small.with_all(moves, bind=bind)


def _found_or_reduced(small: _SmallCall, number: int, areas: Sequence[torch.Tensor]) -> Callable[[Tensors], None]:
    """Return a function that copies the sum from a member that shows it, or else computes and shows it.

    Four ranks on two cores take 35 µs for 4 bytes (41 µs if all reduce), and 43 µs for 16 KiB (77 µs). The order of the
    reduction is the rank order in every case.
    """
    slots, arithmetic, nbytes = small.slots, small.signature.arithmetic, small.nbytes
    result_offset, count, dtype = small.result_offset, small.count, small.signature.dtype
    staged_block = [
        slots.first_half(number, each, result_offset, count, dtype).view(small.signature.shape)
        for each in range(small.size)
    ]
    own_result = staged_block[small.rank]
    peer_results = [(member, staged_block[member.rank].data_ptr()) for member in small.others]
    words, light, slot = slots.words, slots.fence.light, number % SLOTS
    at, own_address = slot * LINE + RESULT, own_result.data_ptr()

    def read(tensors: Tensors) -> None:
        now, own = slots.last_numbers[slot], tensors[0].data_ptr()
        for member, address in peer_results:
            if member.words[at] == now:
                # The word is loaded before the result.
                light()
                move(own, address, nbytes)
                return
        arithmetic.reduce(areas, own_result)
        # The result is stored before the word.
        light()
        words[at] = now
        move(own, own_address, nbytes)

    return read


def _reduce(small: _SmallCall) -> SmallExchange:
    arithmetic, nbytes = small.signature.arithmetic, small.nbytes

    def send(number: int) -> Moves:
        to = small.address(number, small.rank)
        return Moves(lambda tensors: move(to, tensors[0].data_ptr(), nbytes), None)

    def read(number: int) -> Moves:
        areas = [small.staged_block(number, member.rank) for member in small.others]
        return Moves(None, lambda tensors: arithmetic.reduce([tensors[0], *areas], tensors[0]))

    return small.with_root(send, read, outward=False)


def _reduce_scatter(small: _SmallCall) -> SmallExchange:
    arithmetic = small.signature.arithmetic

    def moves(number: int) -> Moves:
        stage_blocks = small.stage_blocks(number)
        areas = [small.staged_block(number, rank, small.rank) for rank in range(small.size)]
        return Moves(lambda tensors: stage_blocks(tensors[1]), lambda tensors: arithmetic.reduce(areas, tensors[0]))

    return small.with_all(moves)


# -- moving -------------------------------------------------------------------------------------------


def _broadcast(small: _SmallCall) -> SmallExchange:
    nbytes = small.nbytes

    def send(number: int) -> Moves:
        to = small.address(number, small.rank)
        return Moves(lambda tensors: move(to, tensors[0].data_ptr(), nbytes), None)

    def read(number: int) -> Moves:
        source = small.address(number, small.root)
        return Moves(None, lambda tensors: move(tensors[0].data_ptr(), source, nbytes))

    return small.with_root(send, read, outward=True)


def _all_gather(small: _SmallCall) -> SmallExchange:
    nbytes = small.nbytes

    def moves(number: int) -> Moves:
        own = small.address(number, small.rank)
        areas = [small.address(number, rank) for rank in range(small.size)]

        def stage(tensors: Tensors) -> None:
            move(own, tensors[1].data_ptr(), nbytes)

        def read(tensors: Tensors) -> None:
            for to, area in zip(small.addresses(tensors[0]), areas, strict=True):
                move(to, area, nbytes)

        return Moves(stage, read)

    return small.with_all(moves)


def _gather(small: _SmallCall) -> SmallExchange:
    rank, nbytes = small.rank, small.nbytes

    def send(number: int) -> Moves:
        to = small.address(number, rank)
        return Moves(lambda tensors: move(to, tensors[1].data_ptr(), nbytes), None)

    def read(number: int) -> Moves:
        areas = [(member.rank, small.address(number, member.rank)) for member in small.others]

        def collect(tensors: Tensors) -> None:
            blocks, tensor = tensors
            locations = small.addresses(blocks)
            # The root's own block comes first: it may overlap the memory of another block.
            move(locations[rank], tensor.data_ptr(), nbytes)
            for each, area in areas:
                move(locations[each], area, nbytes)

        return Moves(None, collect)

    return small.with_root(send, read, outward=False)


def _scatter(small: _SmallCall) -> SmallExchange:
    rank, nbytes = small.rank, small.nbytes

    def send(number: int) -> Moves:
        stage_blocks = small.stage_blocks(number)

        def hand_out(tensors: Tensors) -> None:
            tensor, blocks = tensors
            stage_blocks(blocks)
            move(tensor.data_ptr(), small.addresses(blocks)[rank], nbytes)

        return Moves(hand_out, None)

    def read(number: int) -> Moves:
        source = small.address(number, small.root, rank)
        return Moves(None, lambda tensors: move(tensors[0].data_ptr(), source, nbytes))

    return small.with_root(send, read, outward=True)


def _all_to_all(small: _SmallCall) -> SmallExchange:
    """A table holds the element counts for each member, and the staged blocks' locations for members that use rounds."""
    slots, size, rank, nbytes = small.slots, small.size, small.rank, small.nbytes

    def moves(number: int) -> Moves:
        stage_blocks = small.stage_blocks(number)
        locations = [slots.location_of(number, rank, small.header + each * nbytes) for each in range(size)]
        header_words = torch.tensor([small.count] * size + locations, dtype=torch.int64, device="cpu")
        table = slots.first_half(number, rank, 0, 2 * size, torch.int64).data_ptr()
        areas = [small.address(number, each, rank) for each in range(size)]
        at = number % SLOTS * LINE + LOCATION
        expected = [
            (member.words, slots.location_of(number, member.rank, small.header), slots.table(number, member.rank))
            for member in small.others
        ]

        def stage(tensors: Tensors) -> None:
            move(table, header_words.data_ptr(), header_words.nbytes)
            stage_blocks(tensors[1])

        def read(tensors: Tensors) -> None:
            for words, location, sent in expected:
                if words[at] != location or sent[rank] != small.count:
                    raise NonUniformBlocks
            for to, area in zip(small.addresses(tensors[0]), areas, strict=True):
                move(to, area, nbytes)

        return Moves(stage, read, slots.location_of(number, rank, small.header))

    return small.with_all(moves, fallback=small.fallback)


def _barrier(small: _SmallCall) -> SmallExchange:
    return small.with_all(lambda number: Moves(None, lambda tensors: None), POSTED)


_OF_BLOCKS = {Collective.reduce_scatter, Collective.scatter, Collective.all_to_all}
_KINDS: dict[Collective, Callable[[_SmallCall], SmallExchange]] = {
    Collective.all_reduce: _all_reduce,
    Collective.reduce: _reduce,
    Collective.reduce_scatter: _reduce_scatter,
    Collective.broadcast: _broadcast,
    Collective.all_gather: _all_gather,
    Collective.gather: _gather,
    Collective.scatter: _scatter,
    Collective.all_to_all: _all_to_all,
    Collective.barrier: _barrier,
}
