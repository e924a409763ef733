"""CPU kernels of two operators of ``_c10d_functional``. Below torch 2.14, torch's own require a back end written in C++.

`torch_backend` registers them there when it is imported. These kernels serve process groups of every back end, because
torch selects a kernel by the tensor's device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as torch_distributed

from asyncdist.kernel import c10d_private
from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS

# The methods of torch's class call the group's Python methods and keep both halves of the Work that these return. A Work
# that is passed to C++ code directly loses its Python half, and waiting for it never ends.
_cpp: Any = torch_distributed.ProcessGroup


@cache
def register_kernels() -> None:
    """Register the kernels for tensors on the CPU. Idempotent."""
    if HAS_PYTHON_BACKENDS:
        return
    # Defines the operators.
    assert c10d_private.functional_collectives
    for kernel in (all_gather_into_tensor_out, batch_p2p_ops):
        operator = f"_c10d_functional::{kernel.__name__}"
        torch.library.impl(operator, "CPU", kernel)


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Start an all-gather of ``input`` into ``out``; ``wait_tensor(out)`` waits for it."""
    work = _cpp.all_gather_single_coalesced(_group(group_name), [out], [input.contiguous()])
    c10d_private.register_work(out, work)
    return out


def batch_p2p_ops(
    op_list: list[str], peer_list: list[int], tag_list: list[int], tensors: list[torch.Tensor], group_name: Any
) -> list[torch.Tensor]:
    """Start sends and receives with ranks of the group; ``wait_tensor`` of each result waits for its operation."""
    group = _group(group_name)
    started = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if op == "isend":
            tensor = tensor.contiguous()
            work = _cpp.send(group, [tensor], peer, tag)
        else:
            work = _cpp.recv(group, [tensor], peer, tag)
        c10d_private.register_work(tensor, work)
        started.append(tensor)
    return started


def _group(name: Any) -> Any:
    return c10d_private.resolve_process_group(name) if isinstance(name, str) else name
