"""Tensors in mapped memory, for users: collectives on them read and write them where they lie.

A registered tensor is an ordinary tensor whose storage lies in this process's arena (`asyncdist.arena`), which every rank
of the host has mapped. Nothing remembers it: what lies in the arena is registered, slices and views too, for all groups.
The memory is given back with the last tensor that shares it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from asyncdist.arena import arena, tensor_of_block, unavailable

log = logging.getLogger("asyncdist")

_told = False


def empty(
    *size: Any, dtype: torch.dtype | None = None, shared: bool = True, requires_grad: bool = False
) -> torch.Tensor:
    """Return an uninitialised CPU tensor, as `torch.empty` does, in memory that all ranks of this host see.

    Collectives on it (32 KiB or more) copy nothing but their result. ``size`` is some numbers or one sequence of them.
    Where a machine has no shared memory, and with ``shared=False``, this is an ordinary tensor. Needs no process group.
    A forked child sees the parent's memory itself, no copy of it. Raises SharedMemoryError if no memory is left.
    """
    if not shared or not _possible():
        return torch.empty(*size, dtype=dtype, device="cpu", requires_grad=requires_grad)
    form = torch.empty(*size, dtype=dtype, device="meta")  # so that torch judges the arguments
    block = arena().allocate(form.nbytes)
    tensor = tensor_of_block(block, form.numel(), form.dtype).view(form.shape)
    return tensor.requires_grad_(requires_grad)


def _possible() -> bool:
    """Say whether this machine shares memory between processes; where it does not, log that once."""
    global _told
    reason = unavailable()
    if reason is not None and not _told:
        _told = True
        log.warning("registered tensors are ordinary ones here: %s", reason)
    return reason is None
