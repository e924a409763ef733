"""Gradients of linear layers that backward writes into their buckets, and the cases that use torch's own path."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


def layers():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8, bias=False), nn.GELU(), nn.Linear(8, 3))


def copied_gradients(model):
    """Return a list of the gradients that lie outside of their buckets before the reducer sees them, from now on."""
    copied, reducer = [], model._reducer

    def look(index, parameter):
        if model.gradient_as_bucket_view and parameter.grad.data_ptr() != reducer._bucket_set.view(index).data_ptr():
            copied.append(parameter.grad)

    # The next forward moves the reducer's own hooks behind these.
    for index, parameter in enumerate(reducer._parameters):
        parameter.register_post_accumulate_grad_hook(functools.partial(look, index))
    return copied


def pair(group, make=layers):
    """Wrap a module for a rank, and make an equal module that is not wrapped."""
    model = DistributedDataParallel(toy.seeded(make()), process_group=group, bucket_cap_mb=0.0001)
    return model, toy.seeded(make())


@on_ranks(2)
def assert_like_torch(group, make=layers, loss_of=toy.loss_of, *, copied):
    """Compare with training in torch on the samples of all ranks; ``copied`` gradients per step are copied into buckets."""
    model, reference = pair(group, make)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        copies = copied_gradients(model)
        loss_of(model, *toy.samples()).backward()
        loss_of(reference, *toy.samples()).backward()
        toy.assert_close(toy.gradients(model), toy.gradients(reference))
        assert len(copies) == copied


@pytest.mark.parametrize(
    ("samples", "autocast", "copied"),
    [(slice(None), False, 2), (slice(0), False, 2), (0, False, 5), (slice(None), True, 5)],
    ids=["matrix", "empty matrix", "vector", "autocast"],
)
def test_only_biases_are_copied_except_for_vectors_and_autocast(samples, autocast, copied):
    def loss_of(module, inputs, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = module(inputs[samples])
            return outputs.sum() if samples == slice(0) else nn.functional.mse_loss(outputs, targets[samples])

    assert_like_torch(loss_of=loss_of, copied=copied)


@on_ranks(2)
def test_gradients_have_the_same_bits_as_in_torch(group):
    model, reference = pair(group)
    for module in (model, reference):
        toy.loss_of(module, *toy.samples()).backward()
    toy.assert_equal(toy.gradients(model), toy.gradients(reference))  # the mean of two equal halves


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_results_may_be_changed_in_place(shape, bias):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))

    def make():
        first, last = nn.Linear(6, 16, bias=bias), nn.Linear(16, 3, bias=bias)
        return nn.Sequential(first, nn.ReLU(inplace=True), last, nn.Hardtanh(inplace=True))

    for given in (inputs, inputs.transpose(0, -2)):
        assert_like_torch(
            make=make, loss_of=lambda module, *_, given=given: module(given).square().mean(), copied=2 * bias
        )


@on_ranks(2)
def test_gradients_returned_by_autograd_grad_are_not_overwritten(group):
    model, _ = pair(group)
    toy.loss_of(model, *toy.samples()).backward()
    model.zero_grad()
    taken = torch.autograd.grad(toy.loss_of(model, *toy.samples()), list(model.parameters()), retain_graph=True)
    before = [each.clone() for each in taken]
    toy.loss_of(model, *(2 * each for each in toy.samples())).backward()
    toy.assert_equal(taken, before)


class Twice(nn.Module):
    """Uses a layer twice, one of whose weights is also another layer's."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(self.first(x))))


class Again(nn.Module):
    """Repeats the forward of one layer in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = layers(), reentrant

    def forward(self, x):
        return self.layers[3:](checkpoint(self.layers[1:3], self.layers[0](x), use_reentrant=self.reentrant))


def with_a_hook():
    module = layers()
    module[0].weight.register_hook(lambda gradient: 2 * gradient)
    return module


def of_inputs(shape):
    """Return a loss of inputs with another number of dimensions, and other strides."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return lambda module, *_: module(inputs.transpose(0, 1)).square().mean()


