"""Run by test_torch_warnings.py: data loaders whose workers are forked, and torch's distributed autograd."""

import os

import torch
from torch import nn
from torch.distributed import autograd, rpc
from torch.utils.data import DataLoader, TensorDataset

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import AsyncdistError, GradientError


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


def differentiate(test, where):
    """Send the text of the error, and the gradient of a backward outside the context."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1, init_method=f"{where}-rpc", _transports=["uv"])
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    with dist.process_group(init_method=where, rank=0, world_size=1) as group:
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        try:
            with autograd.context() as context:
                autograd.backward(context, [model(torch.ones(1, 2)).sum()])
            test.send("no error")
        except GradientError as error:
            test.send(str(error))
        model(torch.ones(1, 2)).sum().backward()
        test.send(model.module.weight.grad.tolist())
    rpc.shutdown()
