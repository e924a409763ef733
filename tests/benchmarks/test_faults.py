"""The benchmark of failures: short runs with real ranks, and its table."""

from __future__ import annotations

import pytest

from benchmarks.faults import benchmark
from benchmarks.faults.benchmark import FAULTS, FaultsBenchmark, FaultsPlan
from benchmarks.grid import Case, GridReport


def run(*parts, **options):
    said = []
    report = FaultsBenchmark.run(FaultsPlan(parts, ranks=3, rounds=1, heartbeats=(0.5,), **options), said.append)
    assert said
    return report


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["kill", "stop", "hold"])
def test_ranks_of_one_host_know_of_a_fault_and_go_on(fault):
    report = run(fault, transports=("shm", "tcp"))
    (case,) = report.cases
    assert (case.part, case.facts["unaware"]) == (fault, [])
    assert [len(case.of(who, quantity)) for who in ("shm", "tcp") for quantity in ("figure", "again")] == [1] * 4
    assert len(FaultsBenchmark.page(report).grids[0].rows) == 2


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["kill-host", "cut", "drop"])
def test_ranks_of_two_hosts_know_of_a_fault_and_go_on(fault):
    (case,) = run(fault).cases
    assert (list(case.samples), case.facts["unaware"]) == (["shm+tcp"], [])
    assert case.of("shm+tcp", "again")


@pytest.mark.processes
@pytest.mark.exhaustive
def test_gloo_does_not_know_of_a_stopped_process_within_the_limit():
    report = run("stop", transports=(), gloo=True, limit=2.0)
    assert [case.facts["unaware"] for case in report.cases] == [["gloo"]]


@pytest.mark.processes
@pytest.mark.exhaustive
def test_newcomers_join_and_killed_members_are_replaced(monkeypatch):
    monkeypatch.setattr(benchmark, "_UNDISTURBED", 2.0)
    monkeypatch.setattr(benchmark, "_DISTURBED", 2.0)
    report = run("join", "throughput", transports=("shm",), every=(1.0,))
    joined, trained = report.cases
    assert len(joined.of("shm")) == 1
    assert trained.median("shm") > 0
    assert trained.facts["kills"] == 8


def test_page_compares_with_gloo_under_torchft(unknown_machine):
    killed = Case("kill", FAULTS["kill"], facts={"heartbeat": 5.0, "unaware": ["gloo"]}, samples={"gloo": {}})
    killed.add("shm", 0.02, again=0.03)
    killed.add("asyncdist under torchft", 0.02, again=4.98)
    killed.add("gloo under torchft", 60.0)
    killed.add("gloo under torchft", 62.0, again=4.0)
    report = GridReport(FaultsPlan(("kill",), torchft=True), unknown_machine, [killed])
    (one,) = FaultsBenchmark.page(report).grids
    assert {row[1]: row[-1] for row in one.rows} == {
        "gloo": "—",
        "shm": "1300×",
        "asyncdist under torchft": "13.0×",
        "gloo under torchft": "1.00×",
    }
    assert FaultsBenchmark.file_stem("faults", report.plan) == "faults-torchft"


def test_page_has_a_row_for_each_case(unknown_machine):
    killed = Case("kill", FAULTS["kill"], facts={"heartbeat": 5.0, "unaware": []})
    for told, again in ((0.02, 0.03), (0.04, 0.02), (0.03, 0.05)):
        killed.add("shm", told, again=again)
    cut = Case("cut", FAULTS["cut"], facts={"heartbeat": None, "unaware": ["gloo"]}, samples={"gloo": {}})
    joined, trained = Case("join", "a job"), Case("throughput", "a job", "of", facts={"kills": 4})
    joined.add("tcp", 0.3)
    trained.add("tcp", 0.756)
    report = GridReport(FaultsPlan(tuple(FAULTS)), unknown_machine, [killed, cut, joined, trained])
    one, two, jobs = FaultsBenchmark.page(report).grids
    assert one.rows == [[FAULTS["kill"], "shm", "5 s", "3", "30.0 ms", "40.0 ms", "30.0 ms", "50.0 ms"]]
    assert two.rows == [[FAULTS["cut"], "gloo", "—", "1", "> 60 s", "> 60 s", "—", "—"]]
    assert [row[-1] for row in jobs.rows] == ["—", "76%"]
    assert report.as_json()["cases"][0]["samples"]["shm"]["figure"] == [0.02, 0.04, 0.03]
