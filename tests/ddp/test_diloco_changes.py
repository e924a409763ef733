"""Parameters that a program unfreezes, adds, replaces or swaps during low-communication training."""

import pytest
import torch
from torch import nn

from asyncdist.ddp.low_communication.diloco import BlockingDiLoCo, BlockingLocalSGD
from asyncdist.errors import UsageError
from tests.support.ranks import on_ranks


def network():
    """Return two layers, the first one frozen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model[0].requires_grad_(False)
    return model


def steps(training, rank, count):
    for _ in range(count):
        training.inner.zero_grad()
        training.model(torch.full((1, 2), rank + 1.0)).sum().backward()
        training.step()


def values(model):
    return [each.detach().clone() for each in model.parameters()]


def unfreeze(model):
    model[0].weight.requires_grad_(True)


def add(model):
    model.append(nn.Linear(1, 1))


def replace(model):
    model[0].weight = nn.Parameter(torch.ones(2, 2))


def replace_in_a_dictionary(model):
    model[0]._parameters["weight"] = nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("kind", [BlockingLocalSGD, BlockingDiLoCo])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (unfreeze, r"'0\.weight' required no gradient when (LocalSGD|DiLoCo) was made.*make another"),
        (add, r"'2\.weight' was added or replaced after"),
        (replace, r"'0\.weight' was added or replaced after"),
        (replace_in_a_dictionary, r"'0\.weight' was added or replaced after"),
    ],
)
def test_parameter_that_members_would_not_exchange_is_named(together, kind, change, sentence):
    def rank(group):
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with kind(model, inner, every=2, group=group) as training:
            steps(training, group.rank(), 2)
            change(model)
            with pytest.raises(UsageError, match=sentence):
                training.synchronize()
            with pytest.raises(UsageError, match=sentence):
                steps(training, group.rank(), 2)
        with kind(model, inner, every=2, group=group) as training:
            steps(training, group.rank(), 2)
            training.synchronize()
        return values(model)

    one, other = together(2, rank)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


@on_ranks(2)
def test_swapped_parameters_are_exchanged(group):
    model = network()
    with BlockingLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, group=group) as training:
        torch.utils.swap_tensors(model[1].bias, nn.Parameter(torch.full((1,), float(group.rank()))))
        training.synchronize()
    assert model[1].bias.item() == 0.5


def test_parameter_that_is_frozen_later_is_saved_with_its_outer_value(together):
    def rank(group):
        model = network()
        with BlockingLocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, group=group) as training:
            steps(training, group.rank(), 3)
            model[1].requires_grad_(False)
            state = training.state_dict()
            training.load_state_dict(state)
        return sorted(state["others"]), values(model)

    (others, one), (_, other) = together(2, rank)
    assert others == ["0.bias", "0.weight"]
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
