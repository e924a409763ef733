"""Errors of DistributedDataParallel for impossible steps; no rank hangs."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError, LoopThreadError, UnsupportedError, UsageError
from asyncdist.testing.cluster import world_of


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)

    def forward(self, x, spare=False):
        return self.spare(self.used(x)) if spare else self.used(x)


def test_parameter_without_gradient_on_every_rank_is_named(together):
    def rank(group):
        model = DistributedDataParallel(Two(), process_group=group)
        for _ in range(2):
            with pytest.raises(
                GradientError, match=r"no gradient to 'spare.weight', 'spare.bias' on this rank"
            ) as caught:
                model(torch.ones(1, 3)).sum().backward()
            assert caught.value.parameters == ("spare.weight", "spare.bias")
        model.zero_grad()
        model(torch.ones(1, 3), spare=True).sum().backward()
        return model.module.used.bias.grad

    assert torch.equal(*together(2, rank))


def test_parameter_without_gradient_on_one_rank_does_not_hang(together):
    def rank(group):
        model = DistributedDataParallel(Two(), process_group=group, bucket_cap_mb=1e-5)
        loss = model(torch.ones(1, 3), spare=group.rank() != 1).sum()
        if group.rank() == 1:
            with pytest.raises(GradientError, match="spare"):
                loss.backward()
        else:
            loss.backward()
        model.zero_grad()
        model(torch.ones(1, 3), spare=True).sum().backward()
        return model.module.spare.bias.grad.tolist()

    assert together(3, rank) == [[1.0, 1.0, 1.0]] * 3


def test_forward_after_an_incomplete_backward_raises(together):
    class Fuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("blown")

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.second(Fuse.apply(self.first(x)))

    def rank(group):
        model = DistributedDataParallel(Fused(), process_group=group, bucket_cap_mb=1e-5)
        with pytest.raises(KeyError, match="blown"):
            model(torch.ones(1, 3)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 3))
        with pytest.raises(GradientError, match="had sent 2 of 4 buckets"):
            model(torch.ones(1, 3))

    together(2, rank)


def test_backward_that_fails_before_the_model_may_be_repeated(together):
    def rank(group):
        model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
        output = model(torch.full((1, 3), float(group.rank())))
        fuse = output.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward(retain_graph=True)
        fuse.remove()
        output.sum().backward()
        return model.module.weight.grad.tolist()

    assert together(2, rank) == [[[0.5] * 3]] * 2


def test_sparse_gradients_are_refused(together):
    def rank(group):
        model = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), process_group=group)
        with pytest.raises(UnsupportedError, match="'weight' is not a dense tensor"):
            model(torch.tensor([1])).sum().backward()

    together(1, rank)


@pytest.mark.parametrize(
    ("module", "arguments", "error", "sentence"),
    [
        *(
            (nn.Linear(1, 1), {name: value}, UnsupportedError, name)
            for name, value in {
                "find_unused_parameters": True,
                "static_graph": True,
                "mixed_precision": object(),
                "device_mesh": object(),
                "skip_all_reduce_unused_params": True,
                "delay_all_reduce_named_params": [],
                "param_to_hook_all_reduce": object(),
            }.items()
        ),
        (nn.Linear(1, 1).requires_grad_(False), {}, UsageError, "no parameter .* requires a gradient"),
        (nn.ReLU(), {}, UsageError, "no parameter .* requires a gradient"),
        (nn.LazyLinear(1), {}, UsageError, "'weight' has no shape yet"),
        (nn.Linear(1, 1), {"device_ids": [0]}, UsageError, "leave it out"),
        (nn.Linear(1, 1), {"device_ids": [0, 1]}, UsageError, "start a rank for each"),
        (nn.Linear(1, 1), {"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            {},
            UnsupportedError,
            r"module '1' is a torch.nn.SyncBatchNorm.*nn\.GroupNorm",
        ),
    ],
)
def test_arguments_and_modules_that_are_refused_at_construction(together, module, arguments, error, sentence):
    def rank(group):
        with pytest.raises(error, match=sentence):
            DistributedDataParallel(module, process_group=group, **arguments)

    together(1, rank)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_optimizer_in_backward_is_refused_at_construction(together):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    _apply_optimizer_in_backward(torch.optim.SGD, module[1].parameters(), {"lr": 0.1})

    def rank(group):
        with pytest.raises(UnsupportedError, match=r"parameter '1.weight' has an optimizer .*call its step\(\) after"):
            DistributedDataParallel(module, process_group=group)

    together(1, rank)


async def test_an_async_program_steps_in_a_worker_thread():
    def step(group):
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        model(torch.full((1, 2), float(group.rank()))).sum().backward()
        return model.module.weight.grad.tolist()

    async with world_of(2) as groups:
        with pytest.raises(LoopThreadError):
            DistributedDataParallel(nn.Linear(2, 1), process_group=groups[0])
        results = await asyncio.gather(*(asyncio.to_thread(step, group) for group in groups))
    assert results == [[[0.5, 0.5]]] * 2
