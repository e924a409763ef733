"""Prepares the collectives that move data: which schedule, over which memory, with which fingerprint.

Each function takes the `GroupContext` of the calling rank and the arguments of a call, with contiguous tensors and peers as
ranks in the group. It checks the arguments and returns a `CallPlan`, which also runs later calls with tensors of the same
dtypes and shapes. Large tensors are cut into parts: one for each lane, or segments if a part needs separate
memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from asyncdist.base.ops import Collective
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import pairwise, recursive_doubling, tree
from asyncdist.kernel.algorithms.schedule import Recv, Schedule, Send
from asyncdist.kernel.collectives import validation
from asyncdist.kernel.collectives.call_plan import CallPlan
from asyncdist.kernel.collectives.first_rail import GATHERS
from asyncdist.kernel.collectives.group_context import (
    Cut,
    GroupContext,
    cut_large,
    fingerprint,
    segments,
    striped_blocks,
    stripes,
)
from asyncdist.kernel.collectives.recorded import LocalCopy, Recording, recorded_blocks
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.memory.buffers import (
    NOTHING,
    Memory,
    copy_overlapping_inputs,
    copy_overlapping_rows,
    dtype_number,
    flat_memory,
)
from asyncdist.kernel.transport.native import CallSignature
from asyncdist.kernel.transport.wire_format import RUNS

# -- movement -------------------------------------------------------------------------------------


def broadcast(group: GroupContext, tensor: Any, root: int) -> CallPlan:
    """Copy the root's tensor to every rank."""
    group.peer(root, "src")
    tensor = validation.single(tensor)
    count, nbytes = tensor.numel(), tensor.nbytes
    call = fingerprint(Collective.broadcast, tensor.dtype, tuple(tensor.shape), None, root)
    signature = CallSignature(Collective.broadcast, call, tensor.dtype, (count,), root=root)
    if (plan := group.in_memory(signature, nbytes)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("broadcast")) is not None:
        return group.in_parts(call, nbytes, lambda tensor: hierarchical.broadcast(flat_memory(tensor), root, call))
    in_tree = group.choose("broadcast", nbytes) == "tree"
    segment_count = max(1, group.config.segment_nbytes // tensor.itemsize)
    if group.is_recorded(nbytes) and (in_tree or count <= segment_count):
        run = tree.broadcast if in_tree else tree.chain_broadcast
        return group.recorded(call, nbytes, lambda memory: run(group.rank, group.size, root, memory), [tensor])

    def parts(tensor: torch.Tensor) -> Iterable[Schedule]:
        memory = flat_memory(tensor)
        if in_tree:
            return (tree.broadcast(group.rank, group.size, root, stripe) for stripe in stripes(group, memory))
        each = segments(memory, segment_count)
        return (tree.chain_broadcast(group.rank, group.size, root, segment) for segment in each)

    return group.in_parts(call, nbytes, parts, window=max(4, group.config.lanes))


def all_gather_list(group: GroupContext, outputs: Any, tensor: Any) -> CallPlan:
    """Gather every rank's tensor into a list."""
    blocks = validation.listed(outputs, group.size, "tensor_list")
    return _all_gather(
        group,
        [(blocks, tensor)],
        lambda outputs, tensor: [(group.blocks(outputs), flat_memory(tensor))],
        arguments=(outputs, tensor),
    )


def all_gather_coalesced(group: GroupContext, tensor_lists: Any, tensors: Any) -> CallPlan:
    """Gather several tensors as one operation: rank ``r``'s ``tensors[i]`` into ``tensor_lists[r][i]``."""
    validation.check_length(tensor_lists, group.size, "output_tensor_lists")
    if not tensors or any(len(row) != len(tensors) for row in tensor_lists):
        raise UsageError(f"each of output_tensor_lists needs {len(tensors)} tensors, and one at least, as the input")

    def rows_of(tensor_lists: Any, tensors: Any) -> list[tuple[Any, Memory]]:
        columns = zip(*tensor_lists, strict=True)
        return [(group.blocks(column), flat_memory(tensor)) for column, tensor in zip(columns, tensors, strict=True)]

    columns = [
        validation.listed(column, group.size, "output_tensor_lists") for column in zip(*tensor_lists, strict=True)
    ]

    def arrange(tensor_lists: Any, tensors: Any) -> tuple[Any, ...]:
        columns = [list(column) for column in zip(*tensor_lists, strict=True)]
        return (columns[0], tensors[0]) if len(columns) == 1 else (columns, tensors)

    return _all_gather(group, list(zip(columns, tensors, strict=True)), rows_of, arrange=arrange)


def all_gather_single(group: GroupContext, output: Any, tensor: Any) -> CallPlan:
    """Gather every rank's tensor into one tensor, concatenated in group order."""
    blocks = validation.even(output, group.size, "output")
    return _all_gather(
        group,
        [(blocks, tensor)],
        lambda output, tensor: [(group.equal_blocks(output), flat_memory(tensor))],
        arguments=(output, tensor),
        contiguous=True,
    )


def _all_gather(
    group: GroupContext,
    rows: Sequence[tuple[Sequence[torch.Tensor], Any]],
    rows_of: Callable[[Any, Any], list[tuple[Any, Memory]]],
    *,
    arguments: tuple[Any, ...] = (),
    contiguous: bool = False,
    arrange: Callable[..., tuple[Any, ...]] | None = None,
) -> CallPlan:
    """Gather every rank's input into the blocks of every rank, for each row (blocks, own input).

    ``arguments`` are those of a call with one row: the blocks, and the own input. See `GroupContext.in_memory` for
    ``arrange``.
    """
    counts: list[list[int]] = []
    layout: list[int] = []
    for blocks, own in rows:
        count, dtype, block = validation.single(own).numel(), own.dtype, blocks[group.rank]
        if block.numel() != count or block.dtype is not dtype:
            raise UsageError(
                f"this rank gives {count} x {dtype}, but its block of the output has {block.numel()} x {block.dtype}"
            )
        counts.append([block.numel() for block in blocks])
        layout += [dtype_number(dtype), *counts[-1]]
    # Parts of blocks that are cut for the lanes are not contiguous.
    contiguous = contiguous and not group.is_striped(max(counts[0]) * rows[0][1].itemsize)
    dtype, total = rows[0][1].dtype, sum(map(sum, counts))
    collective = Collective.all_gather if len(rows) == 1 else Collective.all_gather_coalesced
    nbytes, equal = total * dtype.itemsize, len(rows) == 1 and len(set(counts[0])) == 1
    over_links, hierarchical = group.uses_links("all_gather"), group.hierarchical_for("all_gather")
    if over_links and _all_gather_algorithm(group, nbytes, contiguous) == "doubling":
        layout.append(RUNS)
    call = fingerprint(collective, dtype, total, None, None, tuple(layout))
    sizes = () if equal else tuple(count for row in counts for count in row)
    signature = CallSignature(collective, call, dtype, (counts[0][group.rank],), sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if over_links and arguments and group.is_recorded(nbytes):
        return group.recorded(call, nbytes, _recorded_all_gather(group, nbytes, counts[0], contiguous), arguments)
    row_parts = [
        _all_gather_row(group, sum(row) * own.itemsize, contiguous) for row, (_, own) in zip(counts, rows, strict=True)
    ]

    def parts(outputs: Any, inputs: Any) -> Iterable[Schedule]:
        rows = copy_overlapping_rows(rows_of(outputs, inputs), group.size, group.rank)
        for blocks, own in rows:
            blocks[group.rank].tensor.copy_(own.tensor)
        if hierarchical is not None:
            return hierarchical.all_gather([blocks for blocks, _ in rows], call, equal=equal)
        return (part for (blocks, _), of_row in zip(rows, row_parts, strict=True) for part in of_row(blocks))

    window = max(2, group.config.lanes) if hierarchical is None else hierarchical.window
    return group.in_parts(call, nbytes, parts, window=window)


def _all_gather_row(group: GroupContext, nbytes: int, contiguous: bool) -> Callable[[Any], Iterator[Schedule]]:
    """Return a function that gathers the blocks of one row over links, in one part for each lane."""
    run = GATHERS[_all_gather_algorithm(group, nbytes, contiguous)]
    return lambda blocks: (run(group.rank, group.size, stripe) for stripe in striped_blocks(group, blocks))


def _all_gather_algorithm(group: GroupContext, nbytes: int, contiguous: bool) -> str:
    """Return the schedule of one row over links."""
    return group.choose("all_gather", nbytes, contiguous=contiguous)


def _recorded_all_gather(
    group: GroupContext, nbytes: int, counts: Sequence[int], contiguous: bool
) -> Callable[..., Recording]:
    rank, size, run = group.rank, group.size, GATHERS[_all_gather_algorithm(group, nbytes, contiguous)]

    def record(output: Memory | list[Memory], own: Memory) -> Recording:
        blocks = recorded_blocks(output, counts)
        yield LocalCopy(blocks[rank], own)
        yield from run(rank, size, blocks)

    return record


def gather(group: GroupContext, gather_list: Any, tensor: Any, root: int) -> CallPlan:
    """Gather every rank's tensor in the root's list."""
    group.peer(root, "dst")
    if group.rank == root:
        blocks = validation.listed(gather_list, group.size, "gather_list on the destination rank")
        validation.same_sizes(blocks, tensor, "gather_list")
    elif gather_list:
        raise UsageError(f"gather_list belongs to the destination, rank {root} of the group: pass None elsewhere")
    return _gather(group, gather_list, validation.single(tensor), root)


def gather_single(group: GroupContext, output: Any, tensor: Any, root: int) -> CallPlan:
    """Gather every rank's tensor in the root's output, concatenated in group order."""
    group.peer(root, "dst")
    if group.rank == root:
        if output is None:
            raise UsageError("gather_tensor on the destination rank is missing")
        validation.same_sizes(validation.even(output, group.size, "gather_tensor"), tensor, "gather_tensor")
    return _gather(group, output, validation.single(tensor), root)


def _gather(group: GroupContext, output: Any, tensor: torch.Tensor, root: int) -> CallPlan:
    count, nbytes = tensor.numel(), tensor.nbytes * group.size
    call = fingerprint(Collective.gather, tensor.dtype, (count,), None, root)
    signature = CallSignature(Collective.gather, call, tensor.dtype, (count,), root=root)
    if (plan := group.in_memory(signature, nbytes)) is not None:
        return plan

    def record(output: Any, own: Memory) -> Recording:
        blocks = recorded_blocks(output, [count] * group.size) if group.rank == root else []
        if group.rank == root:
            yield LocalCopy(blocks[root], own)
        yield from pairwise.gather(group.rank, group.size, root, own, blocks)

    return group.recorded(call, nbytes, record, [output, tensor])


def scatter(group: GroupContext, tensor: Any, scatter_list: Any, root: int) -> CallPlan:
    """Give each rank its tensor of the root's list."""
    group.peer(root, "src")
    tensor = validation.single(tensor)
    if group.rank == root:
        validation.same_sizes(
            validation.listed(scatter_list, group.size, "scatter_list on the source rank"), tensor, "scatter_list"
        )
    elif scatter_list:
        raise UsageError(f"scatter_list belongs to the source, rank {root} of the group: pass None elsewhere")
    count, nbytes = tensor.numel(), tensor.nbytes * group.size
    call = fingerprint(Collective.scatter, tensor.dtype, (count,), None, root)
    signature = CallSignature(Collective.scatter, call, tensor.dtype, (count,), root=root)
    if (plan := group.in_memory(signature, nbytes)) is not None:
        return plan

    def record(memory: Memory, scatter_list: Any) -> Recording:
        blocks = recorded_blocks(scatter_list, [count] * group.size) if group.rank == root else []
        if group.rank == root:
            yield LocalCopy(memory, blocks[root])
        yield from pairwise.scatter(group.rank, group.size, root, memory, blocks)

    return group.recorded(call, nbytes, record, [tensor, scatter_list])


def all_to_all_lists(group: GroupContext, output_list: Any, input_list: Any) -> CallPlan:
    """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``."""
    incoming = validation.listed(output_list, group.size, "output_tensor_list")
    outgoing = validation.listed(input_list, group.size, "input_tensor_list")
    counts = [block.numel() for block in incoming], [block.numel() for block in outgoing]
    return _all_to_all(group, output_list, input_list, *counts, group.blocks, group.blocks)


def all_to_all_single(
    group: GroupContext, output: Any, tensor: Any, output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None
) -> CallPlan:
    """Exchange parts of one tensor, cut along the first dimension."""
    incoming = validation.split_counts(output, output_sizes, group.size, "output")
    outgoing = validation.split_counts(tensor, input_sizes, group.size, "input")
    cuts = _cut_by(incoming), _cut_by(outgoing)

    def arrange(output: torch.Tensor, tensor: torch.Tensor) -> tuple[Any, ...]:
        return output.view(-1).split(incoming), tensor.view(-1).split(outgoing)

    equal = len({*incoming, *outgoing}) == 1
    return _all_to_all(group, output, tensor, incoming, outgoing, *cuts, None if equal else arrange)


def _cut_by(counts: Sequence[int]) -> Cut:
    bounds = [0, *itertools.accumulate(counts)]
    return lambda tensor: [flat_memory(tensor).slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def _all_to_all(
    group: GroupContext,
    output: Any,
    tensor: Any,
    incoming_counts: Sequence[int],
    outgoing_counts: Sequence[int],
    cut_incoming: Cut,
    cut_outgoing: Cut,
    arrange: Callable[..., tuple[Any, ...]] | None = None,
) -> CallPlan:
    """Send block ``i`` of the input to rank ``i``, and receive its block for this rank into block ``i`` of the output."""
    own_in, own_out = incoming_counts[group.rank], outgoing_counts[group.rank]
    incoming_dtype, dtype = ((each if isinstance(each, torch.Tensor) else each[0]).dtype for each in (output, tensor))
    if own_in != own_out or incoming_dtype is not dtype:
        raise UsageError(
            f"this rank sends itself {own_out} x {dtype}, but its block of the output has {own_in} x {incoming_dtype}"
        )
    call = fingerprint(Collective.all_to_all, dtype, 0, None, None)
    nbytes = sum(outgoing_counts) * dtype.itemsize
    equal = len({*incoming_counts, *outgoing_counts}) == 1
    sizes = () if equal else (*incoming_counts, *outgoing_counts)
    signature = CallSignature(Collective.all_to_all, call, dtype, (own_out,), sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if group.is_recorded(max(nbytes, sum(incoming_counts) * dtype.itemsize)):

        def record(output: Any, tensor: Any) -> Recording:
            incoming = recorded_blocks(output, incoming_counts)
            outgoing = recorded_blocks(tensor, outgoing_counts)
            yield LocalCopy(incoming[group.rank], outgoing[group.rank])
            yield from pairwise.all_to_all(group.rank, group.size, outgoing, incoming)

        return group.recorded(call, nbytes, record, [output, tensor])

    def parts(output: Any, tensor: Any) -> Iterable[Schedule]:
        incoming, own = cut_incoming(output), {group.rank: group.rank}
        outgoing = copy_overlapping_inputs(cut_outgoing(tensor), incoming, own)
        incoming[group.rank].tensor.copy_(outgoing[group.rank].tensor)
        return [
            pairwise.all_to_all(group.rank, group.size, sent, received)
            for sent, received in zip(cut_large(group, outgoing), cut_large(group, incoming), strict=True)
        ]

    return group.in_parts(call, nbytes, parts, window=group.config.lanes)


def barrier(group: GroupContext) -> CallPlan:
    """Complete when every rank has called the barrier."""
    call = fingerprint(Collective.barrier, None, 0, None, None)
    if (plan := group.in_memory(CallSignature(Collective.barrier, call, torch.uint8, (0,)), 0)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("barrier")) is not None:
        return group.in_parts(call, 0, lambda: (hierarchical.barrier(call),))
    return group.recorded(call, 0, lambda: recursive_doubling.barrier(group.rank, group.size, NOTHING, NOTHING), [])


def monitored_barrier(group: GroupContext) -> Plan:
    """Rank 0 receives from every rank before it releases any rank, so that it can name the missing ranks."""

    def part() -> Schedule:
        others = [rank for rank in range(group.size) if rank != 0]
        if group.rank != 0:
            yield (Send(0, NOTHING),)
            yield (Recv(0, NOTHING),)
        elif others:
            yield tuple(Recv(rank, NOTHING) for rank in others)
            yield tuple(Send(rank, NOTHING) for rank in others)

    return Plan((part(),), fingerprint(Collective.monitored_barrier, None, 0, None, None))
