"""Run by test_torch_warnings.py on one rank: a wrapped model inside a context of torch's distributed autograd."""

import torch
from torch import nn
from torch.distributed import autograd, rpc

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError


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
