"""Errors of DistributedDataParallel for impossible steps; no rank hangs."""

import asyncio

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
from asyncdist.errors import GradientError, LoopThreadError, UnsupportedError, UsageError
from asyncdist.testing.cluster import world_of
from tests.support.ranks import on_ranks


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)

    def forward(self, x, spare=False):
        return self.spare(self.used(x)) if spare else self.used(x)


@pytest.mark.parametrize(
    ("size", "lacking", "sentence"),
    [(3, {0, 1, 2}, "rank 0, 1, 2"), (3, {1}, "(rank 1|this rank)"), (3, {0, 2}, "rank 0, 2"), (1, {0}, "this rank")],
)
def test_parameter_without_gradient_is_named_on_every_rank(together, size, lacking, sentence):
    def rank(group):
        model = DistributedDataParallel(Two(), process_group=group, bucket_cap_mb=1e-5)
        message = f"no gradient to 'spare.weight', 'spare.bias' on {sentence}"
        for _ in range(2):
            loss = model(torch.ones(1, 3), spare=group.rank() not in lacking).sum()
            with pytest.raises(GradientError, match=message) as caught:
                loss.backward()
            assert caught.value.parameters == ("spare.weight", "spare.bias")
        model.zero_grad()
        model(torch.ones(1, 3), spare=True).sum().backward()
        assert model.module.spare.bias.grad.tolist() == [1.0, 1.0, 1.0]

    together(size, rank)


@on_ranks(2)
def test_forward_after_an_incomplete_backward_raises(group):
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

    model = DistributedDataParallel(Fused(), process_group=group, bucket_cap_mb=1e-5)
    with pytest.raises(KeyError, match="blown"):
        model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 3))
    with pytest.raises(GradientError, match="had sent 2 of 4 buckets"):
        model(torch.ones(1, 3))


@on_ranks(2)
def test_backward_that_fails_before_the_model_may_be_repeated(group):
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    output = model(torch.full((1, 3), float(group.rank())))
    fuse = output.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward(retain_graph=True)
    fuse.remove()
    output.sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5] * 3]


@on_ranks(2)
def test_sparse_gradients_are_refused_on_every_rank(group):
    class Sparse(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.table, self.sparse = nn.Parameter(torch.ones(4, 2)), sparse

        def forward(self, x):
            return nn.functional.embedding(x, self.table, sparse=self.sparse)

    model = DistributedDataParallel(Sparse(group.rank() == 1), process_group=group)
    with pytest.raises(GradientError, match=r"'table' on (rank 1|this rank) is not a dense tensor.*sparse=False"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("after_wrapping", [False, True])
@on_ranks(2)
def test_hook_that_clears_a_gradient_before_it_is_averaged_is_refused(group, after_wrapping):
    def clear(parameter):
        parameter.grad = None

    module = nn.Linear(2, 1)
    if not after_wrapping:
        module.weight.register_post_accumulate_grad_hook(clear)
    model = DistributedDataParallel(module, process_group=group)
    if after_wrapping:
        module.weight.register_post_accumulate_grad_hook(clear)
    with pytest.raises(GradientError, match=r"hook set the gradient of 'weight' to None.*step\(\) after backward"):
        model(torch.ones(1, 2)).sum().backward()


LINEAR = nn.Linear(1, 1)
OF_LINEAR = [
    ({"mixed_precision": object()}, UnsupportedError, "torch.autocast.*hooks.bf16"),
    ({"delay_all_reduce_named_params": []}, UsageError, "param_to_hook_all_reduce are passed together"),
    ({"param_to_hook_all_reduce": LINEAR.weight}, UsageError, "passed together"),
    (
        {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": nn.Parameter(torch.ones(1))},
        UsageError,
        "param_to_hook_all_reduce is not a parameter",
    ),
    (
        {"delay_all_reduce_named_params": [("0", LINEAR.weight)], "param_to_hook_all_reduce": LINEAR.weight},
        UsageError,
        "'0', but the module has no such parameter",
    ),
    ({"output_device": 0}, UsageError, "output_device requires a module on one accelerator"),
    ({"device_ids": [0]}, UsageError, "leave it out"),
    ({"device_ids": [0, 1]}, UsageError, "start a rank for each"),
    ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb"),
    ({"bucket_cap_mb": "large"}, UsageError, "number of MiB or 'auto', not 'large'"),
    ({"bucket_cap_mb": "auto", "bucket_cap_mb_list": [1]}, UsageError, "bucket_cap_mb_list, not both"),
]
MODULES = [
    (nn.Embedding(2, 2, sparse=True), UnsupportedError, "embedding with sparse gradients.*sparse=False"),
    (nn.Sequential(LINEAR, nn.Linear(1, 1, device="meta")), UsageError, "devices of several types, cpu and meta"),
    (nn.Linear(1, 1).requires_grad_(False), UsageError, "no parameter .* requires a gradient"),
    (nn.ReLU(), UsageError, "no parameter .* requires a gradient"),
    (nn.LazyLinear(1), UsageError, "'weight' has no shape yet"),
    (
        nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)),
        UnsupportedError,
        r"module '1' is a torch.nn.SyncBatchNorm.*asyncdist.SyncBatchNorm.convert_sync_batchnorm",
    ),
]


@pytest.mark.parametrize(
    ("module", "arguments", "error", "sentence"),
    [*((LINEAR, *row) for row in OF_LINEAR), *((module, {}, *row) for module, *row in MODULES)],
)
@on_ranks(1)
def test_arguments_and_modules_that_are_refused_at_construction(group, module, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        DistributedDataParallel(module, process_group=group, **arguments)


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
@on_ranks(2)
def test_parameter_that_is_trained_only_after_wrapping_is_named_by_the_next_forward(group, change, name, sentence):
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


@on_ranks(2)
def test_layer_whose_forward_needs_all_ranks_is_refused_inside_join(group):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 2), SyncBatchNorm(2)), process_group=group)
    with pytest.raises(UsageError, match=r"'1' is a SyncBatchNorm.*throw_on_early_termination=True"), model.join():
        pass
    with model.join(throw_on_early_termination=True):
        pass


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
