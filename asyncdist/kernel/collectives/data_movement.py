"""Prepares the collectives that move data: which schedule, over which memory, with which fingerprint.

Each function takes the `GroupContext` of the calling rank and the arguments of a call, with contiguous tensors and peers as
ranks in the group. It checks the arguments and returns a `CallPlan`, which also runs later calls with tensors of the same
dtypes and shapes. Large tensors are cut into parts: one for each lane, or segments if a part needs separate
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from asyncdist.base.ops import Collective
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import pairwise, recursive_doubling, tree
from asyncdist.kernel.algorithms.schedule import Recv, Schedule, ScheduleOf, Send
from asyncdist.kernel.collectives import validation
from asyncdist.kernel.collectives.call_plan import Arrange, CallPlan
from asyncdist.kernel.collectives.first_rail import GATHERS
from asyncdist.kernel.collectives.group_context import GroupContext, Lane, fingerprint, segments
from asyncdist.kernel.collectives.recorded import LocalCopy, Recording, recorded_blocks
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.memory.buffers import (
    NOTHING,
    Memory,
    block_memories,
    copy_overlapping_rows,
    dtype_number,
    flat_memory,
)
from asyncdist.kernel.transport.native import CallSignature
from asyncdist.kernel.transport.wire_format import RUNS, prepared_fingerprint

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
    if in_tree:
        run = partial(tree.broadcast, group.rank, group.size, root)
        records = [partial(lambda lane, memory: run(lane.of(memory)), lane) for lane in group.lanes(nbytes)]
        return group.recorded(call, nbytes, records, [tensor])
    segment_count = max(1, group.config.segment_nbytes // tensor.itemsize)
    if count <= segment_count:
        return group.recorded(call, nbytes, [partial(tree.chain_broadcast, group.rank, group.size, root)], [tensor])

    def parts(tensor: torch.Tensor) -> Iterable[Schedule]:
        each = segments(flat_memory(tensor), segment_count)
        return (tree.chain_broadcast(group.rank, group.size, root, segment) for segment in each)

    return group.in_parts(call, nbytes, parts, window=max(4, group.config.lanes))


def all_gather_list(group: GroupContext, outputs: Any, tensor: Any) -> CallPlan:
    """Gather every rank's tensor into a list."""
    blocks = validation.listed(outputs, group.size, "tensor_list")
    return _all_gather(group, [(blocks, tensor)], (outputs, tensor))


def all_gather_coalesced(group: GroupContext, tensor_lists: Any, tensors: Any) -> CallPlan:
    """Gather several tensors as one operation: rank ``r``'s ``tensors[i]`` into ``tensor_lists[r][i]``."""
    validation.check_length(tensor_lists, group.size, "output_tensor_lists")
    if not tensors or any(len(row) != len(tensors) for row in tensor_lists):
        raise UsageError(f"each of output_tensor_lists needs {len(tensors)} tensors, and one at least, as the input")
    columns = [
        validation.listed(column, group.size, "output_tensor_lists") for column in zip(*tensor_lists, strict=True)
    ]

    def arrange(tensor_lists: Any, tensors: Any) -> tuple[Any, ...]:
        columns = [list(column) for column in zip(*tensor_lists, strict=True)]
        return (columns[0], tensors[0]) if len(columns) == 1 else (columns, tensors)

    rows = list(zip(columns, tensors, strict=True))
    return _all_gather(group, rows, arrange(tensor_lists, tensors), arrange=arrange)


def all_gather_single(group: GroupContext, output: Any, tensor: Any) -> CallPlan:
    """Gather every rank's tensor into one tensor, concatenated in group order."""
    blocks = validation.even(output, group.size, "output")
    return _all_gather(group, [(blocks, tensor)], (output, tensor), contiguous=True)


