"""CPU kernels of two operators of ``_c10d_functional``. torch's own kernels require a back end written in C++.

These kernels serve process groups of every back end, because torch selects a kernel by the tensor's device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Defines the operators.
import torch.distributed._functional_collectives
from torch.distributed import distributed_c10d

from asyncdist.torch_backend.held_references import wait_tensor_waits_for

c10d: Any = distributed_c10d


@cache
def register_kernels() -> None:
    """Register the kernels for tensors on the CPU. Idempotent."""
    for kernel in (all_gather_into_tensor_out, batch_p2p_ops):
        operator = f"_c10d_functional::{kernel.__name__}"
        # Not every release of torch defines both.
        if _is_defined(operator):
            torch.library.impl(operator, "CPU", kernel)


def _is_defined(operator: str) -> bool:
    return operator in torch._C._dispatch_get_all_op_names()


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Start an all-gather of ``input`` into ``out``; ``wait_tensor(out)`` waits for it."""
    group = _group(group_name)
    gather = getattr(group, "all_gather_single", None) or group._allgather_base
    wait_tensor_waits_for(out, gather(out, input.contiguous()))
    return out


def batch_p2p_ops(
    op_list: list[str], peer_list: list[int], tag_list: list[int], tensors: list[torch.Tensor], group_name: Any
) -> list[torch.Tensor]:
    """Start sends and receives with ranks of the group; ``wait_tensor`` of each result waits for its operation."""
    group = _group(group_name)
    started = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        one = tensor.contiguous() if op == "isend" else tensor
        work = group.send([one], peer, tag) if op == "isend" else group.recv([one], peer, tag)
        wait_tensor_waits_for(one, work)
        started.append(one)
    return started


def _group(name: Any) -> Any:
    return c10d._resolve_process_group(name) if isinstance(name, str) else name
