"""What a run has found: figures, tables, page and picture."""

from __future__ import annotations

import pytest

from asyncdist.bench.plan import COLLECTIVES, CONTENDERS, RIVALS, STEPS, WAYS, BenchPlan
from asyncdist.bench.report import plot
from asyncdist.bench.report.markdown_page import digest, markdown
from asyncdist.bench.report.table import bandwidth, duration, sections, size, training_cells
from asyncdist.bench.result import Report, ResultRow, Timing, Training

MACHINE = dict.fromkeys(["processor", "cores", "system", "load", "python", "torch", "asyncdist"], "?")


def timing(milliseconds):
    return Timing(milliseconds * 1e-3, milliseconds * 2e-3, milliseconds * 0.9e-3, 5)


TIMINGS = {"asyncdist": timing(1), "gloo": timing(4), "raw": timing(0.9), "awaited": timing(1.02), "tcp": timing(3)}
TIMINGS |= {
    "mpi": timing(2),
    "registered": timing(0.5),
    "torch": timing(1.25),
    "idle": timing(0.2),
    "copy": timing(0.4),
}
EVERYTHING = BenchPlan(
    ("all_reduce",), (4_000_000,), 4, RIVALS, awaited=True, registered=True, through=WAYS, transports=("auto", "tcp")
)


def shown(plan, row):
    return [(title, {name: text(row) for name, text in columns}) for title, columns in sections(plan)]


def test_sizes_that_come_to_the_same_are_measured_once():
    plan = BenchPlan(("gather", "barrier", "all_reduce"), (0, 1, 7, 1000), ranks=3)
    assert plan.cases == [("gather", 12), ("gather", 1008), ("barrier", 0), ("all_reduce", 4), ("all_reduce", 1000)]


