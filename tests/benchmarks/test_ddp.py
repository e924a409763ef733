"""The benchmark of data-parallel training: short runs with real ranks, and its table."""

from __future__ import annotations

import pytest

from asyncdist.cli.machine import machine
from asyncdist.testing.hosts import HostsUnavailableError
from benchmarks.ddp.benchmark import run_ddp_benchmark
from benchmarks.ddp.models import WORKLOADS
from benchmarks.ddp.plan import CONTENDERS, KEPT, MODELS, STEPS, DdpPlan, nbytes_per_second
from benchmarks.ddp.result import DdpReport, MemoryCase, StepCase, StepFigures, TrainingCase
from benchmarks.ddp.table import ddp_page


def run(*parts, **options):
    said = []
    report = run_ddp_benchmark(DdpPlan(parts, rounds=1, steps=1, **options), said.append)
    assert said
    assert ddp_page(report).markdown().startswith("# Data-parallel training")
    return report


@pytest.mark.processes
@pytest.mark.exhaustive
def test_contenders_of_one_host_and_of_one_rank_take_steps_in_turns():
    report = run("small", "steps")
    assert [case.model for case in report.steps] == ["small", "mlp", "large"]
    for case in report.steps:
        assert tuple(case.contenders) == STEPS[case.part].contenders
        assert all(figures.seconds[0] > 0 for figures in case.contenders.values())
    assert report.steps[1].contenders["auto"].note.startswith("buckets of")
    assert report.steps[2].gradient_nbytes == pytest.approx(1e8, rel=0.02)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_hooks_send_fewer_bytes_between_two_hosts(monkeypatch):
    monkeypatch.setitem(STEPS, "hosts", STEPS["hosts"]._replace(models=("mlp",)))
    try:
        report = run("hosts", rate="10gbit")
    except HostsUnavailableError as error:
        pytest.skip(error.summary)
    (case,) = report.steps
    whole = case.contenders["asyncdist"].sent[0]
    assert whole > case.gradient_nbytes
    assert case.contenders["bf16"].sent[0] / whole == pytest.approx(0.5, abs=0.05)
    assert case.contenders["int8"].sent[0] / whole < 0.3


@pytest.mark.processes
@pytest.mark.exhaustive
def test_few_exchanges_send_few_bytes_and_are_as_good():
    try:
        report = run("diloco", every=5, outer_steps=2, slow_rate="10gbit")
    except HostsUnavailableError as error:
        pytest.skip(error.summary)
    alone, parallel, diloco = report.training
    assert alone.sent[0] < diloco.sent[0] < parallel.sent[0] / 10
    assert all(0 < case.losses[0] < 3 for case in report.training)


def test_names_of_the_plan_have_models():
    assert WORKLOADS.keys() == MODELS.keys()
    assert {who for part in STEPS.values() for who in part.contenders} == CONTENDERS.keys() - {KEPT}


@pytest.mark.parametrize(("rate", "nbytes"), [("1gbit", 125e6), ("100mbit", 12.5e6), ("8kbit", 1e3)])
def test_rates_are_those_of_tc(rate, nbytes):
    assert nbytes_per_second(rate) == nbytes


@pytest.mark.parametrize("rate", ["", "fast", "0gbit", "1Gbit", "1 gbit"])
def test_other_rates_are_refused(rate):
    with pytest.raises(ValueError, match="is not a rate such as"):
        nbytes_per_second(rate)


def test_slow_parts_have_fewer_rounds():
    found = [[DdpPlan(rounds=rounds).rounds_of(part) for part in DdpPlan().parts] for rounds in (10, 1)]
    assert found == [[10, 10, 5, 2, 1], [1, 1, 1, 1, 1]]


def test_page_has_a_row_for_each_contender():
    plan = DdpPlan(rounds=3)
    figures = {
        "asyncdist": StepFigures([0.22, 0.23, 0.24], [0.8, 0.9, 0.7], [0.02] * 3, [25e6] * 3),
        "int8": StepFigures([0.07] * 3, [], [], [6.25e6] * 3),
        "alone": StepFigures([0.02] * 3, [], [], [0.0] * 3),
    }
    report = DdpReport(
        plan,
        machine(),
        [StepCase("hosts", "mlp", 25_000_000, figures), StepCase("steps", "mlp", 25_000_000, figures)],
        [MemoryCase("large", "asyncdist", [110 << 20] * 3, 25 << 20), MemoryCase("large", "alone", [100 << 20] * 3)],
        [TrainingCase("alone", [95.0], [2.0], [0.0], [0.0]), TrainingCase("diloco", [100.0], [1.5], [25e6], [0.1])],
    )
    hosts, steps, memory, training = ddp_page(report).grids
    mlp = MODELS["mlp"].title
    who = CONTENDERS["asyncdist"]
    assert hosts.rows[0] == (mlp, who, "230 ms", "25.00", "1.00", "1.15×", "1.05×", "1.00 to 1.09", "80%")
    assert hosts.rows[1][4:] == ("0.25", "1.40×", "1.00×", "1.00 to 1.00", "—")
    assert steps.rows[0][3:] == ("11.5×", "11.00 to 12.00", "—", "80%")
    assert memory.rows[0][2:] == ("110.0 MiB", "+10.0 MiB", "25.0 MiB")
    assert training.rows[1][1:3] == ("100 s", "95.0%")
    assert report.as_json()["steps"][0]["contenders"]["int8"]["sent"] == [6.25e6] * 3
