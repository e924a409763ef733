"""Patched functions of torch: patched once, with name and signature kept, and torch's own for groups of other backends."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist

from asyncdist.torch_backend import patches


def test_patched_function_keeps_name_and_signature_and_is_patched_once():
    replaced = dist.monitored_barrier
    assert replaced.__name__ == "monitored_barrier"
    assert [*inspect.signature(replaced).parameters] == ["group", "timeout", "wait_all_ranks"]
    patches.apply_patches()
    assert dist.monitored_barrier is replaced


@pytest.fixture
def group():
    dist.init_process_group("asyncdist", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_of_other_backends_use_torch_functions(group):
    instead = patches.for_our_groups(lambda group: group, lambda group: "ours")
    assert instead(lambda group: "torch's", group) == "ours"
    assert instead(lambda group: "torch's", object()) == "torch's"
