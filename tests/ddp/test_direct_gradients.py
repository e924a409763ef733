"""Gradients of linear layers that backward writes into their buckets, and all that must go torch's way instead."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncdist.ddp import DistributedDataParallel, direct_gradients
from asyncdist.errors import GradientError


class Copies:
    """Counts the gradients that a reducer copies into their buckets."""

    def __init__(self, model):
        self.count = 0
        model._reducer._keep_until_forward = self._note

    def _note(self, gradient):
        self.count += 1


def layers(seed=0):
    return [nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8, bias=False), nn.GELU(), nn.Linear(8, 3)]


def model_and_reference(toy, group, make):
    model = DistributedDataParallel(toy.seeded(make()), process_group=group, bucket_cap_mb=0.0001)
    return model, toy.seeded(make())


def assert_like_torch(toy, together, make, loss_of=None, *, copied, steps=3):
    """Compare with training in torch on the samples of all ranks; ``copied`` gradients per step are copied into buckets."""
    loss_of = loss_of or toy.loss_of

    def rank(group):
        model, reference = model_and_reference(toy, group, make)
        for _ in range(steps):
            model.zero_grad()
            reference.zero_grad()
            copies = Copies(model)
            loss_of(model, *toy.samples()).backward()
            loss_of(reference, *toy.samples()).backward()
            toy.assert_close(toy.gradients(model), toy.gradients(reference))
            assert copies.count == copied

    together(2, rank)


@pytest.mark.parametrize(
    ("samples", "autocast", "copied"),
    [
        (slice(None), False, 2),
        (slice(0), False, 2),
        (0, False, 5),
        (slice(None), True, 5),
    ],
    ids=["matrix", "empty matrix", "vector", "autocast"],
)
def test_only_biases_are_copied_except_for_vectors_and_autocast(together, toy, samples, autocast, copied):
    def loss_of(module, inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = module(inputs[samples])
            return outputs.sum() if samples == slice(0) else nn.functional.mse_loss(outputs, targets[samples])

    assert_like_torch(toy, together, lambda: nn.Sequential(*layers()), loss_of, copied=copied)


def test_gradients_have_the_same_bits_as_in_torch(together, toy):
    def rank(group):
        model, reference = model_and_reference(toy, group, lambda: nn.Sequential(*layers()))
        for module in (model, reference):
            toy.loss_of(module, *toy.samples()).backward()
        toy.assert_equal(toy.gradients(model), toy.gradients(reference))  # the mean of two equal halves

    together(2, rank)


@pytest.mark.parametrize("shape", [(4, 3, 6), (2, 2, 3, 6)])
def test_inputs_may_have_more_than_two_dimensions(together, toy, shape):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))

    def loss_of(module, *_):
        return module(inputs.transpose(0, 1)).square().mean()

    assert_like_torch(toy, together, lambda: nn.Sequential(*layers()), loss_of, copied=2)


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_results_may_be_changed_in_place(together, toy, shape, bias):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))

    def make():
        first, last = nn.Linear(6, 16, bias=bias), nn.Linear(16, 3, bias=bias)
        return nn.Sequential(first, nn.ReLU(inplace=True), last, nn.Hardtanh(inplace=True))

    for given in (inputs, inputs.transpose(0, -2)):
        assert_like_torch(
            toy, together, make, lambda module, *_, given=given: module(given).square().mean(), copied=2 * bias
        )


class Twice(nn.Module):
    """Uses a layer twice, one of whose weights is also another layer's."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(self.first(x))))


def test_gradients_of_a_weight_that_is_used_twice_are_summed(together, toy):
    # Copied: the sum of the shared weight's gradients, and three biases.
    assert_like_torch(toy, together, Twice, copied=4)


def test_accumulated_gradients_equal_those_of_torch(together, toy):
    def rank(group):
        model, reference = model_and_reference(toy, group, lambda: nn.Sequential(*layers()))
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            with model.no_sync():
                toy.loss_of(model, *toy.samples()).backward()
            for _ in range(2):
                toy.loss_of(model, *toy.samples()).backward()
            for _ in range(3):
                toy.loss_of(reference, *toy.samples()).backward()
            toy.assert_close(toy.gradients(model), toy.gradients(reference))

    together(2, rank)


def test_gradients_returned_by_autograd_grad_are_not_overwritten(together, toy):
    def rank(group):
        model, _ = model_and_reference(toy, group, lambda: nn.Sequential(*layers()))
        toy.loss_of(model, *toy.samples()).backward()
        model.zero_grad()
        taken = torch.autograd.grad(toy.loss_of(model, *toy.samples()), list(model.parameters()))
        before = [each.clone() for each in taken]
        toy.loss_of(model, *(2 * each for each in toy.samples())).backward()
        toy.assert_equal(taken, before)

    together(2, rank)


def test_second_derivatives_equal_those_of_torch(together, toy):
    def loss_of(module, inputs, targets):
        inputs = inputs.clone().requires_grad_()
        loss = toy.loss_of(module, inputs, targets)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + slope.square().sum()

    def rank(group):
        model, reference = model_and_reference(toy, group, lambda: nn.Sequential(*layers()))
        for module in (model, reference):
            loss_of(module, *toy.samples()).backward()
        toy.assert_close(toy.gradients(model), toy.gradients(reference))

    together(2, rank)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_write_gradients_into_buckets(together, toy, reentrant):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*layers())

        def forward(self, x):
            return self.layers[3:](checkpoint(self.layers[1:3], self.layers[0](x), use_reentrant=reentrant))

    assert_like_torch(toy, together, Again, copied=2)


def test_hooks_that_change_a_gradient_change_the_average(together, toy):
    def make():
        made = nn.Sequential(*layers())
        made[0].weight.register_hook(lambda gradient: 2 * gradient)
        return made

    assert_like_torch(toy, together, make, copied=3)


