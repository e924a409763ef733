"""Run by test_sharded_optimizer.py on two ranks: uneven inputs in torch's Join, with a sharded optimizer."""

import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join

import asyncdist.torch_backend
from asyncdist.ddp import DistributedDataParallel
from asyncdist.ddp.sharded_optimizer import ZeroRedundancyOptimizer


def train(test, rank, where):
    """Take 2 or 4 steps, and send the parameters."""
    torch.set_num_threads(1)
    assert asyncdist.torch_backend
    distributed.init_process_group("asyncdist", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step + rank)).sum().backward()
            optimizer.step()
    test.send([parameter.detach().tolist() for parameter in model.parameters()])
    distributed.destroy_process_group()
