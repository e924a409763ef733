"""Training steps of the benchmark: the models, the contenders, and the comparison of their weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

import asyncdist.torch_backend  # noqa: F401 - registers the back end "asyncdist"
from asyncdist import sync
from asyncdist.cli.bench.plan import STEPS as NAMES
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.workloads import models, training
from asyncdist.cli.bench.workloads.models import STEPS
from asyncdist.errors import BenchmarkError


@pytest.mark.parametrize(("name", "millions"), [("ddp", 6.3), ("fsdp2", 3.2), ("tensor_parallel", 3.2)])
def test_models_have_the_documented_sizes(name, millions):
    parameters = sum(parameter.numel() for parameter in STEPS[name].model().parameters())
    assert parameters == pytest.approx(millions * 1e6, rel=0.02)


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Process groups of torch.distributed by contender, in a world of one, next to asyncdist's default world.

    Both are on asyncdist's back end, because gloo leaves descriptors open. The models are small.
    """
    monkeypatch.setattr(models, "_WIDTH", 16)
    monkeypatch.setattr(models, "_CONTEXT", 8)
    monkeypatch.setattr(training, "_WARM_UP_STEPS", 1)
    sync.init_process_group(init_method=(tmp_path / "world").as_uri(), rank=0, world_size=1)
    torch.distributed.init_process_group("asyncdist", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield {"torch": torch.distributed.group.WORLD, "gloo": torch.distributed.new_group()}
    torch.distributed.destroy_process_group()
    sync.destroy_process_group()


def train(name, groups):
    return training.train(name, BenchPlan(steps=NAMES, repeat=1), groups, 0, lambda: None, lambda share: None)


@pytest.mark.parametrize("name", ["ddp", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES[1:])])
def test_every_contender_trains_the_same_model(name, groups):
    trained = train(name, groups)
    assert trained.parameters == sum(parameter.numel() for parameter in STEPS[name].model().parameters())
    assert list(trained.timings) == [*(["asyncdist"] if name == "ddp" else []), "torch", "gloo", "alone"]
    assert all(timing.calls == 1 for timing in trained.timings.values())


def test_every_contender_communicates_over_its_own_group(groups):
    sharded = [models.sharded(STEPS["fsdp2"].model(), group) for group in groups.values()]
    meshes = [next(model.parameters()).device_mesh for model in sharded]
    assert meshes[0] != meshes[1]  # DTensor takes equal meshes for one mesh
    assert [mesh.get_group() for mesh in meshes] == list(groups.values())


def test_without_torch_distributed_only_asyncdists_ddp_trains(groups):
    assert list(train("ddp", {}).timings) == ["asyncdist", "alone"]


def test_contender_with_different_weights_is_not_timed(groups, monkeypatch):
    def parallelize(model, group):
        wrapped = models.replicated(model, group)
        if group is groups["gloo"]:
            with torch.no_grad():
                next(wrapped.parameters()).add_(1e-3)
        return wrapped

    monkeypatch.setitem(STEPS, "ddp", STEPS["ddp"]._replace(parallelize=parallelize))
    with pytest.raises(BenchmarkError, match=r"gloo's weights differ from asyncdist's by 0\.001"):
        train("ddp", groups)


@pytest.mark.exhaustive
def test_ranks_with_different_weights_are_not_timed(groups, monkeypatch):
    monkeypatch.setattr(training.sync, "broadcast", lambda weights, root: weights.add_(1e-3))
    with pytest.raises(BenchmarkError, match="after training with torch the ranks' weights differ"):
        train("tensor_parallel", groups)
