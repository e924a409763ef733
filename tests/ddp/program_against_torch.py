"""Run under torchrun by test_backwards.py: compares torch's DistributedDataParallel over gloo with asyncdist's."""

import copy
import sys

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel, direct_gradients

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
dist.init_process_group()
rank = dist.get_rank()
torch.manual_seed(rank)
layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 300), nn.Tanh()]
base = nn.Sequential(*layers, nn.Linear(300, 5), nn.LayerNorm(5))
theirs = TorchDDP(copy.deepcopy(base), bucket_cap_mb=1)
ours = DistributedDataParallel(copy.deepcopy(base), bucket_cap_mb=0.01)
assert [type(layer) is direct_gradients.Linear for layer in (ours.module[4], ours.module[6])] == [True, False]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (theirs, ours)]
for _ in range(3):
    inputs, labels = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    for model, optimizer in zip((theirs, ours), optimizers, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
    for mine, stock in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, stock.grad, rtol=1e-5, atol=1e-6)
    for optimizer in optimizers:
        optimizer.step()
mine, stock = ours.state_dict(), theirs.state_dict()
assert list(mine) == list(stock), (list(mine), list(stock))
for name in stock:
    torch.testing.assert_close(mine[name], stock[name], rtol=1e-5, atol=1e-6)
theirs.load_state_dict(mine)
dist.destroy_process_group()
torch.distributed.destroy_process_group()
sys.stdout.write(f"rank {rank} agrees\n")
