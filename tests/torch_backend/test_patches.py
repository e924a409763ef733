"""Functions of torch that are replaced: those of one list, once, with name and signature kept."""

import inspect
import json
import subprocess
import sys

import pytest
from torch.nn.parallel import DistributedDataParallel

from asyncdist.torch_backend import patches

REPLACED_BY = """
import json
import sys
import types

import torch
import torch.distributed.algorithms.join
import torch.distributed.checkpoint.state_dict
import torch.distributed.device_mesh
import torch.distributed.elastic.rendezvous.dynamic_rendezvous
import torch.distributed._functional_collectives
import torch.optim

CLASSES = (type, types.ModuleType)


def snapshot():
    found = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "torch"]:
        owners = [module] + [each for each in list(vars(module).values()) if isinstance(each, type)]
        for owner in owners:
            if owner is module or owner.__module__.split(".")[0] == "torch":
                for name, value in list(vars(owner).items()):
                    if callable(value) or hasattr(type(value), "__get__"):
                        found[id(owner), name] = owner, value
    return found


before = snapshot()
exec(sys.argv[1])
after = snapshot()
replaced = {
    f"{owner.__module__}.{owner.__name__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"
    for (at, name), (owner, value) in before.items()
    if (at, name) not in after or after[at, name][1] is not value
}
print(json.dumps(sorted(replaced)))
"""
"""Prints which functions and classes of torch a program replaces or removes."""

INITIALIZE = """
import asyncdist.sync as dist
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
model = dist.DistributedDataParallel(torch.nn.Linear(1, 1))
model(torch.ones(1, 1)).sum().backward()
dist.destroy_process_group()
"""
WITH_BACK_END = """
import asyncdist.torch_backend
import torch.distributed as dist
dist.init_process_group("asyncdist", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""


def replaced_by(program):
    done = subprocess.run([sys.executable, "-c", REPLACED_BY, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def name_of(owner, name):
    return f"{owner.__module__}.{owner.__name__}.{name}" if isinstance(owner, type) else f"{owner.__name__}.{name}"


@pytest.mark.processes
def test_world_of_asyncdist_replaces_nothing_in_torch():
    assert replaced_by(INITIALIZE) == []


@pytest.mark.processes
def test_back_end_replaces_the_functions_of_the_list_alone():
    assert replaced_by(WITH_BACK_END) == sorted({name_of(owner, name) for owner, name, _ in patches.REPLACEMENTS})


def test_patched_function_keeps_name_and_signature_and_is_patched_once():
    replaced = DistributedDataParallel._register_builtin_comm_hook
    assert replaced.__name__ == "_register_builtin_comm_hook"
    assert [*inspect.signature(replaced).parameters] == ["self", "comm_hook_type"]
    patches.apply_patches()
    assert DistributedDataParallel._register_builtin_comm_hook is replaced
