"""The benchmark of weights: short runs with real readers, and its table."""

from __future__ import annotations

import pytest

from asyncdist.testing.hosts import HostsUnavailableError
from benchmarks.grid import Case, GridReport
from benchmarks.weights.benchmark import (
    ALONE,
    OURS,
    Target,
    WeightsBenchmark,
    WeightsPlan,
    later,
    of_its_rate,
    times_as_long,
)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_readers_of_one_host_are_measured():
    said = []
    report = WeightsBenchmark.run(WeightsPlan(("host",), rounds=2, sizes=(20 << 20,), readers=(1, 2)), said.append)
    assert said
    assert [tuple(case.facts.values()) for case in report.cases] == [(1, 20 << 20), (2, 20 << 20)]
    for case in report.cases:
        measured = [case.of(OURS, quantity) for quantity in ("published", "figure", "late")]
        assert [len(samples) for samples in (case.of(ALONE), *measured)] == [2, 2, 2, 2]
        assert all(0 < published < read and late > 0 for published, read, late in zip(*measured, strict=True))


@pytest.mark.processes
@pytest.mark.exhaustive
def test_readers_on_other_hosts_are_measured():
    plan = WeightsPlan(("hosts",), rounds=1, remote_sizes=(1 << 20,), hosts=(2,), rate="100mbit")
    try:
        report = WeightsBenchmark.run(plan, lambda doing: None)
    except HostsUnavailableError as error:
        pytest.skip(error.summary)
    assert [case.facts["readers"] for case in report.cases] == [2]
    assert report.cases[0].median(OURS) > 0


def test_table_says_whether_the_targets_are_reached(unknown_machine):
    targets = {
        "host": [Target(0.6, of_its_rate, "{:.0%}".format, True, 1.1), Target(0.010, later, str, allowance=1.1)],
        "hosts": [Target(1.3, times_as_long, lambda value: f"{value:.2f}×", allowance=1.1)],
    }

    def case(part, readers, nbytes, alone, published, read, late):
        case = Case(part, "", facts={"readers": readers, "nbytes": nbytes}, targets=targets[part])
        case.add(ALONE, alone)
        case.add(OURS, read, published=published, late=late, late_before=0.003)
        return case

    cases = [case("host", 4, 1 << 30, 0.1, 0.12, *read) for read in ((0.15, 0.004), (0.15, 0.020), (0.2, 0.004))]
    cases += [case("hosts", 8, 100 << 20, 1.0, 0.1, read, 0.0) for read in (1.2, 1.5)]
    page = WeightsBenchmark.page(GridReport(WeightsPlan(), unknown_machine, cases))
    host, hosts = page.grids
    assert [row[-1] for row in host.rows] == ["yes", "no", "no"]
    assert host.rows[0][4:6] == ["150 ms", "67%"]
    assert [row[-1] for row in hosts.rows] == ["yes", "no"]
    assert hosts.rows[0][4:6] == ["1.20 s", "1.20×"]
    assert "| 8 | 100 MiB |" in page.markdown()
