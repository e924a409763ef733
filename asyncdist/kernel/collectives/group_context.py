"""Used to prepare every call: the context of the group, the fingerprint, and the division into parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncdist.base.ops import Collective, ReduceOp, Reduction
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms.selection import Model, choose
from asyncdist.kernel.collectives.arguments import whole_number_of
from asyncdist.kernel.collectives.call_plan import Arrange, LinkPlan, MemoryPlan, OverLinks
from asyncdist.kernel.collectives.hierarchical import HierarchicalCollectives
from asyncdist.kernel.collectives.recorded import Form, Record, RecordedCall
from asyncdist.kernel.memory.buffers import Memory, Scratch, TensorBlocks, dtype_number
from asyncdist.kernel.memory.reduce_kernels import Arithmetic, Fold
from asyncdist.kernel.transport.native import CallSignature, Native, PreparedCall
from asyncdist.kernel.transport.wire_format import Fingerprint, shape_checksum

Blocks = Sequence[Memory] | TensorBlocks

_SMALL = frozenset({Collective.all_reduce, Collective.all_reduce_coalesced, Collective.barrier})
_MOST_SMALL_NBYTES = 64 << 10
"""Bytes of the largest of these calls for which many ranks that share memory and cores use links."""


class Lane(NamedTuple):
    """One of ``lanes`` parts of a call, which travel over different connections to the same peer."""

    number: int = 0
    lanes: int = 1

    def of(self, memory: Memory) -> Memory:
        """Return the part of a memory."""
        return memory if self.lanes == 1 else TensorBlocks.split(memory, self.lanes)[self.number]

    def of_each(self, blocks: Blocks) -> Blocks:
        """Return the part of each block. Block ``i`` of it belongs to rank ``i``, like block ``i`` of the whole."""
        return blocks if self.lanes == 1 else [self.of(blocks[rank]) for rank in range(len(blocks))]

    def of_large(self, blocks: Blocks, nbytes: int) -> Sequence[Memory | None] | TensorBlocks:
        """Return the part of each block that has ``nbytes`` bytes. Other blocks are in the first part, and None elsewhere.

        So two ranks agree on the parts of a block between them, without knowledge of the other blocks.
        """
        if self.lanes == 1:
            return blocks
        each = [blocks[rank] for rank in range(len(blocks))]
        return [self.of(block) if block.nbytes >= nbytes else None if self.number else block for block in each]


@dataclass(frozen=True, slots=True, eq=False)
class GroupContext:
    """The calling rank: its rank and size in the group, and the settings of the world.

    Attributes:
        window: Number of parts that run at once.
        native: Runs whole collectives without links; None if the group has no such transport.
        hierarchical: Combines native collectives and links; None unless the group spans several hosts.
    """

    rank: int
    size: int
    config: Config
    model: Model
    forced: dict[str, str]
    scratch: Scratch
    window: int = 2
    native: Native | None = None
    hierarchical: HierarchicalCollectives | None = None

    def peer(self, rank: int, what: str) -> int:
        """Return ``rank``; raise UsageError if the group has no such rank."""
        if type(rank) is not int:
            rank = whole_number_of(what, rank)
        if not 0 <= rank < self.size:
            raise UsageError(f"{what}={rank} is not a rank of the group, which has {self.size}")
        return rank

    def other(self, rank: int, what: str) -> int:
        """Return ``rank``; raise UsageError unless it is another rank of the group."""
        if self.peer(rank, what) == self.rank:
            raise UsageError(f"{what}={rank} is this rank itself: a message to oneself is a copy")
        return rank

    # -- plans ---------------------------------------------------------------------------------

    def in_memory(self, signature: CallSignature, nbytes: int, arrange: Arrange | None = None) -> MemoryPlan | None:
        """Return the plan of a call in memory that all members reach; None if the collective uses links."""
        # The name of a member of an enumeration takes a Python frame.
        native, collective = self.native, signature.collective
        if native is None or (self.forced and collective.name.removesuffix("_coalesced") in self.forced):
            return None
        # There each of P ranks reads P words, and those that share a core take turns.
        if nbytes <= _MOST_SMALL_NBYTES and collective in _SMALL and self.model.share(self.size) > 1:
            return None
        call = native.prepare(signature)
        if arrange is None:
            return MemoryPlan(signature.fingerprint, nbytes, call)
        return MemoryPlan(signature.fingerprint, nbytes, lambda number, *tensors: call(number, *arrange(*tensors)))

    def hierarchical_for(self, collective: str) -> HierarchicalCollectives | None:
        """Return the hierarchical collectives; None if the collective uses links only. A forced algorithm does."""
        return None if collective in self.forced else self.hierarchical

    def lanes(self, nbytes: int) -> list[Lane]:
        """Return the parts of a call that sends messages of ``nbytes`` bytes: one for each lane if these are large."""
        count = self.config.lanes if nbytes >= self.config.stripe_nbytes else 1
        return [Lane(number, count) for number in range(count)]

    def recorded(
        self,
        call: int,
        nbytes: int,
        records: Sequence[Record],
        arguments: Sequence[Any],
        kernels: Arithmetic | None = None,
        *,
        scratch: Sequence[Form] = (),
        arrange: Arrange | None = None,
    ) -> LinkPlan:
        """Return the plan of a call over links whose steps are recorded; see `RecordedCall`."""
        recorded = RecordedCall(records, arguments, kernels, scratch, self.scratch)
        fold = None if kernels is None else kernels.fold
        begin = recorded.begin if arrange is None and self.native is None and len(records) == 1 else None
        return self.in_parts(call, nbytes, recorded.schedules, fold, arrange=arrange, begin=begin)

    def in_parts(
        self,
        call: int,
        nbytes: int,
        parts: OverLinks,
        fold: Fold | None = None,
        window: int = 0,
        *,
        arrange: Arrange | None = None,
        begin: PreparedCall | None = None,
    ) -> LinkPlan:
        """Return the plan of a call over links in ``parts(*tensors)``, of which at most ``window`` run at once."""
        window = window or (self.window if self.hierarchical is None else self.hierarchical.window)
        run = parts if arrange is None else lambda *tensors: parts(*arrange(*tensors))
        return LinkPlan(call, nbytes, run, fold, window, self.native, begin)

    def choose(self, collective: str, nbytes: int, *, contiguous: bool = True, widening: int = 1) -> str:
        """Return the schedule for a size."""
        model, forced = self.model, self.forced
        return choose(
            collective, nbytes, self.size, model=model, forced=forced, contiguous=contiguous, widening=widening
        )


def fingerprint(
    collective: Collective,
    dtype: torch.dtype | None,
    shape: tuple[int, ...] | int,
    op: Reduction | None,
    root: int | None,
    layout: tuple[int, ...] = (),
) -> int:
    """Return the fingerprint of this rank's call; ``layout`` describes the blocks if the shape does not."""
    count = shape if isinstance(shape, int) else torch.Size(shape).numel()
    form = layout or (None if isinstance(shape, int) else shape)
    return Fingerprint(
        collective=collective,
        dtype=0 if dtype is None else dtype_number(dtype),
        reduction=0 if op is None else (op if isinstance(op, ReduceOp) else ReduceOp.PREMUL_SUM).value,
        root=0 if root is None else root + 1,
        count=count & 0xFFFFFF,
        shape=0 if form is None else shape_checksum(form),
    ).pack()


def segments(memory: Memory, count: int) -> Iterator[Memory]:
    """Cut memory into segments of ``count`` elements; the last one may be shorter."""
    for start in range(0, max(1, memory.count), count):
        yield memory.slice(start, min(memory.count, start + count))
