"""``asyncdist bench`` in small, and the parts that it stands on."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from asyncdist.bench import raw
from asyncdist.bench.contenders import Blocking
from asyncdist.bench.measure import measure
from asyncdist.bench.plan import COLLECTIVES, Plan, rounds
from asyncdist.bench.processes import connected
from asyncdist.bench.result import Report, Row, Timing
from asyncdist.bench.table import bandwidth, cells, duration, headings, markdown, size
from asyncdist.bench.traffic import traffic
from asyncdist.errors import BenchmarkError


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.processes
def test_a_small_run_gives_table_figures_and_pictures(tmp_path):
    folder, plot = tmp_path / "out", tmp_path / "all.svg"
    asked = ["all_reduce", "barrier", "--sizes", "4,1K", "--against", "gloo,raw", "--awaited", "--ddp", "--repeat", "2"]
    run = bench(*asked, "--output", str(folder), "--plot", str(plot), "--json", "-")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)  # with --json - the table goes to stderr
    assert [(row["collective"], row["nbytes"]) for row in found["rows"]] == [
        ("all_reduce", 4),
        ("all_reduce", 1024),
        ("barrier", 0),
    ]
    for row in found["rows"]:
        assert set(row["contenders"]) == {"asyncdist", "awaited", "gloo", "raw"}
        assert all(timing["calls"] == 2 and timing["median_us"] > 0 for timing in row["contenders"].values())
    assert set(found["training"]["contenders"]) == {"asyncdist", "gloo", "alone"}
    assert found["training"]["parameters"] == pytest.approx(6.3e6, rel=0.01)
    for words in ("all_reduce, 2 ranks", "1 KiB", "vs gloo", "of raw", "await − block", "stock DDP over gloo"):
        assert words in run.stderr
    page = (folder / "bench.md").read_text()
    assert "| 1 KiB |" in page
    assert found["machine"]["processor"] in page
    assert json.loads((folder / "bench.json").read_text()) == found
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in plot.read_text()


@pytest.mark.processes
def test_a_rank_that_fails_is_told_of_and_nobody_is_left():
    run = bench("--sizes", "4", "--transport", "pigeon")
    assert run.returncode == 1
    assert run.stderr.startswith("Error: the benchmark failed; rank ")
    assert "there is no transport 'pigeon'; there are inproc, tcp" in run.stderr


def in_ranks(ranks, program):
    """Run ``program(rank, sockets)`` in a thread a rank."""
    table = connected(ranks)
    failures = []

    def run(rank):
        try:
            program(rank, table[rank])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for sock in (sock for row in table for sock in row if sock is not None):
        sock.close()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("nbytes", [4, 300_000], ids=size)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plain_sockets_compute_what_is_asked(collective, ranks, nbytes):
    def program(rank, sockets):
        case = traffic(collective, rank, ranks, nbytes)
        call = raw.prepare(raw.Sockets(rank, sockets), case)
        case.load()
        call()
        case.check("raw")
        case.settle()
        for _ in range(2):
            case.restore()
            call()
            case.glance("raw")

    in_ranks(ranks, program)


class Idle(Blocking):
    """Does nothing, as fast as can be; from a given call on."""

    name = "idle"

    def __init__(self, honest=0):
        self.honest = honest

    def prepare(self, case):
        def call():
            self.honest -= 1
            if self.honest >= 0:
                case.output.copy_(case.expected([case.contribution(rank) for rank in range(case.ranks)]))

        return call


@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if name != "barrier"])
@pytest.mark.parametrize(("honest", "said"), [(0, "gave a wrong result"), (1, "a timed")])
def test_a_wrong_result_is_never_timed(collective, honest, said):
    receives = 1 if collective in ("broadcast", "scatter") else 0
    case = traffic(collective, receives, 2, 64)
    with pytest.raises(BenchmarkError, match=f"idle: {said}" if honest else f"idle: {collective} .* {said}"):
        measure(case, [Idle(honest)], lambda: None, Plan(repeat=3), lambda share: None)


def test_the_turns_change_and_all_calls_are_made():
    turns = []

    class Noted(Idle):
        def run(self, case, calls, before, after):
            turns.append(self.name)
            return [1.0] * calls

    first, second = Noted(), Noted()
    second.name = "second"
    case = traffic("barrier", 0, 2, 0)
    timings = measure(case, [first, second], lambda: None, Plan(repeat=45), lambda share: None)
    assert turns[2:] == ["idle", "second", "second", "idle", "idle", "second"]
    assert {name: timing.calls for name, timing in timings.items()} == {"idle": 45, "second": 45}
    assert list(rounds(45, 20)) == [20, 20, 5]


def test_figures():
    timings = {"asyncdist": Timing(1e-3, 2e-3, 9e-4, 5), "gloo": Timing(4e-3, 5e-3, 3e-3, 5)}
    timings |= {"raw": Timing(9e-4, 1e-3, 8e-4, 5), "awaited": Timing(1.02e-3, 2e-3, 1e-3, 5)}
    row = Row("all_reduce", 4_000_000, 4, timings)
    assert row.algorithm_bandwidth == pytest.approx(4e9)
    assert row.bus_bandwidth == pytest.approx(6e9)
    factors = {"reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "broadcast": 1, "reduce": 1}
    for collective, factor in factors.items():
        assert Row(collective, 4_000_000, 4, timings).bus_bandwidth == pytest.approx(4e9 * factor)
    assert row.times_faster_than("gloo") == pytest.approx(4)
    assert row.awaiting == pytest.approx(2e-5)
    report = Report(Plan(ranks=4, against=("gloo", "raw"), awaited=True), {}, [row])
    shown = dict(zip(headings(report), cells(row, report), strict=True))
    assert shown == {
        "size": "4000000 B",
        "median": "1.00 ms",
        "p99": "2.00 ms",
        "algbw": "4.00 GB/s",
        "busbw": "6.00 GB/s",
        "gloo": "4.00 ms",
        "vs gloo": "4.00×",
        "raw sockets": "900 µs",
        "of raw": "90%",
        "awaited": "1.02 ms",
        "await − block": "+20.0 µs",
    }


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
    machine = dict.fromkeys(["processor", "cores", "system", "load", "python", "torch", "asyncdist"], "?")
    report = Report(Plan(), machine, [Row("barrier", 0, 2, {"asyncdist": Timing(1e-5, 1e-5, 1e-5, 1)})])
    assert "bench.png" not in markdown(report)
    assert "| — | 10.0 µs |" in markdown(report)
