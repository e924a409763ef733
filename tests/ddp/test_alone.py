"""Large gradients: averaged where autograd has put them, unless something else lies there too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from asyncdist.arena import unavailable
from asyncdist.ddp import DistributedDataParallel, buckets
from asyncdist.errors import GradientError

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Call large what has a hundred bytes: of the toy network, two of three weights and no bias."""
    monkeypatch.setattr(buckets, "ALONE_NBYTES", 100)


def alone(toy, module, factor=1):
    toy.loss_of(module, *(factor * tensor for tensor in toy.samples())).backward()
    return toy.gradients(module)


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_a_single_process_on_the_global_batch(together, toy, size, set_to_none, as_view):
    def train(module, optimizer, inputs, targets):
        for _ in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            toy.loss_of(module, inputs, targets).backward()
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    def rank(group):
        ours = DistributedDataParallel(toy.network(), process_group=group, gradient_as_bucket_view=as_view)
        assert [len(names) for names in ours.bucket_parameters].count(1) >= 2
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
        return train(ours, optimizer, *toy.share(group, toy.samples()))

    results = together(size, rank, transport="shm")
    single = toy.network()
    toy.assert_close(results[0], train(single, torch.optim.SGD(single.parameters(), 0.1, 0.9), *toy.samples()))
    for other in results[1:]:
        toy.assert_equal(other, results[0])


@pytest.mark.parametrize("transport", ["shm", "inproc"])
def test_large_gradients_stay_where_autograd_has_put_them(together, toy, transport):
    def rank(group):
        module, places = toy.network(), {}
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, name=name: places.update({name: parameter.grad.data_ptr()})
            )
        ours = DistributedDataParallel(module, process_group=group, bucket_cap_mb=100 / buckets.MIB)
        for _ in range(2):
            ours.zero_grad()
            toy.loss_of(ours, *toy.share(group, toy.samples())).backward()
        toy.assert_close(toy.gradients(module), alone(toy, toy.network()))
        return {name for name, parameter in module.named_parameters() if parameter.grad.data_ptr() == places[name]}

    for stayed in together(2, rank, transport=transport):
        assert stayed == {"0.weight", "2.weight"}


def test_gradients_accumulate_without_and_with_averaging(together, toy):
    def rank(group):
        ours = DistributedDataParallel(toy.network(), process_group=group)
        inputs, targets = toy.share(group, toy.samples())
        with ours.no_sync():
            toy.loss_of(ours, inputs, targets).backward()
        for _ in range(2):
            toy.loss_of(ours, inputs, targets).backward()
        return toy.gradients(ours)

    expected = [3 * gradient for gradient in alone(toy, toy.network())]
    for gradients in together(2, rank, transport="shm"):
        toy.assert_close(gradients, expected)


class Tied(nn.Module):
    """Two parameters whose gradients autograd makes as two views of one tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 60))
        self.second = nn.Parameter(torch.linspace(0, 2, 60))
        self.seen = []

    def forward(self, factor):
        both = torch.cat([self.first, self.second])
        both.register_hook(lambda gradient: self.seen.append(gradient.view(-1)))
        return (both * both * factor).sum()


def test_memory_that_is_not_a_gradients_alone_is_left_alone(together):
    def rank(group):
        module = Tied()
        ours = DistributedDataParallel(module, process_group=group)
        ours(2.0 * group.rank() + 1).backward()
        own = 2 * (2.0 * group.rank() + 1) * torch.cat([module.first, module.second]).detach()
        assert torch.allclose(module.seen[0], own)  # not averaged
        return module.first.grad, module.second.grad

    for first, second in together(2, rank, transport="shm"):
        torch.testing.assert_close(first, 4 * torch.linspace(-1, 1, 60))
        torch.testing.assert_close(second, 4 * torch.linspace(0, 2, 60))


def test_nothing_is_held_that_the_user_lets_go(together, toy):
    def rank(group):
        ours = DistributedDataParallel(toy.network(), process_group=group)
        for _ in range(2):
            ours.zero_grad()
            toy.loss_of(ours, *toy.share(group, toy.samples())).backward()
        held = weakref.ref(ours.module[0].weight.grad.untyped_storage())
        ours.zero_grad(set_to_none=True)
        gc.collect()
        return held() is None

    assert together(2, rank, transport="shm") == [True, True]


def test_a_large_gradient_that_does_not_come_keeps_nobody_waiting(together, toy):
    def rank(group):
        module = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        ours = DistributedDataParallel(toy.seeded(module), process_group=group)
        ours.module.forward = lambda x: sum(layer(x) for layer in list(module)[: 2 - group.rank()])
        try:
            ours(torch.ones(1, 8)).sum().backward()
            said = ""
        except GradientError as error:
            said = str(error)
        return module[0].weight.grad, module[1].weight.grad, said

    (first, second, nothing), (same, none, complaint) = together(2, rank, transport="shm")
    assert torch.equal(first, same)
    assert nothing == ""
    assert "1.weight" in complaint
    assert first[0, 0] == 1
    assert second[0, 0] == 0.5
    assert none is None


def test_channels_last_gradients_are_averaged_in_place(together, toy):
    base = toy.seeded(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    inputs = torch.linspace(-1, 1, 300).view(4, 3, 5, 5)

    def rank(group):
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        module.load_state_dict(base.state_dict())
        DistributedDataParallel(module, process_group=group)(inputs[group.rank() :: 2]).mean().backward()
        return module.weight.grad

    results = together(2, rank, transport="shm")
    base(inputs).mean().backward()
    toy.assert_close(results, [base.weight.grad] * 2)


def test_large_ones_have_buckets_of_their_own():
    mib = buckets.MIB
    nbytes = [mib, 8 * mib, mib // 2, 20 * mib, mib // 2, mib // 2]  # in the order of definition
    order = buckets.definition_order(len(nbytes))
    assert buckets.assign(nbytes, ["f"] * 6, order, buckets.caps(), mib) == ((5, 4), (3,), (2,), (1,), (0,))
    assert buckets.alone((mib, 25 * mib), shares_memory=False) == 25 * mib
    assert buckets.alone((mib, 25 * mib), shares_memory=True) == 100
