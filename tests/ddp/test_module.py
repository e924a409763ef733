import copy

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from tests.ddp import conftest as toy
from tests.support.pairs import each_pair
from tests.support.ranks import on_ranks


@each_pair(size=[1, 2, 3, 4], set_to_none=[True, False], as_view=[True, False])
def test_training_equals_a_single_process_on_the_global_batch(together, size, set_to_none, as_view):
    def train(module, inputs, targets):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            toy.loss_of(module, inputs, targets).backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    def rank(group):
        module = toy.network(seed=group.rank())  # rank 0's values overwrite these
        model = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=toy.SMALL_MB, gradient_as_bucket_view=as_view
        )
        return train(model, *toy.share(group, toy.samples()))

    results = together(size, rank)
    toy.assert_close(results[0], train(toy.network(seed=0), *toy.samples()))
    for other in results[1:]:
        toy.assert_equal(other, results[0])


class Mixed(nn.Module):
    """Parameters of several dtypes, a frozen one, one used twice under two names, an empty one and a scalar."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 4).double()
        self.brain = nn.Linear(4, 4).bfloat16()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.again = self.plain
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        x = self.frozen(self.again(self.plain(x))) * self.scale + self.empty.sum()
        return self.brain(self.wide(x.double()).bfloat16()).float()


def test_mixed_dtypes_frozen_shared_empty_and_scalar_parameters(together):
    base, inputs = toy.seeded(Mixed()), torch.linspace(-1, 1, 24).view(6, 4)

    def rank(group):
        module = copy.deepcopy(base)
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=toy.SMALL_MB)
        for _ in range(2):
            model.zero_grad()
            model(inputs[group.rank() :: group.size()]).pow(2).mean().backward()
        kinds = [{module.get_parameter(name).dtype for name in names} for names in model.bucket_parameters]
        assert all(len(kind) == 1 for kind in kinds)
        return dict(module.named_parameters())

    results = together(2, rank)
    base(inputs).pow(2).mean().backward()
    assert results[0]["frozen.weight"].grad is None
    for name, parameter in base.named_parameters():
        if parameter.requires_grad:
            tolerance = 0.02 if parameter.dtype == torch.bfloat16 else 0.01  # all activations pass the bfloat16 layer
            torch.testing.assert_close(results[0][name].grad, parameter.grad, rtol=tolerance, atol=tolerance)
            assert torch.equal(results[0][name].grad, results[1][name].grad)


def test_channels_last_parameters_keep_their_strides(together):
    base = toy.seeded(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    inputs = torch.linspace(-1, 1, 300).view(4, 3, 5, 5)

    def rank(group):
        module = copy.deepcopy(base)
        DistributedDataParallel(module, process_group=group)(inputs[group.rank() :: 2]).mean().backward()
        return module.weight.grad

    results = together(2, rank)
    base(inputs).mean().backward()
    assert results[0].stride() == base.weight.stride()
    toy.assert_close(results, [base.weight.grad] * 2)


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_cast_model_is_averaged_in_its_new_dtype(together, steps, as_view):
    def rank(group):
        module = toy.network()
        model = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=toy.SMALL_MB, gradient_as_bucket_view=as_view
        )
        data = toy.share(group, toy.samples())
        for _ in range(steps):
            toy.loss_of(model, *data).backward()
        module[:3].double()  # without calling the wrapper
        module[3].register_forward_hook(lambda _, __, output: output.float())
        for _ in range(2):
            model.zero_grad()
            toy.loss_of(model, data[0].double(), data[1]).backward()
        assert all(len({module.get_parameter(name).dtype for name in names}) == 1 for names in model.bucket_parameters)
        return toy.gradients(module)

    reference = toy.network()
    reference[:3].double()
    reference[3].register_forward_hook(lambda _, __, output: output.float())
    for each in range(2):
        part = [tensor[each::2] for tensor in toy.samples()]
        (toy.loss_of(reference, part[0].double(), part[1]) / 2).backward()
    for ours in together(2, rank):
        for mine, expected in zip(ours, toy.gradients(reference), strict=True):
            torch.testing.assert_close(mine, expected)


@on_ranks(2)
def test_rank_without_inputs_contributes_zeros_to_a_cast_model(group):
    model, reference = DistributedDataParallel(toy.network(), process_group=group), toy.network().double()
    data = toy.share(group, toy.samples())
    for _ in range(2):
        toy.loss_of(model, *data).backward()
    model.double()
    model.zero_grad()
    with model.join():
        if group.rank() == 1:
            toy.loss_of(model, *(tensor.double() for tensor in data)).backward()
    if group.rank() == 1:
        (toy.loss_of(reference, *(tensor.double() for tensor in data)) / 2).backward()
        torch.testing.assert_close(toy.gradients(model), toy.gradients(reference))


@on_ranks(2)
def test_gradients_stay_views_of_their_buckets(group):
    module = toy.network()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=toy.SMALL_MB)
    inputs, targets = toy.share(group, toy.samples())
    toy.loss_of(model, inputs, targets).backward()  # buckets are assigned again after this one
    storages = []
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        toy.loss_of(model, inputs, targets).backward()
        storages.append([p.grad.untyped_storage().data_ptr() for p in module.parameters()])
    model.zero_grad(set_to_none=True)
    toy.loss_of(model, inputs, targets).backward()
    storages.append([p.grad.untyped_storage().data_ptr() for p in module.parameters()])
    assert len(set(storages[0])) == len(model.bucket_parameters)
    assert all(storage == storages[0] for storage in storages)


@on_ranks(2)
def test_without_views_every_gradient_has_memory_of_its_own(group):
    module = toy.network()
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=False)
    toy.loss_of(model, *toy.share(group, toy.samples())).backward()
    kept = toy.gradients(module)
    held = [p.grad for p in module.parameters()]
    model.zero_grad()
    toy.loss_of(model, *(2 * t for t in toy.share(group, toy.samples()))).backward()
    toy.assert_equal(held, kept)
    assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters()}) == 6


def test_buckets_follow_the_order_of_rank_0s_gradients(together):
    class Branches(nn.Module):
        def __init__(self, turn):
            super().__init__()
            self.layers = toy.seeded(nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4)))
            self.turn = turn

        def forward(self, x):
            for index in self.turn:
                x = self.layers[index](x)
            return x

    def rank(group):
        # Rank 1's gradients arrive in the opposite order, but the buckets are sent in rank 0's order.
        model = DistributedDataParallel(
            Branches([2, 0, 3, 1] if group.rank() == 0 else [1, 3, 0, 2]), process_group=group, bucket_cap_mb=1e-5
        )
        first = model.bucket_parameters
        for _ in range(3):
            model(torch.ones(1, 6)).sum().backward()
        times = model.last_step.buckets
        assert [t.index for t in sorted(times, key=lambda t: t.started)] == [0, 1, 2, 3]
        return first, model.bucket_parameters, [p.grad for p in model.parameters()]

    results = together(2, rank)
    for first, later, _ in results:
        assert first == [[f"layers.{i}.weight"] for i in (3, 2, 1, 0)]
        assert later == [[f"layers.{i}.weight"] for i in (1, 3, 0, 2)]
    toy.assert_equal(results[0][2], results[1][2])


@on_ranks(2)
def test_a_bucket_is_sent_before_the_last_gradient_is_ready(group):
    model = toy.wrapped(group)
    assert model.last_step is None
    for _ in range(2):
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
    step = model.last_step
    first, *_, last = step.buckets
    assert first.started < last.ready
    assert step.backward_started < first.ready <= last.ready < step.backward_finished < step.finished
    for times in step.buckets:
        assert times.ready <= times.started < times.finished <= step.finished


@on_ranks(2)
def test_buffers_that_appear_are_replaced_or_vanish_are_followed(group):
    """A step does not search the model for buffers, so it must notice such changes."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = DistributedDataParallel(module, process_group=group)
    assert len(model.named_module_buffers) == 3
    module.double()
    assert model.named_module_buffers["1.running_mean"] is module[1].running_mean
    module.float()
    module[0].register_buffer("late", torch.full((1,), float(group.rank())))
    model(torch.ones(4, 2)).sum().backward()
    model(torch.ones(4, 2)).sum().backward()
    module[1].running_var = None
    assert sorted(model.named_module_buffers) == ["0.late", "1.num_batches_tracked", "1.running_mean"]
    module[0] = nn.BatchNorm1d(2)
    assert "0.running_var" in model.named_module_buffers
    assert (module[1].running_mean.dtype, module._modules["1"].running_var) == (torch.float32, None)
