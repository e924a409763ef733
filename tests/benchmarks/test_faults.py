"""The benchmark of failures: short runs with real ranks, and its table."""

from __future__ import annotations

import pytest

from asyncdist.cli.machine import machine
from asyncdist.testing.hosts import HostsUnavailableError
from benchmarks.faults import benchmark
from benchmarks.faults.benchmark import FaultCase, FaultsReport, JobCase, run_faults_benchmark
from benchmarks.faults.plan import FAULTS, FaultsPlan
from benchmarks.faults.table import faults_page


def run(*parts, **options):
    said = []
    report = run_faults_benchmark(FaultsPlan(parts, ranks=3, rounds=1, heartbeats=(0.5,), **options), said.append)
    assert said
    return report


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["kill", "stop", "hold"])
def test_ranks_of_one_host_know_of_a_fault_and_go_on(fault):
    report = run(fault, transports=("shm", "tcp"))
    assert [(case.fault, case.contender, case.unaware) for case in report.faults] == [
        (fault, "shm", 0),
        (fault, "tcp", 0),
    ]
    assert all(len(case.told) == len(case.again) == 1 for case in report.faults)
    assert len(faults_page(report).grids[0].rows) == 2


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["kill-host", "cut", "drop"])
def test_ranks_of_two_hosts_know_of_a_fault_and_go_on(fault):
    try:
        report = run(fault)
    except HostsUnavailableError as error:
        pytest.skip(error.summary)
    assert [case.contender for case in report.faults] == ["shm+tcp"]
    assert report.faults[0].unaware == 0
    assert report.faults[0].again


@pytest.mark.processes
@pytest.mark.exhaustive
def test_gloo_does_not_know_of_a_stopped_process_within_the_limit():
    report = run("stop", transports=(), gloo=True, limit=2.0)
    assert [(case.contender, case.unaware) for case in report.faults] == [("gloo", 1)]


@pytest.mark.processes
@pytest.mark.exhaustive
def test_newcomers_join_and_killed_members_are_replaced(monkeypatch):
    monkeypatch.setattr(benchmark, "_UNDISTURBED", 2.0)
    monkeypatch.setattr(benchmark, "_DISTURBED", 2.0)
    report = run("join", "throughput", transports=("shm",), every=(1.0,))
    joined, trained = report.jobs
    assert len(joined.seconds) == 1
    assert trained.share > 0
    assert trained.kills == 8


def test_page_has_a_row_for_each_case():
    report = FaultsReport(
        FaultsPlan(tuple(FAULTS)),
        machine(),
        [
            FaultCase("kill", "shm", 5.0, [0.02, 0.04, 0.03], [0.03, 0.02, 0.05]),
            FaultCase("cut", "gloo", None, unaware=1),
        ],
        [JobCase("join", "tcp", seconds=[0.3]), JobCase("throughput", "tcp", 2.0, share=0.756, kills=4)],
    )
    one, two, jobs = faults_page(report).grids
    assert one.rows == [(FAULTS["kill"], "shm", "5 s", "3", "30.0 ms", "40.0 ms", "30.0 ms", "50.0 ms")]
    assert two.rows == [(FAULTS["cut"], "gloo", "—", "1", "> 60 s", "> 60 s", "—", "—")]
    assert [row[-1] for row in jobs.rows] == ["—", "76%"]
    assert report.as_json()["faults"][0]["told"] == [0.02, 0.04, 0.03]
