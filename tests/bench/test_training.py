"""Training steps: what is trained, by whom, and that nobody is timed who trains another model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

import asyncdist.torch_backend  # noqa: F401 - registers the back end "asyncdist"
from asyncdist import sync
from asyncdist.bench.plan import STEPS as NAMES
from asyncdist.bench.plan import BenchPlan
from asyncdist.bench.workloads import models, training
from asyncdist.bench.workloads.models import STEPS
from asyncdist.errors import BenchmarkError


@pytest.mark.parametrize(("name", "millions"), [("ddp", 6.3), ("fsdp2", 3.2), ("tensor_parallel", 3.2)])
def test_the_models_are_as_large_as_it_is_said(name, millions):
    parameters = sum(parameter.numel() for parameter in STEPS[name].model().parameters())
    assert parameters == pytest.approx(millions * 1e6, rel=0.02)


@pytest.fixture
def small(monkeypatch):
    """Let steps be short: nothing here depends on how large models are."""
    monkeypatch.setattr(models, "_WIDTH", 16)
    monkeypatch.setattr(models, "_CONTEXT", 8)
    monkeypatch.setattr(training, "_WARM_UP_STEPS", 1)


@pytest.fixture
def groups(small, tmp_path):
    """Process groups of torch.distributed by contender, in a world of one, beside our own default world.

    Both are on our back end: gloo leaves descriptors open in the process.
    """
    sync.init_process_group(init_method=(tmp_path / "ours").as_uri(), rank=0, world_size=1)
    torch.distributed.init_process_group("asyncdist", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield {"torch": torch.distributed.group.WORLD, "gloo": torch.distributed.new_group()}
    torch.distributed.destroy_process_group()
    sync.destroy_process_group()


def train(name, groups):
    return training.train(name, BenchPlan(steps=NAMES, repeat=1), groups, 0, lambda: None, lambda share: None)


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_trains_the_same_model(name, groups):
    trained = train(name, groups)
    assert trained.parameters == sum(parameter.numel() for parameter in STEPS[name].model().parameters())
    assert list(trained.timings) == [*(["asyncdist"] if name == "ddp" else []), "torch", "gloo", "alone"]
    assert all(timing.calls == 1 for timing in trained.timings.values())


def test_every_contender_communicates_over_its_own_group(groups):
    """DTensor takes equal meshes for one and the same: what it has worked out for the one it does with the other."""
    theirs, ours = (models._mesh_of(group) for group in groups.values())
    assert theirs != ours
    assert [mesh.get_group() for mesh in (theirs, ours)] == list(groups.values())


def test_without_torch_distributed_only_our_own_ddp_trains(groups):
    assert list(train("ddp", {}).timings) == ["asyncdist", "alone"]


def test_the_steps_have_names():
    assert set(STEPS) == set(NAMES)


def test_a_contender_that_ends_with_other_weights_is_not_timed(groups, monkeypatch):
    made = training._trainers

    def spoiled(name, step, groups):
        trainers = made(name, step, groups)
        with torch.no_grad():
            next(trainers["gloo"].model.parameters()).add_(1e-3)
        return trainers

    monkeypatch.setattr(training, "_trainers", spoiled)
    with pytest.raises(BenchmarkError, match=r"gloo's weights differ from asyncdist's by 0\.001"):
        train("ddp", groups)


def test_ranks_that_end_with_other_weights_are_not_timed(groups, monkeypatch):
    monkeypatch.setattr(training.sync, "broadcast", lambda weights, root: weights.add_(1e-3))
    with pytest.raises(BenchmarkError, match="after training with torch the ranks' weights differ"):
        train("tensor_parallel", groups)
