"""The benchmark of weights: short runs with real readers, and its table."""

from __future__ import annotations

import pytest

from asyncdist.cli.machine import machine
from asyncdist.testing.hosts import HostsUnavailableError
from benchmarks.weights.benchmark import WeightsCase, WeightsReport, run_weights_benchmark
from benchmarks.weights.plan import WeightsPlan
from benchmarks.weights.table import weights_page


@pytest.mark.processes
@pytest.mark.exhaustive
def test_readers_of_one_host_are_measured():
    said = []
    report = run_weights_benchmark(WeightsPlan(("host",), rounds=2, sizes=(20 << 20,), readers=(1, 2)), said.append)
    assert said
    assert [(case.readers, case.nbytes) for case in report.cases] == [(1, 20 << 20), (2, 20 << 20)]
    for case in report.cases:
        assert len(case.alone) == len(case.published) == len(case.read) == len(case.late) == 2
        assert all(0 < published < max(read) for published, read in zip(case.published, case.read, strict=True))
        assert all(late > 0 for late in case.late)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_readers_on_other_hosts_are_measured():
    plan = WeightsPlan(("hosts",), rounds=1, remote_sizes=(1 << 20,), hosts=(2,), rate="100mbit")
    try:
        report = run_weights_benchmark(plan, lambda doing: None)
    except HostsUnavailableError as error:
        pytest.skip(error.summary)
    assert [case.readers for case in report.cases] == [2]
    assert len(report.cases[0].read[0]) == 2


def test_table_says_whether_the_targets_are_reached():
    fast = WeightsCase("host", 4, 1 << 30, [0.1], [0.12], [[0.15, 0.13]], [0.004], [0.003])
    late = WeightsCase("host", 4, 1 << 30, [0.1], [0.12], [[0.15, 0.13]], [0.020], [0.003])
    slow = WeightsCase("host", 4, 1 << 30, [0.1], [0.12], [[0.15, 0.2]], [0.004], [0.003])
    near = WeightsCase("hosts", 8, 100 << 20, [1.0], [0.1], [[1.2, 1.1]])
    far = WeightsCase("hosts", 8, 100 << 20, [1.0], [0.1], [[1.2, 1.5]])
    page = weights_page(WeightsReport(WeightsPlan(), machine(), [fast, late, slow, near, far]))
    host, hosts = page.grids
    assert [row[-1] for row in host.rows] == ["yes", "no", "no"]
    assert host.rows[0][4:6] == ("150 ms", "67%")
    assert [row[-1] for row in hosts.rows] == ["yes", "no"]
    assert hosts.rows[0][4:6] == ("1.20 s", "1.20×")
    assert "| 8 | 100 MiB |" in page.markdown()
