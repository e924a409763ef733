"""Errors of DistributedDataParallel for impossible steps; no rank hangs."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
from asyncdist.errors import GradientError, LoopThreadError, UnsupportedError, UsageError
from asyncdist.testing.cluster import world_of

WITH_HOOKED = nn.Linear(1, 1)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)

    def forward(self, x, spare=False):
        return self.spare(self.used(x)) if spare else self.used(x)


@pytest.mark.parametrize("lacking", [{0, 1, 2}, {1}, {0, 2}])
def test_parameter_without_gradient_is_named_on_every_rank(together, lacking):
    sentence = {3: "rank 0, 1, 2", 1: "(rank 1|this rank)", 2: "rank 0, 2"}[len(lacking)]

    def rank(group):
        model = DistributedDataParallel(Two(), process_group=group, bucket_cap_mb=1e-5)
        for _ in range(2):
            loss = model(torch.ones(1, 3), spare=group.rank() not in lacking).sum()
            with pytest.raises(
                GradientError, match=f"no gradient to 'spare.weight', 'spare.bias' on {sentence}"
            ) as caught:
                loss.backward()
            assert caught.value.parameters == ("spare.weight", "spare.bias")
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


def test_sparse_gradients_are_refused_on_every_rank(together):
    class Sparse(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.table, self.sparse = nn.Parameter(torch.ones(4, 2)), sparse

        def forward(self, x):
            return nn.functional.embedding(x, self.table, sparse=self.sparse)

    def rank(group):
        model = DistributedDataParallel(Sparse(group.rank() == 1), process_group=group)
        with pytest.raises(GradientError, match=r"'table' on (rank 1|this rank) is not a dense tensor.*sparse=False"):
            model(torch.tensor([1])).sum().backward()

    together(2, rank)


@pytest.mark.parametrize("after_wrapping", [False, True])
def test_hook_that_clears_a_gradient_before_it_is_averaged_is_refused(together, after_wrapping):
    def clear(parameter):
        parameter.grad = None

    def rank(group):
        module = nn.Linear(2, 1)
        if not after_wrapping:
            module.weight.register_post_accumulate_grad_hook(clear)
        model = DistributedDataParallel(module, process_group=group)
        if after_wrapping:
            module.weight.register_post_accumulate_grad_hook(clear)
        with pytest.raises(GradientError, match=r"hook set the gradient of 'weight' to None.*step\(\) after backward"):
            model(torch.ones(1, 2)).sum().backward()

    together(2, rank)


@pytest.mark.parametrize(
    ("module", "arguments", "error", "sentence"),
    [
        (nn.Linear(1, 1), {"mixed_precision": object()}, UnsupportedError, "torch.autocast.*hooks.bf16"),
        (
            nn.Linear(1, 1),
            {"delay_all_reduce_named_params": []},
            UsageError,
            "param_to_hook_all_reduce are passed together",
        ),
        (nn.Linear(1, 1), {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, UsageError, "passed together"),
        (
            nn.Linear(1, 1),
            {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": nn.Parameter(torch.ones(1))},
            UsageError,
            "param_to_hook_all_reduce is not a parameter",
        ),
        (
            WITH_HOOKED,
            {
                "delay_all_reduce_named_params": [("0", WITH_HOOKED.weight)],
                "param_to_hook_all_reduce": WITH_HOOKED.weight,
            },
            UsageError,
            "'0', but the module has no such parameter",
        ),
        (nn.Linear(1, 1), {"output_device": 0}, UsageError, "output_device requires a module on one accelerator"),
        (nn.Embedding(2, 2, sparse=True), {}, UnsupportedError, "embedding with sparse gradients.*sparse=False"),
        (
            nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")),
            {},
            UsageError,
            "devices of several types, cpu and meta",
        ),
        (nn.Linear(1, 1).requires_grad_(False), {}, UsageError, "no parameter .* requires a gradient"),
        (nn.ReLU(), {}, UsageError, "no parameter .* requires a gradient"),
        (nn.LazyLinear(1), {}, UsageError, "'weight' has no shape yet"),
        (nn.Linear(1, 1), {"device_ids": [0]}, UsageError, "leave it out"),
        (nn.Linear(1, 1), {"device_ids": [0, 1]}, UsageError, "start a rank for each"),
        (nn.Linear(1, 1), {"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
        (nn.Linear(1, 1), {"bucket_cap_mb": "large"}, UsageError, "number of MiB or 'auto', not 'large'"),
        (
            nn.Linear(1, 1),
            {"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1]},
            UsageError,
            "bucket_cap_mb_list, not both",
        ),
        (
            nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
            {},
            UnsupportedError,
            r"module '1' is a torch.nn.SyncBatchNorm.*asyncdist.SyncBatchNorm.convert_sync_batchnorm",
        ),
    ],
)
def test_arguments_and_modules_that_are_refused_at_construction(together, module, arguments, error, sentence):
    def rank(group):
        with pytest.raises(error, match=sentence):
            DistributedDataParallel(module, process_group=group, **arguments)

    together(1, rank)


def add_parameter(module):
    module.used.scale = nn.Parameter(torch.ones(1))


def add_layer(module):
    module.used.extra = nn.Linear(1, 1)


def replace(module):
    module.spare.weight = nn.Parameter(torch.ones(3, 3))


def unfreeze(module):
    module.used.bias.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "name", "sentence"),
    [
        (add_parameter, "used.scale", "was added or replaced after"),
        (add_layer, "used.extra.weight", "was added or replaced after"),
        (replace, "spare.weight", "was added or replaced after"),
        (unfreeze, "used.bias", "required no gradient when the model was wrapped"),
    ],
)
def test_parameter_that_is_trained_only_after_wrapping_is_named_by_the_next_forward(together, change, name, sentence):
    def rank(group):
        module = Two()
        module.used.bias.requires_grad_(False)
        model = DistributedDataParallel(module, process_group=group)
        model(torch.ones(1, 3), spare=True).sum().backward()
        module.used.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        model(torch.ones(1, 3), spare=True).sum().backward()
        change(module)
        with pytest.raises(UsageError, match=f"parameter '{name}' {sentence}"):
            model(torch.ones(1, 3), spare=True)
        with torch.no_grad():
            model(torch.ones(1, 3))

    together(2, rank)


def test_layer_whose_forward_needs_all_ranks_is_refused_inside_join(together):
    def rank(group):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), SyncBatchNorm(2)), process_group=group)
        with pytest.raises(UsageError, match=r"'1' is a SyncBatchNorm.*throw_on_early_termination=True"), model.join():
            pass
        with model.join(throw_on_early_termination=True):
            pass

    together(2, rank)


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
