"""Functions of torch that are replaced: once, with name and signature kept."""

from __future__ import annotations

import inspect

import torch.distributed as dist

from asyncdist.torch_backend import patches


def test_patched_function_keeps_name_and_signature_and_is_patched_once():
    replaced = dist.monitored_barrier
    assert replaced.__name__ == "monitored_barrier"
    assert [*inspect.signature(replaced).parameters] == ["group", "timeout", "wait_all_ranks"]
    patches.apply_patches()
    assert dist.monitored_barrier is replaced
