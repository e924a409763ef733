import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError, GroupError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


def test_no_sync_accumulates_locally_and_the_next_backward_averages_all(together):
    inputs, targets = toy.samples(12)

    def rank(group):
        counting = toy.Counting(group)
        module = toy.network()
        model = DistributedDataParallel(module, process_group=counting)
        parts = list(zip(*(t.split(2) for t in toy.share(group, (inputs, targets))), strict=True))
        counting.issued.clear()
        with model.no_sync():
            for part in parts[:-1]:
                toy.loss_of(model, *part).backward()
        assert counting.issued == []
        local = toy.gradients(module)
        toy.loss_of(model, *parts[-1]).backward()
        averaged = toy.gradients(module)
        with pytest.raises(KeyError), model.no_sync():
            raise KeyError
        assert model.require_backward_grad_sync
        return local, averaged

    results = together(2, rank)
    reference = toy.network()
    for each in range(2):
        for part in zip(*(t[each::2].split(2) for t in (inputs, targets)), strict=True):
            (toy.loss_of(reference, *part) / 2).backward()
    assert not torch.equal(results[0][0][0], results[1][0][0])
    toy.assert_close(results[0][1], toy.gradients(reference))
    toy.assert_equal(results[0][1], results[1][1])


@on_ranks(2)
def test_evaluation_and_gradients_of_inputs_communicate_nothing(group):
    counting = toy.Counting(group)
    model = DistributedDataParallel(toy.network(), process_group=counting)
    counting.issued.clear()
    inputs, targets = toy.samples()
    with torch.no_grad():
        model.eval()
        model(inputs)
    inputs.requires_grad_()
    (gradient,) = torch.autograd.grad(toy.loss_of(model.train(), inputs, targets), inputs)
    assert gradient.abs().sum() > 0
    assert counting.issued == []
    toy.loss_of(model, inputs, targets).backward()
    assert [name for name, _ in counting.issued] == ["all_reduce", "broadcast"]


@pytest.mark.parametrize("size", [1, 2])
def test_parameter_shared_by_reentrant_checkpoints_is_refused_without_a_static_graph(together, size):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    def rank(group):
        model = DistributedDataParallel(Twice(), process_group=group)
        sentence = r"'layer\.(weight|bias)' got a second gradient.*use_reentrant=False.*static_graph=True"
        with pytest.raises(GradientError, match=sentence):
            model(torch.ones(1, 6, requires_grad=True)).sum().backward()

    together(size, rank)


@on_ranks(2)
def test_module_can_be_wrapped_again(group):
    module = toy.network()
    counting = toy.Counting(group)
    first = DistributedDataParallel(module, process_group=group)
    toy.loss_of(first, *toy.share(group, toy.samples())).backward()
    expected = toy.gradients(module)
    module.zero_grad()
    del first
    model = DistributedDataParallel(module, process_group=counting)
    counting.issued.clear()
    toy.loss_of(model, *toy.share(group, toy.samples())).backward()
    assert [name for name, _ in counting.issued] == ["all_reduce", "broadcast"]
    toy.assert_equal(toy.gradients(module), expected)


def test_model_can_be_wrapped_again_after_its_group_has_failed_in_a_backward(together):
    """As members do that go on in another group, while an error still refers to the first wrapper."""
    (inputs, targets), both_have_stepped = toy.samples(8), threading.Barrier(2)

    def rank(group):
        module, own = toy.network(), toy.share(group, (inputs, targets))
        first = DistributedDataParallel(module, process_group=group)
        toy.loss_of(first, *own).backward()
        # A rank may be done with a collective, and abort the group, before the other one is.
        both_have_stepped.wait(60)

        def fail():
            loss = toy.loss_of(first, *own)
            if group.rank() == 0:
                group.abort("a test")
            loss.backward()

        with pytest.raises(GroupError):
            fail()
        successor = group.regroup(background=False).result()
        module.zero_grad(set_to_none=True)
        second = DistributedDataParallel(module, process_group=successor)
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            toy.loss_of(second, *own).backward()
        assert first.module is second.module
        return toy.gradients(module)

    results = together(2, rank)
    toy.assert_equal(*results)
