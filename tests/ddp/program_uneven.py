"""Run by test_uneven_inputs.py: a model of several large buckets, trained on 1, 3 and 2 inputs; a model in torch's Join."""

import functools
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join

import asyncdist.sync as dist
import asyncdist.torch_backend  # noqa: F401 - registers the back end
from asyncdist.ddp import DistributedDataParallel
from asyncdist.ddp.sharded_optimizer import ZeroRedundancyOptimizer
from asyncdist.errors import GradientError, PeerLostError

COUNTS = [1, 3, 2]


class Layers(nn.Module):
    """Parameters whose gradient is the input, in every element."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(700, 1000) for _ in range(2))

    def forward(self, x):
        return sum((x * layer).sum() for layer in self.layers)


def train(test, rank, where, transport):
    """Send two parameters after an epoch, then the errors of steps during which the test kills rank 1."""
    torch.set_num_threads(1)
    with dist.process_group(transport, init_method=where, rank=rank, world_size=3, timeout=30) as group:
        model = DistributedDataParallel(Layers(), process_group=group, bucket_cap_mb=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step():
            optimizer.zero_grad()
            model(float(rank + 1)).backward()
            optimizer.step()

        with model.join():
            for _ in range(COUNTS[rank]):
                step()
        assert len(model.bucket_parameters) == 2
        assert all((layer == layer[0, 0]).all() for layer in model.module.layers)
        test.send([layer[-1, -1].item() for layer in model.module.layers])

        def lasting_epoch():
            with model.join():
                while rank == 0:
                    step()

        with pytest.raises(PeerLostError) as lost:
            lasting_epoch()
        with pytest.raises(GradientError if rank == 0 else PeerLostError):
            step()
        with pytest.raises(PeerLostError):
            group.barrier(background=False).wait()
        test.send(lost.value.peer)


def train_in_torchs_join(test, rank, where):
    """Send the warnings of a step after an uneven epoch, and the parameters before it.

    With torch's optimizer, and with a sharded one that follows the steps of the other rank.
    """
    torch.set_num_threads(1)
    distributed.init_process_group("asyncdist", init_method=where, rank=rank, world_size=2)

    def warned(optimizer_of, *, follows):
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = optimizer_of(model.parameters())

        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

        with Join([model, optimizer] if follows else [model]):
            for _ in range(1 + rank):
                step()
        parameters = [parameter.detach().tolist() for parameter in model.parameters()]
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
        return [str(each.message) for each in found], parameters

    sharded = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
    test.send((warned(torch.optim.Adam, follows=False), warned(sharded, follows=True)))
    distributed.destroy_process_group()
