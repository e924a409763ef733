"""A world of one rank: gradients are looked at when a backward has ended, and faults are found as with more ranks."""

import gc
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel, hooks
from asyncdist.errors import GradientError
from tests.support.ranks import on_ranks


def layers(count):
    return nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))


def python_calls(function):
    """Return how often ``function`` calls each Python function in this thread, by name."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Counter(calls)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_python_function_runs_for_each_gradient(world_size):
    @on_ranks(world_size)
    def counted(group):
        counts = []
        for count in (10, 40):
            convolutions = nn.Sequential(*(nn.Conv1d(1, 1, 1, bias=False) for _ in range(count)))
            model = DistributedDataParallel(convolutions, process_group=group)
            for _ in range(2):
                loss = model(torch.ones(1, 1, 1)).sum()
                calls = python_calls(loss.backward)
            assert "_end_backward" in calls
            counts.append(calls)
        few, many = counts
        # Ranks that wait for each other poll more or less often, but call nothing of this package.
        assert {name: many[name] for name in ("_ready", "_counted", "add", "fill")} == {
            name: few[name] for name in ("_ready", "_counted", "add", "fill")
        }
        assert world_size > 1 or max((many - few).values(), default=0) < 30

    counted()


@pytest.mark.parametrize("keeps_gradients", [False, True])
@on_ranks(1)
def test_parameters_without_a_gradient_are_named(group, keeps_gradients):
    """Gradients that are kept from step to step need hooks, without which nothing tells that they have changed."""
    module = layers(3)
    model = DistributedDataParallel(module, process_group=group)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        model.zero_grad(set_to_none=not keeps_gradients)
    module[1].forward = lambda x: x
    with pytest.raises(GradientError, match=r"gave no gradient to '1\.weight' on this rank"):
        model(torch.ones(1, 1)).sum().backward()


@pytest.mark.parametrize("finds_output", [True, False])
@on_ranks(2)
def test_gradients_that_come_before_that_of_the_output_are_averaged(group, finds_output):
    class Output:
        def __init__(self, tensor):
            self.tensor = tensor

    class TwoUses(nn.Module):
        def __init__(self):
            super().__init__()
            self.early, self.late = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x):
            output = self.late(x)
            return output if finds_output else Output(output)

    module = TwoUses()
    model = DistributedDataParallel(module, process_group=group)
    x = torch.full((1, 1), group.rank() + 1.0)
    for _ in range(2):
        model.zero_grad()
        output = model(x)
        # Autograd visits what was computed last first.
        loss = (output if finds_output else output.tensor).sum() + module.early(x).sum()
        loss.backward()
        assert [each.grad.item() for each in module.parameters()] == [1.5, 1.5]


@pytest.mark.parametrize("change", ["hook", "static_graph"])
@on_ranks(1)
def test_what_needs_each_gradient_may_be_registered_later(group, change):
    module, seen = layers(2), []

    async def hook(bucket, group):
        seen.append(bucket.buffer().tolist())
        return await hooks.average(bucket, group)

    model = DistributedDataParallel(module, process_group=group)
    if change == "hook":
        model.register_async_comm_hook(hook)
    else:
        model._set_static_graph()
        module[1].forward = lambda x: x
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
    assert len(seen) == (2 if change == "hook" else 0)
    if change == "static_graph":
        del module[1].forward
        with pytest.raises(
            GradientError, match=r"number of gradients of '1\.weight' is not that of the first backward"
        ):
            model(torch.ones(1, 1)).sum().backward()


@on_ranks(1)
def test_backwards_that_average_nothing_leave_nothing_behind(group):
    """Gradients that were recorded in them count neither in the next backward, nor keep the model alive."""

    module = layers(2)
    model = DistributedDataParallel(module, process_group=group)
    output = model(torch.ones(1, 1)).sum()
    for _ in range(3):
        module(torch.ones(1, 1)).sum().backward()
    output.backward()
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    parameter = weakref.ref(module[0].weight)
    del module, model, output
    gc.collect()
    assert parameter() is None


@on_ranks(1)
def test_step_follows_a_backward_that_raised(group):
    def fail(_):
        raise ArithmeticError

    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = DistributedDataParallel(module, process_group=group)
    handle = module[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 1)).sum().backward()
    handle.remove()
    model.module(torch.ones(1, 1)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    assert (model.last_step is not None, module[1].bias.grad.item()) == (True, 1.0)