def with_the_slope(module, inputs, targets):
    inputs = inputs.clone().requires_grad_()
    loss = toy.loss_of(module, inputs, targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + slope.square().sum()


@pytest.mark.parametrize(
    ("make", "loss_of", "copied"),
    [
        pytest.param(layers, of_inputs((4, 3, 6)), 2, id="three dimensions"),
        pytest.param(layers, of_inputs((2, 2, 3, 6)), 2, id="four dimensions"),
        pytest.param(layers, with_the_slope, 5, id="second derivatives"),
        # The sum of the shared weight's gradients, and three biases.
        pytest.param(Twice, toy.loss_of, 4, id="weight used twice"),
        # Two biases, and the weight of the layer that is checkpointed.
        pytest.param(functools.partial(Again, False), toy.loss_of, 3, id="checkpoint"),
        pytest.param(functools.partial(Again, True), toy.loss_of, 3, id="reentrant checkpoint"),
        pytest.param(with_a_hook, toy.loss_of, 3, id="hook that changes a gradient"),
    ],
)
def test_gradients_equal_those_of_torch(make, loss_of, copied):
    assert_like_torch(make=make, loss_of=loss_of, copied=copied)


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
@on_ranks(2)
def test_tensor_hooks_receive_this_ranks_own_gradient(group, hook, late):
    def step(module, rank, between=lambda: None):
        loss = module(torch.full((2, 6), rank + 1.0)).sum()
        between()
        module.zero_grad()
        loss.backward()

    kept, expected, handles = [], [], []
    model, reference = pair(group)
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
    copies = copied_gradients(model)
    step(model, group.rank())
    assert len(copies) == 2, "only biases are copied without a hook"


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, when it first differentiates forwards
@on_ranks(1)
def test_functorch_uses_the_original_layer(group):
    module = toy.seeded(layers())
    DistributedDataParallel(module, process_group=group)
    inputs, _ = toy.samples()
    jacobians = torch.func.vmap(torch.func.jacrev(module))(inputs)
    _, slopes = torch.func.jvp(module, (inputs,), (torch.ones_like(inputs),))
    torch.testing.assert_close(slopes, jacobians.sum(-1))


def everything_in(module):
    return [{name: value for name, value in vars(each).items() if name != "training"} for each in module.modules()]


@on_ranks(2)
def test_modules_keep_classes_attributes_hooks_and_pickles(group):
    """Wrapping and training leave nothing in the user's modules, and inside a forward their classes are torch's."""
    module = toy.seeded(layers())
    looks, before = repr(module), everything_in(module)
    seen = []
    module.register_forward_pre_hook(lambda module, _: seen.append([type(layer) for layer in module]))
    before = everything_in(module)
    model = DistributedDataParallel(module, process_group=group)
    copies = copied_gradients(model)
    for _ in range(2):
        model.zero_grad()
        toy.loss_of(model, *toy.samples()).backward()
    assert len(copies) == 4, "the gradients of weights are computed in their buckets"
    assert [type(layer) for layer in module] == [nn.Linear, nn.GELU, nn.Linear, nn.GELU, nn.Linear]
    assert seen == [[type(layer) for layer in module]] * 2
    assert everything_in(module) == before
    assert repr(module) == looks
    module._forward_pre_hooks.clear()
    assert b"asyncdist" not in pickle.dumps(module)
    inputs, _ = toy.samples()
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(each(inputs), module(inputs))
    assert module.state_dict().keys() == layers().state_dict().keys()


@on_ranks(1)
def test_forward_that_raises_leaves_nothing_in_the_modules(group):
    module = toy.seeded(layers())
    model = DistributedDataParallel(module, process_group=group)
    before = everything_in(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 7))
    assert everything_in(module) == before


@pytest.mark.parametrize("where", ["instance", "class"])
@on_ranks(1)
def test_forward_replaced_by_the_user_is_called(group, monkeypatch, where):
    calls = []

    def doubled(layer, x):
        calls.append(layer)
        return 2 * nn.functional.linear(x, layer.weight, layer.bias)

    module = toy.seeded(layers())
    model = DistributedDataParallel(module, process_group=group)
    if where == "instance":
        module[0].forward = lambda x: doubled(module[0], x)
    else:
        monkeypatch.setattr(nn.Linear, "forward", doubled)
    copies = copied_gradients(model)
    toy.loss_of(model, *toy.samples()).backward()
    assert (len(copies), len(calls)) == ((3, 1) if where == "instance" else (5, 3))


@on_ranks(2)
def test_gradient_of_a_replaced_weight_is_computed_by_torch(group):
    module = toy.seeded(layers())
    model = DistributedDataParallel(module, process_group=group)
    ours = module[0].weight
    # As libraries do that bypass the registration.
    module[0]._parameters["weight"] = nn.Parameter(ours.detach().clone())
    with pytest.raises(GradientError, match=r"gave no gradient to '0\.weight'"):
        toy.loss_of(model, *toy.samples()).backward()
    assert ours.grad is None
    reference = toy.seeded(layers())
    toy.loss_of(reference, *toy.samples()).backward()
    assert torch.equal(module[0].weight.grad, reference[0].weight.grad)


@pytest.mark.parametrize("as_view", [True, False])
@on_ranks(2)
def test_only_large_trained_plain_layers_write_into_buckets_and_only_with_bucket_views(group, monkeypatch, as_view):
    monkeypatch.undo()

    class Derived(nn.Linear):
        pass

    frozen = nn.Linear(256, 256).requires_grad_(False)
    module = nn.Sequential(Derived(256, 256), frozen, nn.Linear(256, 255), nn.Linear(255, 256), nn.Linear(256, 256))
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=as_view)
    copies = copied_gradients(model)
    model(torch.ones(2, 256)).sum().backward()
    found = sorted(tuple(each.shape) for each in copies if each.dim() > 1)
    assert found == ([(255, 256), (256, 255), (256, 256)] if as_view else [])


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "transform",
    [
        lambda module, _: torch.jit.script(module),
        lambda module, inputs: torch.jit.trace(module, inputs),
        lambda module, inputs: torch.export.export(module, (inputs,)).module(),
        lambda module, _: torch.fx.symbolic_trace(module),
    ],
    ids=["scripted", "traced", "exported", "symbolically traced"],
)
@on_ranks(1)
def test_transformed_module_computes_the_same(group, transform):
    module = toy.network()
    model = DistributedDataParallel(module, process_group=group)
    inputs, _ = toy.samples()
    transformed = transform(module, inputs)
    del model
    assert torch.equal(transformed(inputs), module(inputs))
    assert module.to("meta")(inputs.to("meta")).shape == (12, 3)
