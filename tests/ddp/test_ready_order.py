"""Whatever the order of the gradients on each rank, all ranks all-reduce the same buckets in the same order."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from asyncdist.testing.cluster import run_ranks


class Chain(nn.Module):
    """Layers of several sizes, used in the order `turn`, whose gradients arrive in the reverse order of their use."""

    def __init__(self, widths, turn):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in widths)
        for layer in self.layers:
            nn.init.ones_(layer.weight)
        self.turn = turn

    def forward(self, x):
        for index in self.turn:
            width = self.layers[index].in_features
            x = x + self.layers[index](torch.ones(1, width) * x.mean() / width).mean()
        return x


def orders(count):
    return st.permutations(range(count))


@st.composite
def programs(draw):
    """Draw the layers' widths, an order of use for each rank, and the cap of a bucket in bytes."""
    widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    size = draw(st.integers(1, 3))
    turns = [draw(orders(len(widths))) for _ in range(size)]
    unused = draw(st.booleans())
    if unused:
        turns = [turn[: draw(st.integers(1, len(turn)))] for turn in turns]
    return widths, turns, draw(st.integers(1, 300)), unused


def reference_of(widths, turn):
    module = Chain(widths, turn)
    module(torch.ones(1)).sum().backward()
    return [None if parameter.grad is None else parameter.grad for parameter in module.parameters()]


@pytest.mark.exhaustive
@hypothesis.settings(max_examples=60)
@hypothesis.given(programs())
def test_all_ranks_send_the_same_buckets_in_the_same_order(program):
    widths, turns, cap, unused = program

    def rank(group):
        module = Chain(widths, turns[group.rank()])
        model = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=cap / (1 << 20), find_unused_parameters=unused
        )
        layouts = []
        for _ in range(3):
            model.zero_grad()
            layouts.append(model.bucket_parameters)
            model(torch.ones(1)).sum().backward()
            started = [bucket.started for bucket in model.last_step.buckets]
            assert started == sorted(started), "in the order of the buckets"
        return layouts, [parameter.grad for parameter in module.parameters()]

    results = run_ranks(len(turns), rank)
    for layouts, _ in results:
        assert layouts == results[0][0]
        for layout in layouts:
            assert sorted(name for names in layout for name in names) == sorted(
                f"layers.{index}.weight" for index in range(len(widths))
            )
    # The buckets of later steps follow the order in which rank 0's gradients arrived.
    arrived = [f"layers.{index}.weight" for index in reversed(turns[0])]
    flat = [name for names in results[0][0][1] for name in names]
    assert [name for name in flat if name in arrived] == arrived
    references = [reference_of(widths, turn) for turn in turns]
    for index in range(len(widths)):
        own = [gradients[index] for gradients in references]
        for _, gradients in results:
            if all(each is None for each in own):
                assert gradients[index] is None
            else:
                total = sum(each for each in own if each is not None)
                torch.testing.assert_close(gradients[index], total / len(turns))