def of_weight(layer, kept):
    return layer.weight.register_hook(kept.append)


def of_several(layer, kept):
    return torch.autograd.graph.register_multi_grad_hook(list(layer.parameters()), kept.extend)


def of_any(layer, kept):
    return torch.autograd.graph.register_multi_grad_hook([layer.weight], kept.append, mode="any")


def of_operation(layer, kept):
    return layer.register_backward_hook(lambda _, given, __: kept.extend(each for each in given if each is not None))


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("hook", [of_weight, of_several, of_any, of_operation])
def test_tensor_hooks_receive_this_ranks_own_gradient(together, toy, hook, late):
    def step(module, rank, between=lambda: None):
        loss = module(torch.full((2, 6), rank + 1.0)).sum()
        between()
        module.zero_grad()
        loss.backward()

    def rank(group):
        kept, expected, handles = [], [], []
        model, reference = model_and_reference(toy, group, lambda: nn.Sequential(*layers()))
        for module, layer, found in ((model, model.module[0], kept), (reference, reference[0], expected)):
            if late:
                step(module, group.rank(), lambda layer=layer, found=found: handles.append(hook(layer, found)))
            else:
                handles.append(hook(layer, found))
            step(module, group.rank())
            step(module, group.rank())
            handles.pop().remove()
        assert kept
        toy.assert_equal(kept, expected)
        copies = Copies(model)
        step(model, group.rank())
        assert copies.count == 2  # biases, as before

    together(2, rank)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, when it first differentiates forwards
def test_functorch_uses_the_original_layer(together, toy):
    def rank(group):
        module = toy.seeded(nn.Sequential(*layers()))
        DistributedDataParallel(module, process_group=group)
        inputs, _ = toy.samples()
        jacobians = torch.func.vmap(torch.func.jacrev(module))(inputs)
        _, slopes = torch.func.jvp(module, (inputs,), (torch.ones_like(inputs),))
        torch.testing.assert_close(slopes, jacobians.sum(-1))

    together(1, rank)


def test_layers_keep_type_repr_pickles_and_state(together, toy):
    def rank(group):
        module = toy.seeded(nn.Sequential(*layers()))
        looks = repr(module)
        model = DistributedDataParallel(module, process_group=group)
        assert type(module[0]) is direct_gradients.Linear
        assert isinstance(module[0], nn.Linear)
        assert repr(module) == looks
        inputs, targets = toy.samples()
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        for each in copies:
            assert type(each[0]) is nn.Linear
            assert torch.equal(each(inputs), module(inputs))
        assert module.state_dict().keys() == nn.Sequential(*layers()).state_dict().keys()
        del model
        toy.loss_of(module, inputs, targets).backward()
        reference = toy.seeded(nn.Sequential(*layers()))
        toy.loss_of(reference, inputs, targets).backward()
        toy.assert_equal(toy.gradients(module), toy.gradients(reference))

    together(2, rank)


def test_replaced_weight_is_not_averaged(together, toy):
    def rank(group):
        module = toy.seeded(nn.Sequential(*layers()))
        model = DistributedDataParallel(module, process_group=group)
        ours = module[0].weight
        module[0].weight = nn.Parameter(ours.detach().clone())
        with pytest.raises(GradientError, match=r"gave no gradient to '0\.weight'"):
            toy.loss_of(model, *toy.samples()).backward()
        assert ours.grad is None
        reference = toy.seeded(nn.Sequential(*layers()))
        toy.loss_of(reference, *toy.samples()).backward()
        return torch.equal(module[0].weight.grad, reference[0].weight.grad)

    assert together(2, rank) == [True, True]


def test_derived_layers_and_frozen_weights_are_not_replaced(together, toy):
    class Other(nn.Linear):
        pass

    def rank(group):
        module = toy.seeded(nn.Sequential(Other(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)))
        module[1].weight.requires_grad_(False)
        DistributedDataParallel(module, process_group=group)
        return [type(layer) for layer in module] == [Other, nn.Linear, direct_gradients.Linear]

    assert together(2, rank) == [True, True]


def test_small_weights_are_copied(together, monkeypatch):
    monkeypatch.undo()

    def rank(group):
        module = nn.Sequential(nn.Linear(255, 256), nn.Linear(256, 256))
        DistributedDataParallel(module, process_group=group)
        return [type(layer) for layer in module] == [nn.Linear, direct_gradients.Linear]

    assert direct_gradients.LEAST_NBYTES == 256 << 10
    assert together(2, rank) == [True, True]


def test_without_bucket_views_layers_are_not_replaced(together, toy):
    def rank(group):
        module = toy.network()
        DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=False)
        return type(module[0]) is nn.Linear

    assert together(2, rank) == [True, True]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_wrapped_module_can_be_scripted_and_traced(together, toy):
    def rank(group):
        module = toy.network()
        model = DistributedDataParallel(module, process_group=group)
        inputs, _ = toy.samples()
        scripted = torch.jit.script(module)
        traced = torch.jit.trace(module, inputs)
        del model
        return torch.equal(scripted(inputs), module(inputs)) and torch.equal(traced(inputs), module(inputs))

    assert together(1, rank) == [True]


def test_wrapped_module_can_be_exported_and_runs_on_meta(together, toy):
    def rank(group):
        module = toy.network()
        model = DistributedDataParallel(module, process_group=group)
        inputs, _ = toy.samples()
        assert torch.equal(torch.export.export(module, (inputs,)).module()(inputs), module(inputs))
        assert torch.equal(torch.fx.symbolic_trace(module)(inputs), module(inputs))
        del model
        return module.to("meta")(inputs.to("meta")).shape == (12, 3)

    assert together(1, rank) == [True]