def _all_gather(
    group: GroupContext,
    rows: Sequence[tuple[Sequence[torch.Tensor], Any]],
    arguments: tuple[Any, Any],
    *,
    contiguous: bool = False,
    arrange: Arrange | None = None,
) -> CallPlan:
    """Gather every rank's input into the blocks of every rank, for each row (blocks, own input).

    ``arguments`` are the blocks and the own input of a call with one row, and lists of them of a call with several, as
    ``arrange`` returns them.
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
    contiguous = contiguous and len(group.lanes(max(counts[0]) * rows[0][1].itemsize)) == 1
    dtype, total = rows[0][1].dtype, sum(map(sum, counts))
    collective = Collective.all_gather if len(rows) == 1 else Collective.all_gather_coalesced
    nbytes, equal = total * dtype.itemsize, len(rows) == 1 and len(set(counts[0])) == 1
    hierarchical = group.hierarchical_for("all_gather")
    over_links = hierarchical is None and (group.native is None or "all_gather" in group.forced)
    if over_links and group.choose("all_gather", nbytes, contiguous=contiguous) == "doubling":
        layout.append(RUNS)
    call = fingerprint(collective, dtype, total, None, None, tuple(layout))
    sizes = () if equal else tuple(count for row in counts for count in row)
    signature = CallSignature(collective, call, dtype, (counts[0][group.rank],), sizes=sizes)
    if (plan := group.in_memory(signature, nbytes, arrange)) is not None:
        return plan
    if hierarchical is None:
        records = [
            partial(_all_gather_steps, group, run, row, index if len(rows) > 1 else None, lane)
            for index, (row, (_, own)) in enumerate(zip(counts, rows, strict=True))
            for run in [GATHERS[group.choose("all_gather", sum(row) * own.itemsize, contiguous=contiguous)]]
            for lane in group.lanes(max(row) * own.itemsize)
        ]
        return group.recorded(call, nbytes, records, arguments, arrange=arrange)

    def parts(outputs: Any, inputs: Any) -> Iterable[Schedule]:
        columns = [(outputs, inputs)] if len(rows) == 1 else zip(outputs, inputs, strict=True)
        memories = [(block_memories(blocks, group.size), flat_memory(own)) for blocks, own in columns]
        memories = copy_overlapping_rows(memories, group.size, group.rank)
        for blocks, own in memories:
            blocks[group.rank].tensor.copy_(own.tensor)
        return hierarchical.all_gather([blocks for blocks, _ in memories], call, equal=equal)

    return group.in_parts(call, nbytes, parts, arrange=arrange)


def _all_gather_steps(
    group: GroupContext,
    run: ScheduleOf,
    counts: Sequence[int],
    row: int | None,
    lane: Lane,
    outputs: Any,
    inputs: Any,
) -> Recording:
    """Gather one row in one lane; ``row`` is None if it is the only one."""
    output, own = (outputs, inputs) if row is None else (outputs[row], inputs[row])
    blocks = lane.of_each(recorded_blocks(output, counts))
    yield LocalCopy(blocks[group.rank], lane.of(own))
    yield from run(group.rank, group.size, blocks)


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

    return group.recorded(call, nbytes, [record], [output, tensor])


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

    return group.recorded(call, nbytes, [record], [tensor, scatter_list])


def all_to_all_lists(group: GroupContext, output_list: Any, input_list: Any) -> CallPlan:
    """Send ``input_list[i]`` to rank ``i``, and receive from it into ``output_list[i]``."""
    incoming = validation.listed(output_list, group.size, "output_tensor_list")
    outgoing = validation.listed(input_list, group.size, "input_tensor_list")
    counts = [block.numel() for block in incoming], [block.numel() for block in outgoing]
    return _all_to_all(group, output_list, input_list, *counts)


def all_to_all_single(
    group: GroupContext, output: Any, tensor: Any, output_sizes: Sequence[int] | None, input_sizes: Sequence[int] | None
) -> CallPlan:
    """Exchange parts of one tensor, cut along the first dimension."""
    incoming = validation.split_counts(output, output_sizes, group.size, "output")
    outgoing = validation.split_counts(tensor, input_sizes, group.size, "input")

    def arrange(output: torch.Tensor, tensor: torch.Tensor) -> tuple[Any, ...]:
        return output.view(-1).split(incoming), tensor.view(-1).split(outgoing)

    equal = len({*incoming, *outgoing}) == 1
    return _all_to_all(group, output, tensor, incoming, outgoing, None if equal else arrange)


def _all_to_all(
    group: GroupContext,
    output: Any,
    tensor: Any,
    incoming_counts: Sequence[int],
    outgoing_counts: Sequence[int],
    arrange: Arrange | None = None,
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
    large = group.config.stripe_nbytes
    lanes = group.lanes(max(*incoming_counts, *outgoing_counts) * dtype.itemsize)

    def record(lane: Lane, output: Any, tensor: Any) -> Recording:
        incoming = lane.of_large(recorded_blocks(output, incoming_counts), large)
        outgoing = lane.of_large(recorded_blocks(tensor, outgoing_counts), large)
        received, sent = incoming[group.rank], outgoing[group.rank]
        if received is not None and sent is not None:
            yield LocalCopy(received, sent)
        yield from pairwise.all_to_all(group.rank, group.size, outgoing, incoming)

    return group.recorded(call, nbytes, [partial(record, lane) for lane in lanes], [output, tensor])


def barrier(group: GroupContext) -> CallPlan:
    """Complete when every rank has called the barrier."""
    return _barrier(group, fingerprint(Collective.barrier, None, 0, None, None))


def meeting(group: GroupContext, call: int) -> CallPlan:
    """Complete when every rank has prepared a persistent collective with this fingerprint."""
    return _barrier(group, prepared_fingerprint(call))


def _barrier(group: GroupContext, call: int) -> CallPlan:
    if (plan := group.in_memory(CallSignature(Collective.barrier, call, torch.uint8, (0,)), 0)) is not None:
        return plan
    if (hierarchical := group.hierarchical_for("barrier")) is not None:
        return group.in_parts(call, 0, lambda: (hierarchical.barrier(call),))
    run = tree.barrier if group.choose("barrier", 0) == "tree" else recursive_doubling.barrier
    record = partial(run, group.rank, group.size, NOTHING, NOTHING)
    return group.recorded(call, 0, [record], [])


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