def test_figures():
    row = ResultRow("all_reduce", 4_000_000, 4, TIMINGS)
    assert row.algorithm_bandwidth == pytest.approx(4e9)
    assert row.bus_bandwidth == pytest.approx(6e9)
    factors = {"reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 1, "reduce": 1}
    for collective, factor in factors.items():
        assert ResultRow(collective, 4_000_000, 4, TIMINGS).bus_bandwidth == pytest.approx(4e9 * factor)
    assert row.times_faster_than("gloo") == pytest.approx(4)
    assert row.times_faster_than("gloo", "registered") == pytest.approx(8)
    assert row.copies() == pytest.approx(2.5)
    assert row.above_blocking("awaited") == pytest.approx(2e-5)
    assert row.above_blocking("pigeon") is None
    assert shown(EVERYTHING, row) == [
        (
            "median time of a call",
            {
                "size": "4000000 B",
                "asyncdist": "1.00 ms",
                "p99": "2.00 ms",
                "registered": "500 µs",
                "through torch": "1.25 ms",
                "tcp": "3.00 ms",
                "awaited": "1.02 ms",
                "gloo": "4.00 ms",
                "Open MPI": "2.00 ms",
                "raw sockets": "900 µs",
                "memory copy": "400 µs",
            },
        ),
        (
            "ratios and bandwidth",
            {
                "size": "4000000 B",
                "vs gloo": "4.00×",
                "vs mpi": "2.00×",
                "vs raw": "0.90×",
                "× copy": "2.50×",
                "registered\nvs gloo": "8.00×",
                "registered\nvs mpi": "4.00×",
                "registered\nvs raw": "1.80×",
                "registered\n× copy": "1.25×",
                "through torch\nvs gloo": "3.20×",
                "through torch\nvs mpi": "1.60×",
                "through torch\nvs raw": "0.72×",
                "through torch\n× copy": "3.12×",
                "through torch\n− direct": "+250.0 µs",
                "torch, idle": "200 µs",
                "await − block": "+20.0 µs",
                "algbw": "4.00 GB/s",
                "busbw": "6.00 GB/s",
            },
        ),
    ]


def test_ours_alone_is_one_table():
    ((title, texts),) = shown(BenchPlan(), ResultRow("barrier", 0, 2, {"asyncdist": timing(1)}))
    assert title == ""
    assert texts == {
        "size": "—",
        "asyncdist": "1.00 ms",
        "p99": "2.00 ms",
        "memory copy": "—",
        "× copy": "—",
        "algbw": "—",
        "busbw": "—",
    }


def test_training_is_compared_with_gloo_and_with_the_model_alone():
    training = Training("ddp", 6_300_000, {"asyncdist": timing(3), "gloo": timing(6), "alone": timing(2)})
    assert [cells[3:] for cells in training_cells(training)] == [
        ["2.00×", "1.50×"],
        ["1.00×", "3.00×"],
        ["3.00×", "1.00×"],
    ]
    (found,) = Report(BenchPlan(), MACHINE, training=[training]).as_json()["training"]
    assert (found["step"], found["parameters"]) == ("ddp", 6_300_000)
    assert found["contenders"]["asyncdist"]["times_alone"] == pytest.approx(1.5)
    assert found["contenders"]["asyncdist"]["times_faster_than_gloo"] == pytest.approx(2)


def test_training_without_gloo_is_compared_with_the_model_alone_only():
    training = Training("ddp", 6_300_000, {"asyncdist": timing(3), "alone": timing(2)})
    assert [cells[3:] for cells in training_cells(training)] == [["—", "1.50×"], ["—", "1.00×"]]


@pytest.mark.parametrize("step", STEPS)
def test_every_training_step_has_a_page_of_its_own(step):
    training = Training(step, 3_200_000, {"torch": timing(3), "gloo": timing(6), "alone": timing(2)})
    page = markdown(Report(BenchPlan(), MACHINE, training=[training]))
    assert "3.2 M parameters" in page
    assert "| 3.00 ms | 6.00 ms | 2.00× | 1.50× |" in page
    assert page.count(" on asyncdist |") == page.count(" on gloo |") == 1


@pytest.mark.parametrize("collectives", [COLLECTIVES[:1], COLLECTIVES[:5], COLLECTIVES])
def test_every_contender_is_drawn_and_explained_once(collectives, tmp_path):
    rows = [
        ResultRow(name, nbytes, 4, TIMINGS)
        for name in collectives
        for nbytes in ((0,) if name == "barrier" else (4, 8))
    ]
    figure = plot.benchmark_figure(Report(EVERYTHING, {**MACHINE, "processor": "an abacus"}, rows))
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


def test_the_page_begins_with_a_digest():
    rows = [
        ResultRow(name, nbytes, 4, TIMINGS) for name in ("all_reduce", "broadcast") for nbytes in (4, 65_536, 1 << 20)
    ]
    training = Training("ddp", 6_300_000, {"torch": timing(3), "gloo": timing(6), "alone": timing(2)})
    _, first, _, others, steps = digest(Report(EVERYTHING, MACHINE, rows, training=[training]))
    assert first.splitlines()[0].startswith("| size | ours | awaited | registered | through torch | gloo | Open MPI |")
    assert first.splitlines()[2] == (
        "| 4 B | 1.00 ms | 1.02 ms | 500 µs | 1.25 ms | 4.00 ms | 2.00 ms | 400 µs | 4.00× | 8.00× | 4.00× | 3.20× |"
    )
    assert others.splitlines()[2:] == ["| `broadcast` | 4.00× (8.00×) | 4.00× (8.00×) | 4.00× (8.00×) | — |"]
    assert steps.splitlines()[2].endswith("| 3.00 ms | 6.00 ms | 2.00 ms |")
    few = BenchPlan(("all_reduce",), (4,), 2)
    assert len(digest(Report(few, MACHINE, [ResultRow("all_reduce", 4, 2, {"asyncdist": timing(1)})]))) == 2


def test_summaries():
    timing = Timing.of([float(second) for second in range(200, 0, -1)])
    assert (timing.median, timing.p99, timing.best, timing.calls) == (100.5, 199.0, 1.0, 200)
    assert Timing.of([3.0, 1.0]).p99 == 3.0


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
def test_words_for_figures(text, expected):
    assert text == expected


def test_a_page_without_sizes_shows_no_picture():
    report = Report(BenchPlan(), MACHINE, [ResultRow("barrier", 0, 2, {"asyncdist": Timing(1e-5, 1e-5, 1e-5, 1)})])
    assert "bench.png" not in markdown(report)
    assert "| — | 10.0 µs |" in markdown(report)


def test_the_contenders_of_a_plan():
    plan = BenchPlan(against=RIVALS, awaited=True, registered=True, through=WAYS, transports=("auto", "tcp"))
    assert set(plan.contenders) == {*CONTENDERS, "tcp"}
    assert BenchPlan().contenders == ("asyncdist", "copy")
