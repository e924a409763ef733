"""Runs between hosts: what limits a row, the runs with fewer hosts, and the report."""

from __future__ import annotations

import dataclasses

import pytest

from asyncdist.cli.bench import launch
from asyncdist.cli.bench.limits import CpuMeter, least_nbytes, limit_of, rate_in_bytes
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.plot import benchmark_figure
from asyncdist.cli.bench.result import Report, ResultRow, Timing
from asyncdist.cli.bench.tables import bench_page
from asyncdist.cli.machine import machine

MB = 1_000_000
PLAN = BenchPlan(("all_reduce", "barrier"), (4, 10 * MB), ranks=16, against=("gloo",), hosts=8, link="1gbit")


@pytest.mark.parametrize(
    ("rate", "expected"),
    [("1gbit", 125e6), ("100 mbit", 12.5e6), ("2.5Gbit", 312.5e6), ("8kbps", 8e3), ("1mibit", 131_072), ("8bit", 1)],
)
def test_rates_are_those_of_tc(rate, expected):
    assert rate_in_bytes(rate) == expected


@pytest.mark.parametrize("rate", ["fast", "", "1g", "gbit", "-1gbit"])
def test_other_rates_are_refused(rate):
    with pytest.raises(ValueError, match="is not a rate such as 1gbit"):
        rate_in_bytes(rate)


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        ("all_reduce", 1400), ("all_gather", 700), ("reduce_scatter", 700), ("broadcast", 800), ("reduce", 800),
        ("all_to_all", 1400), ("gather", 700), ("barrier", 700),
    ],
)  # fmt: skip
def test_least_bytes_on_the_busiest_link(collective, expected):
    assert least_nbytes(collective, 800, 8, 2) == expected


def test_limit_is_the_link_then_the_processors_then_latency():
    assert [limit_of(*shares) for shares in ((0.9, 1.0), (0.5, 0.95), (0.5, 0.2), (0.0, None))] == [
        "link", "CPU", "latency", "latency",
    ]  # fmt: skip


def test_busy_share_of_processors_is_between_none_and_all():
    meter = CpuMeter()
    meter.begin()
    while not meter.shares().get("asyncdist"):
        sum(range(100_000))
        meter.end("asyncdist")
        meter.begin()
    assert 0 < meter.shares()["asyncdist"] <= 1


def row(plan, name, nbytes):
    """A row whose calls take as long as the link needs at half its rate; gloo's take twice as long."""
    seconds = least_nbytes(name, nbytes, plan.hosts, plan.ranks_per_host) / 62.5e6 or 1e-3
    timings = {
        who: Timing(slower * seconds, seconds, seconds, 10, seconds) for who, slower in (("asyncdist", 1), ("gloo", 2))
    }
    return ResultRow(name, nbytes, plan.ranks, timings, busy={"asyncdist": 0.95, "gloo": 0.5})


@pytest.fixture
def report(monkeypatch):
    def run(plan, note):
        rows = [row(plan, *case) for case in plan.cases]
        for each in rows:
            note(each)
        return Report(plan, dict.fromkeys(machine(), "?"), rows)

    monkeypatch.setattr(launch, "run", run)
    noted = []
    report = launch.sweep(PLAN, noted.append)
    assert len(noted) == sum(len(plan.cases) for plan in (*launch.between_fewer_hosts(PLAN), PLAN))
    return report


def test_largest_size_is_also_measured_between_fewer_hosts(report):
    plans = [each.plan for each in report.fewer_hosts]
    assert [(plan.hosts, plan.ranks, plan.cases) for plan in plans] == [
        (2, 4, [("all_reduce", 10 * MB)]),
        (4, 8, [("all_reduce", 10 * MB)]),
    ]
    assert report.plan == PLAN
    assert [part["plan"]["hosts"] for part in report.as_json()["fewer_hosts"]] == [2, 4]
    assert not launch.between_fewer_hosts(dataclasses.replace(PLAN, hosts=2, ranks=4))
    assert not launch.between_fewer_hosts(dataclasses.replace(PLAN, collectives=("barrier",)))


def test_page_says_what_limits_each_row(report):
    page = bench_page(report).markdown()
    assert "8 hosts with 2 ranks each, links of 1gbit" in page
    tables = [line.split(" | ") for line in page.splitlines() if line.startswith("| 10000000 B")]
    assert tables[-1][-4:] == ["50 %", "25 %", "95 %", "CPU |"]
    assert "## all_reduce against the number of hosts" in page
    assert "| 2 | 50 % | 25 % |" in page
    assert "memory copy" not in page


def test_picture_has_a_panel_for_the_number_of_hosts(report):
    panels = [axes.get_title(loc="left") for axes in benchmark_figure(report).axes]
    assert panels[:2] == ["all_reduce, 16 ranks", "all_reduce, 10000000 B, links of 1gbit"]
