"""Tensors that are allocated in registered memory while a reducer creates its buckets."""

from __future__ import annotations

import pytest
import torch

from asyncdist.errors import SharedMemoryError
from asyncdist.memory import registered
from asyncdist.memory.shared_arena import arena
from asyncdist.torch_backend.bucket_memory import _Registered

COUNT = 10_000


def lies_open(tensor):
    return arena().offset_of(tensor.data_ptr(), tensor.nbytes) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_large_flat_tensors_are_allocated_in_registered_memory(dtype):
    with _Registered():
        made = torch.empty([2 * COUNT], dtype=dtype, device="cpu")
        made.fill_(2)
    assert lies_open(made)
    assert made.dtype is dtype
    assert made.shape == (2 * COUNT,)
    assert bool((made == 2).all())
    assert not lies_open(torch.empty([2 * COUNT], dtype=dtype, device="cpu")), (
        "registered memory is used outside the context manager"
    )


def test_small_shaped_zeroed_and_meta_tensors_are_allocated_by_torch():
    with _Registered():
        others = [
            torch.empty([10], dtype=torch.float32, device="cpu"),
            torch.empty([100, COUNT], dtype=torch.float32, device="cpu"),
            torch.zeros([COUNT]),
        ]
        meta = torch.empty([COUNT], dtype=torch.float32, device="meta")
    assert not any(map(lies_open, others))
    assert meta.is_meta


def test_full_registered_memory_falls_back_to_ordinary_memory(monkeypatch):
    def full(*size, **how):
        raise SharedMemoryError("no memory is left")

    monkeypatch.setattr(registered, "empty", full)
    with _Registered():
        made = torch.empty([COUNT], dtype=torch.float32, device="cpu")
    assert made.shape == (COUNT,)
    assert not lies_open(made)
