"""What the warnings of torch's documentation of DistributedDataParallel forbid ends in an error, and not in a hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import AsyncdistError, GradientError, MismatchError


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x)) if hasattr(self, "second") else self.first(x)


def wrapped(group, module=None, **arguments):
    return DistributedDataParallel(module or Two(), process_group=group, **arguments)


def test_torch_warns_of_what_these_tests_cover():
    """Synchronization points, later parameters, order, strides, `torch.autograd.grad`, forks, changed parameters, RPC."""
    assert TorchDDP.__doc__.count(".. warning::") == 8


def other_order(module):
    swapped = nn.Module()
    swapped.second, swapped.first = module.second, module.first
    return swapped


def other_strides(module):
    module.second.weight = nn.Parameter(module.second.weight.detach().t().contiguous().t())
    return module


def more_parameters(module):
    module.third = nn.Linear(1, 1)
    return module


@pytest.mark.parametrize(
    ("change", "name"),
    [(other_order, "first.weight"), (other_strides, "second.weight"), (more_parameters, "third.weight")],
)
def test_models_that_differ_are_refused_on_every_rank(together, change, name):
    def rank(group):
        module = Two()
        with pytest.raises(MismatchError, match=name):
            wrapped(group, change(module) if group.rank() else module)

    together(2, rank)


def remove(module):
    del module.second


def freeze(module):
    module.second.requires_grad_(False)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("change", [remove, freeze])
def test_parameter_that_is_removed_or_frozen_after_wrapping_is_named_on_every_rank(together, change, everywhere):
    def rank(group):
        model = wrapped(group)
        model(torch.ones(1, 3)).sum().backward()
        if everywhere or group.rank():
            change(model.module)
        with pytest.raises(GradientError, match=r"no gradient to 'second\.weight', 'second\.bias' on"):
            model(torch.ones(1, 3)).sum().backward()

    together(2, rank)


def test_buffer_that_only_one_rank_has_ends_in_an_error_on_every_rank(together):
    def rank(group):
        model = wrapped(group, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        model(torch.ones(2, 3)).sum().backward()
        if group.rank():
            model.module.register_buffer("later", torch.ones(5))
        with pytest.raises(AsyncdistError):
            model(torch.ones(2, 3)).sum().backward()

    together(2, rank)


def test_gradients_that_autograd_grad_returns_are_refused_unless_the_graph_is_kept(together):
    def rank(group):
        model = wrapped(group)
        parameters = [model.module.first.weight, model.module.second.bias]
        with pytest.raises(GradientError, match=r"autograd\.grad .* 'first\.weight', 'second\.bias'") as caught:
            torch.autograd.grad(model(torch.ones(1, 3)).sum(), parameters)
        assert caught.value.parameters == ("first.weight", "second.bias")
        loss = model(torch.full((1, 3), float(group.rank()))).sum()
        own, _ = torch.autograd.grad(loss, parameters, retain_graph=True)
        loss.backward()
        return own, parameters[0].grad

    (nothing, average), (own, _) = together(2, rank)
    assert not nothing.any()
    assert own.any()
    torch.testing.assert_close(average, own / 2)


def test_gradient_of_an_input_by_autograd_grad_is_returned(together):
    def rank(group):
        model, x = wrapped(group), torch.ones(1, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        return gradient.shape

    assert together(1, rank) == [(1, 3)]
