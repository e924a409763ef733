"""NCCL call arguments for tensors, and the memory layout of the blocks of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncdist.memory.buffers import Memory
from asyncdist_transports.nccl.bindings import BYTES
from asyncdist_transports.nccl.communicator import Call


def equal_counts(blocks: Sequence[Memory]) -> bool:
    """Return whether all blocks have the same number of elements."""
    return all(block.count == blocks[0].count for block in blocks)


def contiguous_span(blocks: Sequence[Memory]) -> torch.Tensor | None:
    """Return the first of equal blocks if the others follow it in memory in rank order, else None."""
    first = blocks[0].tensor
    place, nbytes = first.data_ptr(), blocks[0].nbytes
    lie_so = all(block.tensor.data_ptr() == place + rank * nbytes for rank, block in enumerate(blocks))
    return first if lie_so else None


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def send(tensor: torch.Tensor, rank: int) -> Call:
    """Return the call that sends a flat tensor."""
    return "send", tensor.data_ptr(), _nbytes(tensor), BYTES, rank


def receive(tensor: torch.Tensor, rank: int) -> Call:
    """Return the call that receives into a flat tensor."""
    return "recv", tensor.data_ptr(), _nbytes(tensor), BYTES, rank
