"""The plan of an all-reduce of sparse tensors, whose numbers of elements differ between ranks."""

from __future__ import annotations

from typing import Any

import torch

from asyncdist.base.ops import Collective, ReduceOp, Reduction
from asyncdist.errors import UnsupportedError
from asyncdist.kernel.algorithms import pairwise, ring
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.collectives.group_context import GroupContext, fingerprint
from asyncdist.kernel.collectives.validation import reduction
from asyncdist.kernel.engine.operation import Plan
from asyncdist.kernel.memory.buffers import DTYPE_NUMBERS, Memory, TensorBlocks, input_memory
from asyncdist.kernel.memory.reduce_kernels import check, divide


def all_reduce(group: GroupContext, tensor: torch.Tensor, op: Any) -> Plan:
    """Sum or average a sparse COO tensor over the ranks, in place; all ranks get the same bits, coalesced.

    Every rank gathers the indices and values of all ranks and adds them up in the order of ranks.
    """
    op = reduction(op)
    own = _checked(tensor, op)
    indices, values = input_memory(own.indices()), input_memory(own.values())
    dense_shape = own.shape[own.sparse_dim() :]
    per_index, per_value = own.sparse_dim(), dense_shape.numel()
    gathered: list[tuple[Memory, Memory]] = []

    def part() -> Schedule:
        counts = Memory(torch.zeros(group.size, dtype=torch.int64, device="cpu"))
        counts.tensor[group.rank] = own._nnz()
        yield from pairwise.all_gather(group.rank, group.size, TensorBlocks.split(counts, group.size))
        for rank, n in enumerate(counts.tensor.tolist()):
            if rank == group.rank:
                gathered.append((indices, values))
                continue
            places = torch.empty(n * per_index, dtype=torch.int64, device="cpu")
            numbers = torch.empty(n * per_value, dtype=values.dtype, device="cpu")
            gathered.append((Memory(places), Memory(numbers)))
        yield from ring.all_gather(group.rank, group.size, [places for places, _ in gathered])
        yield from ring.all_gather(group.rank, group.size, [numbers for _, numbers in gathered])

    def finish() -> torch.Tensor:
        # `copy_` replaces the indices and values of a sparse tensor, so these must be made in the tensor's own mode.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            places = torch.cat([each.tensor.view(per_index, -1) for each, _ in gathered], dim=1)
            numbers = torch.cat([each.tensor.view(-1, *dense_shape) for _, each in gathered])
            total = torch.sparse_coo_tensor(places, numbers, own.shape, device="cpu", check_invariants=False).coalesce()
            if op is ReduceOp.AVG:
                divide(total.values(), group.size)
            tensor.copy_(total)
        return tensor

    layout = (*own.shape, -1, own.sparse_dim())
    call = fingerprint(Collective.all_reduce, own.dtype, 0, op, None, layout)
    return Plan((part(),), call, None, finish, nbytes=indices.nbytes + values.nbytes)


def _checked(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    """Return the tensor coalesced and detached. Raises UnsupportedError if it cannot be all-reduced."""
    if tensor.layout is not torch.sparse_coo or not tensor.is_cpu or tensor.dtype not in DTYPE_NUMBERS:
        raise UnsupportedError(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be all-reduced: "
            "call .to_sparse_coo() or .to_dense() first"
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedError(
            f"sparse tensors are reduced with SUM and AVG only, not {op.name}: call .to_dense() first"
        )
    check(op, tensor.dtype)
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().coalesce()
