"""Small models and data for the tests of data-parallel training."""

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel, direct_gradients

SMALL_MB = 1 / 4096
"""A ``bucket_cap_mb`` of 256 bytes: two buckets for `network`."""


class Counting:
    """A group that records its all-reduces and broadcasts."""

    def __init__(self, group):
        self._group = group
        self.issued = []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def all_reduce(self, tensor, op, **how):
        self.issued.append(("all_reduce", tensor.numel()))
        return self._group.all_reduce(tensor, op, **how)

    def broadcast(self, tensor, src, **how):
        self.issued.append(("broadcast", tensor.numel()))
        return self._group.broadcast(tensor, src, **how)

    def all_gather_object(self, objects, value, **options):
        self.issued.append(("all_gather_object", value))
        return self._group.all_gather_object(objects, value, **options)


def seeded(module, seed=0):
    """Fill the parameters. The threads that run the ranks share torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return module


def network(seed=0):
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3)), seed)


def wrapped(group, **options):
    """Return a wrapped `network` with two buckets."""
    return DistributedDataParallel(network(), process_group=group, bucket_cap_mb=SMALL_MB, **options)


def samples(count=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def share(group, tensors):
    return [tensor[group.rank() :: group.size()] for tensor in tensors]


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_close(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def assert_equal(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        assert torch.equal(mine, theirs)


def loss_of(module, inputs, targets):
    return nn.functional.mse_loss(module(inputs), targets)


@pytest.fixture(scope="session")
def shared_nursery(training_nursery):
    return training_nursery


@pytest.fixture(autouse=True)
def toys_are_large_enough(monkeypatch):
    """Let backward write the gradients of the small weights of these models directly into buckets."""
    monkeypatch.setattr(direct_gradients, "LEAST_NBYTES", 0)
