"""Run by test_copies.py on two ranks: a model is saved in the middle of training, loaded, and trained on."""

import io
import pickle

import torch
from torch import nn

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel, direct_gradients
from asyncdist.errors import UsageError


def gradient_of(model, rank):
    model.zero_grad()
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    return model.module[0].weight.grad


def train(test, rank, where):
    """Say that gradients of the loaded models are those of the saved one, and what loading says without a group."""
    torch.set_num_threads(1)
    direct_gradients.LEAST_NBYTES = 0
    dist.init_process_group(init_method=where, rank=rank, world_size=2, timeout=30)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))
    expected = gradient_of(model, rank).clone()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(gradient_of(loaded, rank), expected)
        assert type(loaded.module[0]) is direct_gradients.Linear
    saved = pickle.dumps(model)
    dist.destroy_process_group()
    for act in (lambda: pickle.loads(saved), lambda: pickle.dumps(model)):
        try:
            act()
        except UsageError as error:
            test.send(str(error))
