"""A rank that runs functions and a model under torch.compile, including blocking asyncdist calls."""

import torch

import asyncdist.sync as dist
from asyncdist import DistributedDataParallel


def functions(test, where, rank):
    """Send the results of a compiled function that makes blocking and asynchronous calls and asks for ranks."""
    dist.init_process_group(init_method=where, rank=rank, world_size=2)

    @torch.compile(backend="aot_eager")
    def around(tensor):
        doubled = tensor * 2
        dist.all_reduce(doubled)
        more = doubled + dist.get_rank()
        work = dist.all_reduce(more, async_op=True)
        work.wait()
        row = [torch.empty_like(more) for _ in range(dist.get_world_size())]
        dist.all_gather(row, more - dist.get_rank())
        return torch.stack(row).sum(1)

    test.send([around(torch.full((count,), rank + 1.0)).tolist() for count in (4, 4, 8, 5)])
    dist.destroy_process_group()


def training(test, where, rank, inside):
    """Send the weights after three steps of a model that is compiled before or after it is wrapped."""
    dist.init_process_group(init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    if inside == "plain":
        step = model = DistributedDataParallel(model)
    elif inside:
        step = model = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    else:
        model = DistributedDataParallel(model)
        step = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        step(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    test.send([parameter.detach().flatten().tolist() for parameter in model.parameters()])
    dist.destroy_process_group()
