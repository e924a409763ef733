"""Run by test_torch_warnings.py on two ranks: data loaders whose workers are forked after the model was wrapped."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import AsyncdistError


def train(test, rank, where, transport):
    """Send the gradient after two epochs, and whether a backward in a forked child ends in an error."""
    torch.set_num_threads(1)
    with dist.process_group(transport, init_method=where, rank=rank, world_size=2, timeout=30) as group:
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        samples = TensorDataset(torch.full((4, 2), float(rank)))
        for _ in range(2):
            for (batch,) in DataLoader(samples, batch_size=2, num_workers=2, multiprocessing_context="fork"):
                model.zero_grad()
                model(batch).sum().backward()
        child = os.fork()
        if child == 0:
            try:
                model(torch.ones(1, 2)).sum().backward()
            except AsyncdistError:
                os._exit(7)
            finally:
                os._exit(1)
        refused = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        model.zero_grad()
        model(torch.full((1, 2), float(rank))).sum().backward()
        test.send((model.module.weight.grad.tolist(), refused))
