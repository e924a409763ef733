"""The benchmark of data-parallel training: short runs with real ranks, and its table."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

import asyncdist.torch_backend  # noqa: F401 - registers the back end "asyncdist"
from asyncdist import sync
from asyncdist.errors import BenchmarkError
from benchmarks.ddp import models
from benchmarks.ddp.benchmark import DdpBenchmark, DdpPlan
from benchmarks.ddp.models import WORKLOADS
from benchmarks.ddp.names import CONTENDERS, KEPT, MODELS, STEPS
from benchmarks.ddp.ranks import Trainer, compare_weights, wrapped
from benchmarks.grid import Case, GridReport


def run(*parts, **options):
    said = []
    report = DdpBenchmark.run(DdpPlan(parts, rounds=1, steps=1, **options), said.append)
    assert said
    assert DdpBenchmark.page(report).markdown().startswith("# Data-parallel training")
    return report


@pytest.mark.processes
@pytest.mark.exhaustive
def test_contenders_of_one_host_and_of_one_rank_take_steps_in_turns():
    report = run("small", "steps", "sharded")
    assert [case.facts["model"] for case in report.cases] == ["small", "mlp", "large", "fsdp2", "tensor_parallel"]
    for case in report.cases:
        assert tuple(case.samples) == STEPS[case.part].contenders
        assert all(case.median(who) > 0 for who in case.samples)
    assert report.cases[1].facts["notes"]["auto"].startswith("buckets of")
    assert report.cases[2].facts["gradient_nbytes"] == pytest.approx(1e8, rel=0.02)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_hooks_send_fewer_bytes_between_two_hosts(monkeypatch):
    monkeypatch.setitem(STEPS, "hosts", STEPS["hosts"]._replace(models=("mlp",)))
    (case,) = run("hosts", rate="10gbit").cases
    whole = case.median("asyncdist", "sent")
    assert whole > case.facts["gradient_nbytes"]
    assert case.median("bf16", "sent") / whole == pytest.approx(0.5, abs=0.05)
    assert case.median("int8", "sent") / whole < 0.3


@pytest.mark.processes
@pytest.mark.exhaustive
def test_few_exchanges_send_few_bytes_and_are_as_good():
    (case,) = run("diloco", every=5, outer_steps=2, slow_rate="10gbit").cases
    alone, parallel, diloco = (case.median(who, "sent") for who in case.samples)
    assert alone < diloco < parallel / 10
    assert all(0 < case.median(who, "loss") < 3 for who in case.samples)


def test_names_of_the_plan_have_models():
    assert WORKLOADS.keys() == MODELS.keys()
    assert {who for part in STEPS.values() for who in part.contenders} == CONTENDERS.keys() - {KEPT}


def test_slow_parts_have_fewer_rounds():
    found = [[DdpPlan(rounds=rounds).rounds_of(part) for part in DdpPlan().parts] for rounds in (10, 1)]
    assert found == [[10, 10, 3, 5, 2, 1], [1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(("name", "millions"), [("mlp", 6.3), ("fsdp2", 3.2), ("transformer", 6.4)])
def test_models_have_the_documented_sizes(name, millions):
    parameters = sum(parameter.numel() for parameter in WORKLOADS[name].model().parameters())
    assert parameters == pytest.approx(millions * 1e6, rel=0.02)


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Process groups of torch.distributed by contender, in a world of one, next to asyncdist's default world.

    Both are on asyncdist's back end, because gloo leaves descriptors open. The models are small.
    """
    monkeypatch.setattr(models, "_WIDTH", 16)
    sync.init_process_group(init_method=(tmp_path / "world").as_uri(), rank=0, world_size=1)
    torch.distributed.init_process_group("asyncdist", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield {"torch": torch.distributed.group.WORLD, "gloo": torch.distributed.new_group()}
    torch.distributed.destroy_process_group()
    sync.destroy_process_group()


def test_every_contender_communicates_over_its_own_group(groups):
    sharded = [models.sharded(models.Transformer(), group) for group in groups.values()]
    meshes = [next(model.parameters()).device_mesh for model in sharded]
    assert meshes[0] != meshes[1]  # DTensor takes equal meshes for one mesh
    assert [mesh.get_group() for mesh in meshes] == list(groups.values())


def test_contenders_and_ranks_with_different_weights_are_not_timed(groups, monkeypatch):
    trainers = {who: Trainer(wrapped(who, WORKLOADS["fsdp2"], groups)) for who in groups}
    for trainer in trainers.values():
        torch.manual_seed(1)
        trainer.step(models.sentences(2))
    compare_weights(trainers)
    with torch.no_grad():
        next(trainers["gloo"].model.parameters()).add_(1e-3)
    compare_weights(trainers, lossy=("gloo",))
    with pytest.raises(BenchmarkError, match=r"gloo's weights differ from torch's by 0\.001"):
        compare_weights(trainers)
    monkeypatch.setattr(sync, "broadcast", lambda weights, root: weights.add_(1e-3))
    with pytest.raises(BenchmarkError, match="after training with torch the ranks' weights differ"):
        compare_weights(trainers)


def test_page_has_a_row_for_each_contender(unknown_machine):
    def steps(part):
        case = Case(part, MODELS["mlp"])
        for seconds, hidden in ((0.22, 0.8), (0.23, 0.9), (0.24, 0.7)):
            case.add("asyncdist", seconds, hidden=hidden, forward=0.02, sent=25e6)
            case.add("int8", 0.07, sent=6.25e6)
            case.add("alone", 0.02, sent=0.0)
        return case

    memory = Case("memory", MODELS["large"], "B", facts={"largest_bucket": {"asyncdist": 25 << 20, "alone": 0}})
    training = Case("diloco", "few exchanges")
    for who, peak in (("asyncdist", 110 << 20), ("alone", 100 << 20)):
        memory.add(who, peak)
    for who, seconds, loss, sent, waited in (("alone", 95.0, 2.0, 0.0, 0.0), ("diloco", 100.0, 1.5, 25e6, 0.1)):
        training.add(who, seconds, loss=loss, sent=sent, waited=waited)
    report = GridReport(DdpPlan(rounds=3), unknown_machine, [steps("hosts"), steps("steps"), memory, training])
    grids = DdpBenchmark.page(report).grids
    hosts, one, used, trained = (grid.rows for grid in grids)
    mlp, who = MODELS["mlp"], CONTENDERS["asyncdist"]
    assert hosts[0] == [mlp, who, "230 ms", "25.00", "1.00", "1.15×", "1.05×", "1.00 to 1.09", "80%"]
    assert hosts[1][4:] == ["0.25", "1.40×", "1.00×", "1.00 to 1.00", "—"]
    assert one[0][3:] == ["11.5×", "11.00 to 12.00", "—", "80%"]
    assert used[0][2:] == ["110.0 MiB", "+10.0 MiB", "25.0 MiB"]
    assert trained[1][1:3] == ["100 s", "95.0%"]
