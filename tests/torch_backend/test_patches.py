"""Functions of torch that are replaced: those of one list, once, with name and signature kept."""

import inspect
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from asyncdist.torch_backend import patches

PROGRAM = Path(__file__).with_name("program_replaced.py")
INITIALIZE = """
import torch
import asyncdist.sync as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
model = dist.DistributedDataParallel(torch.nn.Linear(1, 1))
model(torch.ones(1, 1)).sum().backward()
dist.destroy_process_group()
"""
WITH_BACK_END = """
import torch
import asyncdist.torch_backend
import torch.distributed as dist
dist.init_process_group("asyncdist", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""


def name_of(owner, name):
    return f"{owner.__module__}.{owner.__name__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"


@pytest.mark.processes
def test_world_of_asyncdist_replaces_nothing_in_torch(without_asyncdist):
    assert without_asyncdist.start(PROGRAM, "replaced_by", INITIALIZE).hear() == []


@pytest.mark.processes
def test_back_end_replaces_the_functions_of_the_list_alone(without_asyncdist):
    replaced = without_asyncdist.start(PROGRAM, "replaced_by", WITH_BACK_END).hear()
    assert replaced == sorted({name_of(owner, name) for owner, name, _ in patches.REPLACEMENTS})


def test_patched_function_keeps_name_and_signature_and_is_patched_once():
    replaced = DistributedDataParallel._register_builtin_comm_hook
    assert replaced.__name__ == "_register_builtin_comm_hook"
    assert [*inspect.signature(replaced).parameters] == ["self", "comm_hook_type"]
    patches.apply_patches()
    assert DistributedDataParallel._register_builtin_comm_hook is replaced
