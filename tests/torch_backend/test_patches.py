"""What we replace in torch: once, under its own name, and torch's still for groups that are not ours."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist

from asyncdist.torch_backend import patches


def test_what_is_replaced_keeps_its_name_and_arguments_and_is_not_replaced_again():
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


def test_groups_of_others_are_left_to_torch(group):
    instead = patches.for_our_groups(lambda group: group, lambda group: "ours")
    assert instead(lambda group: "torch's", group) == "ours"
    assert instead(lambda group: "torch's", object()) == "torch's"
