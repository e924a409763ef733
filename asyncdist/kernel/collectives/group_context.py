"""What the preparation of every call uses: the context of the group, the fingerprint, and the cutting into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncdist.base.ops import Collective, ReduceOp, Reduction
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.algorithms.selection import Model, choose
from asyncdist.kernel.collectives.arguments import whole_number_of
from asyncdist.kernel.collectives.call_plan import LinkPlan, MemoryPlan
from asyncdist.kernel.collectives.hierarchical import HierarchicalCollectives
from asyncdist.kernel.collectives.recorded import KEPT_NBYTES, RecordedCall, Recording
from asyncdist.kernel.memory.buffers import Memory, Scratch, TensorBlocks, block_memories, dtype_number, flat_memory
from asyncdist.kernel.memory.reduce_kernels import Fold
from asyncdist.kernel.transport.native import CallSignature, Native
from asyncdist.kernel.transport.wire_format import Fingerprint, shape_checksum

Parts = Iterable[Schedule]
Cut = Callable[[Any], Sequence[Memory] | TensorBlocks]
"""``cut(value)`` returns the blocks of a list of tensors, or of one tensor that holds all blocks."""


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

    def uses_links(self, collective: str) -> bool:
        """Return whether a collective only sends messages. A forced algorithm does."""
        return collective in self.forced or (self.native is None and self.hierarchical is None)

    def in_memory(
        self, signature: CallSignature, nbytes: int, arrange: Callable[..., tuple[Any, ...]] | None = None
    ) -> MemoryPlan | None:
        """Return the plan of a call in memory that all members reach; None if the collective uses links.

        ``arrange(*tensors)`` returns what the native collective takes instead of the tensors of a call.
        """
        # The name of a member of an enumeration takes a Python frame.
        if self.native is None or (self.forced and signature.collective.name.removesuffix("_coalesced") in self.forced):
            return None
        call = self.native.prepare(signature)
        if arrange is None:
            return MemoryPlan(signature.fingerprint, nbytes, call)
        return MemoryPlan(signature.fingerprint, nbytes, lambda number, *tensors: call(number, *arrange(*tensors)))

    def hierarchical_for(self, collective: str) -> HierarchicalCollectives | None:
        """Return the hierarchical collectives; None if the collective uses links only. A forced algorithm does."""
        return None if collective in self.forced else self.hierarchical

    def is_striped(self, nbytes: int) -> bool:
        """Return whether a message of ``nbytes`` bytes is so large that it is cut into one part for each lane."""
        return self.config.lanes > 1 and nbytes >= self.config.stripe_nbytes

    def is_recorded(self, nbytes: int, *, keeps_scratch: bool = False) -> bool:
        """Return whether the steps of a call over links are recorded: it has one part.

        ``keeps_scratch`` says that its recording keeps scratch of ``nbytes`` bytes.
        """
        return not (self.is_striped(nbytes) or (keeps_scratch and nbytes > KEPT_NBYTES))

    def recorded(
        self,
        call: int,
        nbytes: int,
        record: Callable[..., Recording],
        arguments: Sequence[Any],
        fold: Fold | None = None,
    ) -> LinkPlan:
        """Return the plan of a call over links whose steps are recorded; see `RecordedCall`."""
        return LinkPlan(call, nbytes, RecordedCall(record, arguments, fold).schedule, fold=fold, native=self.native)

    def in_parts(
        self, call: int, nbytes: int, parts: Callable[..., Parts], fold: Fold | None = None, window: int = 4
    ) -> LinkPlan:
        """Return the plan of a call over links in ``parts(*tensors)``, of which at most ``window`` run at once."""
        return LinkPlan(call, nbytes, None, parts, fold, window, self.native)

    def blocks(self, value: Any) -> list[Memory]:
        """Return the memory of one block for each rank: a list of tensors, a tensor in equal parts, or None."""
        return block_memories(value, self.size)

    def equal_blocks(self, tensor: torch.Tensor) -> TensorBlocks:
        """Return the memory of a contiguous tensor in one block for each rank."""
        return TensorBlocks.split(flat_memory(tensor), self.size)

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


def stripes(group: GroupContext, memory: Memory, *, blocks: int = 1) -> Iterable[Memory]:
    """Cut memory, which is sent in ``blocks`` messages, into one part per lane if these are large enough."""
    if not group.is_striped(memory.nbytes // blocks):
        return (memory,)
    parts = TensorBlocks.split(memory, group.config.lanes)
    return [parts[lane] for lane in range(group.config.lanes)]


def segments(memory: Memory, count: int) -> Iterator[Memory]:
    """Cut memory into segments of ``count`` elements; the last one may be shorter."""
    for start in range(0, max(1, memory.count), count):
        yield memory.slice(start, min(memory.count, start + count))


def striped_blocks(
    group: GroupContext, blocks: Sequence[Memory] | TensorBlocks
) -> Iterable[list[Memory] | TensorBlocks]:
    """Cut every block into one part per lane if one of them is large enough.

    Block ``i`` of each part belongs to rank ``i``, like block ``i`` of the whole.
    """
    if not group.is_striped(max(blocks[rank].nbytes for rank in range(group.size))):
        return (blocks,) if isinstance(blocks, TensorBlocks) else (list(blocks),)
    return cut_each(group, blocks)


def cut_each(group: GroupContext, blocks: Sequence[Memory] | TensorBlocks) -> list[list[Memory]]:
    """Cut every block into one part per lane; return the blocks of each part."""
    lanes = group.config.lanes
    cut = [TensorBlocks.split(blocks[rank], lanes) for rank in range(group.size)]
    return [[block[lane] for block in cut] for lane in range(lanes)]


def cut_large(group: GroupContext, blocks: Sequence[Memory] | TensorBlocks) -> list[list[Memory | None]]:
    """Cut each block that is large enough into one part per lane; return the blocks of each part.

    Any other block is in the first part only, and None in the others. So two ranks agree on the parts of a block between
    them, without knowledge of the other blocks.
    """
    lanes = range(group.config.lanes)

    def parts_of(block: Memory) -> Sequence[Memory | None] | TensorBlocks:
        if group.is_striped(block.nbytes):
            return TensorBlocks.split(block, len(lanes))
        return [block, *[None] * (len(lanes) - 1)]

    cut = [parts_of(blocks[rank]) for rank in range(group.size)]
    return [[parts[lane] for parts in cut] for lane in lanes]
