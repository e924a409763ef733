"""Run by test_checkpoint.py: the state of models that are wrapped by torch's class and by asyncdist's, in checkpoints."""

import torch
import torch.distributed
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import asyncdist.torch_backend  # noqa: F401 - registers the back end
from asyncdist.ddp import DistributedDataParallel


def network(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    made[0].bias.requires_grad_(False)
    return made


def trained(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(8.0).view(4, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


WRAPPERS = {"torch": TorchDDP, "asyncdist": DistributedDataParallel, "bare": lambda module: module}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return one == other


def exchange(test, where, folder):
    """Send what does not fit, for each pair of a saved and a loaded model."""
    torch.distributed.init_process_group("asyncdist", init_method=where, rank=0, world_size=1)
    wrong = []
    for saver, wrap in WRAPPERS.items():
        model, optimizer = trained(wrap(network(seed=1)))
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if list(state["model"]) != list(network(seed=1).state_dict()):
            wrong.append((saver, sorted(state["model"])))
        trainable = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
        if "0.bias" in trainable or "0.weight" not in trainable:
            wrong.append((saver, "frozen", sorted(trainable)))
        checkpoint.save(state, checkpoint_id=f"{folder}/{saver}")
        for loader, wrap_other in WRAPPERS.items():
            other, its_optimizer = trained(wrap_other(network(seed=2)))
            found = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
            checkpoint.load(found, checkpoint_id=f"{folder}/{saver}")
            if loader == saver:
                set_model_state_dict(other, found["model"])
                set_optimizer_state_dict(other, its_optimizer, found["optimizer"])
            else:
                set_state_dict(
                    other, its_optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
                )
            loaded = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, its_optimizer)}
            if not equal(loaded, state):
                wrong.append((saver, loader))
    torch.distributed.destroy_process_group()
    test.send(wrong)


def nest(test, where, folder):
    """Send the names of models that contain a wrapped model, or are wrapped themselves."""
    torch.distributed.init_process_group("asyncdist", init_method=where, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    names = {}
    for kind in (TorchDDP, DistributedDataParallel):
        sharded = fully_shard(network(seed=1), mesh=mesh)
        inside_fsdp, beside_fsdp = (
            FullyShardedDataParallel(
                network(seed=1).requires_grad_(True), device_id=torch.device("cpu"), use_orig_params=True
            )
            for _ in range(2)
        )
        names[kind.__module__] = {
            "inside": list(get_model_state_dict(nn.ModuleDict({"tower": kind(network(seed=1))}))),
            "compiled": list(get_model_state_dict(torch.compile(kind(network(seed=1))))),
            "beside": list(get_model_state_dict(nn.ModuleList([kind(network(seed=1)), sharded]))),
            "beside_fsdp": list(get_model_state_dict(nn.ModuleList([kind(network(seed=1)), beside_fsdp]))),
            "around_fsdp": list(get_model_state_dict(kind(inside_fsdp))),
        }
    torch.distributed.destroy_process_group()
    test.send(list(names.values()))
