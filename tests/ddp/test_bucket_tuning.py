"""``bucket_cap_mb="auto"``: the first steps try bucket sizes, and all ranks choose the same one."""

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from asyncdist.ddp import DistributedDataParallel, buckets, hooks
from asyncdist.ddp.buckets import DEFAULT_CAP_NBYTES, MIB, BucketTuning
from asyncdist.errors import UsageError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


def tune(ranks, seconds):
    """Step all ranks until they have chosen, and return the caps of the steps; ``seconds(rank, cap)`` is what one takes."""
    used = []
    while ranks[0].chosen is None:
        assert len({each.cap for each in ranks}) == 1
        used.append(ranks[0].cap)
        assert len(used) < 200
        if {each.record(seconds(rank, each.cap)) for rank, each in enumerate(ranks)} == {True}:
            slowest = [max(times) for times in zip(*(each.medians for each in ranks), strict=True)]
            for each in ranks:
                each.decide(slowest)
    return used


@given(
    st.integers(2, 4),
    st.integers(1, 300),
    st.dictionaries(st.integers(0, 3), st.lists(st.floats(0, 9), min_size=7), min_size=4),
)
def test_all_ranks_try_the_same_caps_and_choose_that_of_the_shortest_time_on_the_slowest_rank(size, mib, table):
    ranks = [BucketTuning(mib * MIB) for _ in range(size)]
    places = [cap for cap in (1, 4, 10, 25, 50, 100) if cap < mib]
    caps = [*(place * MIB for place in places), mib * MIB]

    def seconds(rank, cap):
        return table[rank][caps.index(cap)]

    used = tune(ranks, seconds)
    chosen = {each.chosen for each in ranks}
    if mib == 1:
        assert chosen == {DEFAULT_CAP_NBYTES}
        return
    assert set(used) == set(caps)
    slowest = {cap: max(seconds(rank, cap) for rank in range(size)) for cap in caps}
    assert {slowest[each] for each in chosen} == {min(slowest.values())}
    assert len(chosen) == 1
    assert ranks[0].limits[1] == ranks[0].chosen


def test_noise_of_one_step_does_not_decide():
    tuning, taken = BucketTuning(30 * MIB), iter(range(1000))
    # Each fourth step is ten times as long, whatever its cap.
    tune([tuning], lambda _, cap: (10.0 if next(taken) % 4 == 1 else 1.0) * (1.0 if cap == 4 * MIB else 1.2))
    assert tuning.chosen == 4 * MIB
    assert str(tuning).startswith(
        "buckets of 4 MiB, by the time until the last all-reduce had ended: 1 MiB 1200.00 ms, 4"
    )
    assert "one bucket" in str(tuning)


def test_caps_are_tried_in_a_limited_number_of_steps():
    tuning = BucketTuning(1000 * MIB)
    assert str(tuning) == "trying buckets of 1 MiB"
    assert len(tune([tuning], lambda _, cap: 1.0)) == 64
    assert str(BucketTuning(1000 * MIB, tries=False)) == "buckets of 25 MiB: there was nothing to choose"


@pytest.fixture
def small_caps(monkeypatch):
    """Try caps of 64 bytes and more."""
    monkeypatch.setattr(buckets, "MIB", 64)


@pytest.mark.parametrize(
    ("arguments", "none"),
    [({}, True), ({}, False), ({"find_unused_parameters": True}, False), ({"gradient_as_bucket_view": False}, True)],
)
def test_model_trains_with_the_same_numbers_while_sizes_are_tried(together, small_caps, caplog, arguments, none):
    def rank(group):
        model = DistributedDataParallel(toy.network(), process_group=group, bucket_cap_mb="auto", **arguments)
        reference = toy.network()
        layouts = []
        for step in range(70):
            for each in (model, reference):
                each.zero_grad(set_to_none=none)
            inputs, targets = toy.samples()
            toy.loss_of(model, *toy.share(group, (inputs + step, targets))).backward()
            toy.loss_of(reference, inputs + step, targets).backward()
            toy.assert_close(toy.gradients(model), toy.gradients(reference))
            layouts.append(model.bucket_parameters)
        assert model.bucket_tuning.chosen is not None
        assert model.bucket_bytes_cap == model.bucket_tuning.chosen
        assert layouts[-1] == layouts[-2]
        return layouts

    with caplog.at_level(logging.INFO, "asyncdist"):
        found = together(2, rank)
    assert found[0] == found[1]
    assert len({str(layout) for layout in found[0]}) >= 3
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if text.startswith("DistributedDataParallel uses buckets of ")]) == 1


def test_ranks_without_inputs_follow_the_tries_of_the_others(together, small_caps):
    def rank(group):
        model = DistributedDataParallel(toy.network(), process_group=group, bucket_cap_mb="auto")
        with model.join():
            for _ in range(70 if group.rank() else 7):
                model.zero_grad()
                toy.loss_of(model, *toy.samples()).backward()
        return model.bucket_tuning.chosen, model.bucket_parameters

    first, second = together(2, rank)
    assert first == second
    assert first[0] is not None


@on_ranks(1)
def test_hook_is_refused_and_a_copy_tries_again(group):
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=group, bucket_cap_mb="auto")
    with pytest.raises(UsageError, match="'auto' measures all-reduces, which a communication hook replaces"):
        model.register_async_comm_hook(hooks.bf16)
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.bucket_tuning is not model.bucket_tuning
    assert DistributedDataParallel(nn.Linear(2, 1), process_group=group).bucket_tuning is None
