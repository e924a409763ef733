"""Models of which a backward does not use every parameter: find_unused_parameters, static_graph, and others."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


class Branches(nn.Module):
    """Layers of one weight each; a forward uses some of them. Every gradient is the input."""

    def __init__(self, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))

    def forward(self, x, used):
        return sum(self.layers[index](x) for index in used) + 0 * x.sum()


def step(model, group, used, *, zero=True, factor=1.0):
    if zero:
        model.zero_grad()
    x = torch.full((1, 1), factor * (group.rank() + 1.0), requires_grad=True)
    model(x, used).sum().backward()
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("cap", [1e-6, None])
@on_ranks(2)
def test_parameters_unused_on_some_ranks_are_averaged_and_those_unused_everywhere_are_not(group, as_view, cap):
    model = DistributedDataParallel(
        Branches(),
        process_group=group,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
        bucket_cap_mb=cap,
    )
    first = step(model, group, [0, 1, 2, 3])
    second = step(model, group, [0, 1] if group.rank() == 0 else [0, 2])
    third = step(model, group, [] if group.rank() == 0 else [3])
    none = step(model, group, [])
    again = step(model, group, [0, 1, 2, 3])
    assert (first, second, third) == ([1.5] * 4, [1.5, 0.5, 1.0, None], [None, None, None, 1.0])
    assert (none, again) == ([None] * 4, [1.5] * 4)


@pytest.mark.parametrize("as_view", [True, False])
@on_ranks(2)
def test_unused_parameters_keep_and_contribute_accumulated_gradients(group, as_view):
    model = DistributedDataParallel(
        Branches(3), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    step(model, group, [0, 1])
    with model.no_sync():
        step(model, group, [2] if group.rank() == 0 else [], zero=False)
    assert step(model, group, [0], zero=False) == [3.0, 1.5, 0.5]


@on_ranks(2)
def test_autograd_grad_averages_nothing_where_parameters_may_be_unused(group):
    model = DistributedDataParallel(Branches(2), process_group=group, find_unused_parameters=True)
    if group.rank() == 0:
        x = torch.ones(1, 1, requires_grad=True)
        torch.autograd.grad(model(x, [0]).sum(), [x])
    assert step(model, group, [0]) == [1.5, None]


class Shared(nn.Module):
    """One layer in two re-entrant checkpoints, and one layer that is never used."""

    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@on_ranks(2)
def test_static_graph_allows_shared_parameters_of_checkpoints_and_unused_ones(group):
    model = DistributedDataParallel(toy.seeded(Shared()), process_group=group, static_graph=True, bucket_cap_mb=1e-5)
    reference = toy.seeded(Shared())
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        model(torch.full((1, 3), group.rank() + 1.0, requires_grad=True)).sum().backward()
        for each in range(2):
            (reference(torch.full((1, 3), each + 1.0, requires_grad=True)).sum() / 2).backward()
        toy.assert_close([model.module.layer.weight.grad], [reference.layer.weight.grad])
        assert model.module.spare.weight.grad is None


@pytest.mark.parametrize(("first", "later"), [([0], [0, 1]), ([0, 1], [0])])
@on_ranks(2)
def test_static_graph_that_changes_raises_on_every_rank(group, first, later):
    model = DistributedDataParallel(Branches(2), process_group=group, static_graph=True)
    step(model, group, first)
    with pytest.raises(
        GradientError, match=r"static_graph=True, but on .* of 'layers.1.weight' is not that of the first"
    ):
        step(model, group, later if group.rank() == 1 else first)


@on_ranks(2)
def test_skipped_parameters_are_not_sent_and_must_stay_unused(group):
    counting = toy.Counting(group)
    model = DistributedDataParallel(
        Branches(4), process_group=counting, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6
    )
    assert step(model, group, [0, 2]) == [1.5, None, 1.5, None]
    counting.issued.clear()
    assert step(model, group, [0, 2]) == [1.5, None, 1.5, None]
    assert len(counting.issued) == len(model.bucket_parameters) == 2
    with pytest.raises(GradientError, match=r"'layers.3.weight' got a gradient .*skip_all_reduce_unused_params"):
        step(model, group, [0, 2, 3] if group.rank() == 1 else [0, 2])


@on_ranks(2)
def test_delayed_parameters_are_averaged_in_buckets_of_their_own_at_the_end(group):
    module = Branches(4)
    delayed = [item for item in module.named_parameters() if item[0] in ("layers.3.weight", "layers.1.weight")]
    model = DistributedDataParallel(
        module,
        process_group=group,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=module.layers[0].weight,
    )
    for _ in range(2):
        assert step(model, group, [0, 1, 2, 3]) == [1.5] * 4
        assert {frozenset(names) for names in model.bucket_parameters} == {
            frozenset(["layers.0.weight", "layers.2.weight"]), frozenset(["layers.1.weight", "layers.3.weight"])
        }  # fmt: skip
        assert "layers.1.weight" in model.bucket_parameters[-1]


@on_ranks(2)
def test_hook_of_the_user_changes_the_gradient_before_it_is_averaged(group):
    def double(parameter):
        parameter.grad.mul_(2)

    module = Branches(2)
    module.layers[0].weight.register_post_accumulate_grad_hook(double)
    model = DistributedDataParallel(module, process_group=group)
    handle = module.layers[1].weight.register_post_accumulate_grad_hook(double)
    found = [step(model, group, [0, 1]), step(model, group, [0, 1])]
    handle.remove()
    assert [*found, step(model, group, [0, 1])] == [[3.0, 3.0], [3.0, 3.0], [3.0, 1.5]]


@on_ranks(2)
def test_memory_of_lazy_buckets_is_freed_after_each_backward(group):
    model = DistributedDataParallel(
        Branches(2), process_group=group, gradient_as_bucket_view=False, lazy_bucket_allocation=True
    )
    for _ in range(3):
        assert step(model, group, [0, 1]) == [1.5] * 2
        assert all(bucket.flat is None for bucket in model._reducer._bucket_set.buckets)


@on_ranks(2)
def test_caller_may_finalize_backward(group):
    model = DistributedDataParallel(Branches(2), process_group=group, bucket_cap_mb=1e-6)
    model.require_manual_backward_finalization = True
    for _ in range(3):
        step(model, group, [0, 1])
        assert model.should_finalize_after_backward
        model.finalize_backward()
        assert [p.grad.item() for p in model.parameters()] == [1.5] * 2
    with pytest.raises(ValueError, match="no backward waits"):
        model.finalize_backward()
    step(model, group, [0, 1])
    with pytest.raises(ValueError, match=r"call finalize_backward\(\) before the next forward"):
        step(model, group, [0, 1])
    model.finalize_backward()
    model.require_manual_backward_finalization = False
    assert step(model, group, [0, 1]) == [1.5] * 2
    with pytest.raises(ValueError, match="has finished by itself"):
        model.finalize_backward()
