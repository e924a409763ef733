"""The benchmark's plan, ratios, tables, page and plot."""

from __future__ import annotations

import pytest

from asyncdist.cli.bench.plan import COLLECTIVES, CONTENDERS, RIVALS, THROUGH, BenchPlan
from asyncdist.cli.bench.plot import benchmark_figure
from asyncdist.cli.bench.result import Report, ResultRow, Timing
from asyncdist.cli.bench.tables import bench_page, columns_of
from asyncdist.cli.page import bandwidth, duration, size

EVERYTHING = BenchPlan(
    ("all_reduce",), (4_000_000,), 4, RIVALS, awaited=True, registered=True, through=THROUGH, transports=("auto", "tcp"),
    than="earlier.json",
)  # fmt: skip


@pytest.fixture
def timings(timing):
    """A timing of each contender of `EVERYTHING`."""
    milliseconds = {"asyncdist": 1, "gloo": 4, "raw": 0.9, "awaited": 1.02, "tcp": 3}
    milliseconds |= {"mpi": 2, "registered": 0.5, "torch": 1.25, "idle": 0.2, "copy": 0.4, "earlier": 1.5}
    return {name: timing(value) for name, value in milliseconds.items()}


def shown(plan, row):
    return {name: text(row) for name, text in columns_of(plan)}


def test_equal_sizes_are_measured_once():
    plan = BenchPlan(("gather", "barrier", "all_reduce"), (0, 1, 7, 1000), ranks=3)
    assert plan.cases == [("gather", 12), ("gather", 1008), ("barrier", 0), ("all_reduce", 4), ("all_reduce", 1000)]


def test_plan_lists_its_contenders():
    assert set(EVERYTHING.contenders) == {*CONTENDERS, "tcp"}
    assert BenchPlan().contenders == ("asyncdist", "copy")


def test_timing_summarizes_calls():
    timing = Timing.of([(float(second) / 2, float(second)) for second in range(200, 0, -1)])
    assert timing == Timing(100.5, 199.0, 1.0, 200, 50.25)
    assert Timing.of([(3.0, 3.0), (1.0, 1.0)]).p99 == 3.0


def test_ratios_and_bandwidths_of_a_collective(timings):
    row = ResultRow("all_reduce", 4_000_000, 4, timings)
    assert row.algorithm_bandwidth == pytest.approx(4e9)
    assert row.bus_bandwidth == pytest.approx(6e9)
    factors = {"reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 1, "reduce": 1}
    for collective, factor in factors.items():
        assert ResultRow(collective, 4_000_000, 4, timings).bus_bandwidth == pytest.approx(4e9 * factor)
    assert row.ratio("gloo", "registered") == pytest.approx(8)
    assert row.above_blocking("awaited") == pytest.approx(2e-5)
    assert row.above_blocking("pigeon") is row.ratio("pigeon", "gloo") is None
    assert shown(EVERYTHING, row) == {
        "size": "4000000 B",
        "asyncdist": "1.00 ms",
        "p99": "2.00 ms",
        "registered": "500 µs",
        "through torch": "1.25 ms",
        "torch, idle": "200 µs",
        "tcp": "3.00 ms",
        "awaited": "1.02 ms",
        "gloo": "4.00 ms",
        "Open MPI": "2.00 ms",
        "raw sockets": "900 µs",
        "earlier": "1.50 ms",
        "memory copy": "400 µs",
        "vs gloo": "4.00×",
        "vs mpi": "2.00×",
        "vs raw": "0.90×",
        "vs earlier": "1.50×",
        "× copy": "2.50×",
    }
    barrier = shown(BenchPlan(), ResultRow("barrier", 0, 2, {"asyncdist": timings["asyncdist"]}))
    assert list(barrier.values()) == ["—", "1.00 ms", "2.00 ms", "—", "—"]


@pytest.mark.parametrize("collectives", [COLLECTIVES[:1], COLLECTIVES])
def test_plot_draws_every_contender_and_explains_it_once(collectives, timings, unknown_machine):
    rows = [
        ResultRow(name, nbytes, 4, timings)
        for name in collectives
        for nbytes in ((0,) if name == "barrier" else (4, 8))
    ]
    figure = benchmark_figure(Report(EVERYTHING, {**unknown_machine, "processor": "an abacus"}, rows))
    panels = [panel for panel in figure.axes if panel.lines]
    assert len(panels) == len(set(collectives) - {"barrier"})
    for panel in panels:
        assert len(panel.lines) == len(EVERYTHING.contenders)
        assert panel.get_xscale() == panel.get_yscale() == "log"
    (legend,) = [*figure.legends, *(panel.get_legend() for panel in figure.axes if panel.get_legend())]
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(set(labels)) == len(EVERYTHING.contenders)
    assert "asyncdist over tcp" in labels
    assert "an abacus" in figure.get_supxlabel()


def test_page_without_sizes_has_no_picture(timing, unknown_machine):
    page = bench_page(Report(BenchPlan(), unknown_machine, [ResultRow("barrier", 0, 2, {"asyncdist": timing(0.01)})]))
    assert "bench.png" not in page.markdown()
    assert "| — | 10.0 µs |" in page.markdown()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(14.24e-6), "14.2 µs"),
        (duration(999.97e-6), "1000 µs"),
        (duration(0.0421), "42.1 ms"),
        (duration(2.5), "2.50 s"),
        (bandwidth(15e6), "15.0 MB/s"),
        (bandwidth(3.39e9), "3.39 GB/s"),
        (size(4), "4 B"),
        (size(300 << 10), "300 KiB"),
        (size(1536 << 10), "1.5 MiB"),
    ],
)
def test_figures_are_written_with_three_digits(text, expected):
    assert text == expected
