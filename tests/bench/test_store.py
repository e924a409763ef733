"""The benchmark of the store: a small run, and what follows from its figures."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from asyncdist.bench.report.store_table import store_markdown
from asyncdist.bench.store import benchmark as bench
from asyncdist.bench.store import client_process
from asyncdist.bench.store.benchmark import Case, Field, StorePlan, StoreReport, run_store_benchmark
from asyncdist.cli import main
from asyncdist.errors import BenchmarkError

SMALL = StorePlan(
    rounds=1, seconds=0.02, clients=(1, 2), in_flight=10, crowd=8, crowd_rounds=1, crowd_processes=2, logged=300
)  # fmt: skip
CROWD = "8 clients connect, authenticate, add, meet at a barrier"


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_small_run_measures_every_case_and_leaves_nothing():
    heard: list[str] = []
    report = run_store_benchmark(SMALL, heard.append)
    names = [case.name for case in report.cases]
    assert names == [
        "torch's client: get",
        "torch's client: add",
        "2 of torch's clients: get",
        "2 of torch's clients: add",
        "our client, one at a time: get",
        "our client, 10 in flight: get",
        CROWD,
        "memory a connection, ours",
        "memory a connection, torch's format",
        "restart from a log of 300 sets",
    ]
    for case in report.cases:
        if case.unit == "KiB":  # what so few take may lie in pages that the server had already
            assert abs(case.ours) < 1024
        else:
            assert case.ours > 0
    assert all(case.torchs for case in report.cases[:-3])
    assert len(heard) == 9


@pytest.mark.processes
def test_a_client_process_that_dies_is_an_error_that_says_what_it_said():
    def ask_nonsense() -> None:
        with Field() as field:
            (worker,) = field.workers(1)
            worker.tell(do="nonsense")
            worker.hear()

    with pytest.raises(BenchmarkError, match="ended before it was done") as caught:
        ask_nonsense()
    assert "Traceback" in caught.value.__notes__[0]


def test_a_client_that_is_held_up_from_the_beginning_has_made_calls_all_the_same():
    assert client_process._rate(lambda: None, 1e-9) > 0


def test_better_is_more_calls_and_less_time_and_a_bar_is_reached_or_not():
    assert Case("", "calls/s", 30.0, 20.0, 1.5).ratio == 1.5
    assert Case("", "calls/s", 30.0, 20.0, 1.5).reached
    assert not Case("", "calls/s", 29.0, 20.0, 1.5).reached
    assert Case("", "s", 2.0, 3.0, 1.0, less_is_better=True).ratio == 1.5
    assert not Case("", "s", 3.0, 2.0, 1.0, less_is_better=True).reached
    assert Case("", "KiB", 19.0, None, 20.0).reached
    assert not Case("", "KiB", 21.0, None, 20.0).reached


def test_the_command_line_shows_and_writes_what_was_found(monkeypatch, tmp_path):
    machine = dict.fromkeys(("processor", "cores", "system", "load", "python", "torch", "uvloop"), "?")
    report = StoreReport(
        SMALL, machine, [Case("get", "calls/s", 1234.5, 1000.0, 1.0), Case("m", "KiB", 2.5, None, 20.0)]
    )
    asked: list[StorePlan] = []
    monkeypatch.setattr(bench, "run_store_benchmark", lambda plan, tell: asked.append(plan) or report)
    shown = CliRunner().invoke(main, ["bench", "store", "--rounds", "3", "--output", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert asked == [StorePlan(rounds=3)]
    assert "1,234" in shown.output
    assert "| get | 1,234 | 1,000 | calls/s | 1.23× | ≥ 1× | yes |" in store_markdown(report)
    assert (tmp_path / "out/store.md").read_text() == store_markdown(report)
    found = json.loads((tmp_path / "out/store.json").read_text())
    assert [(case["ratio"], case["reached"]) for case in found["cases"]] == [(1.2345, True), (None, True)]


def test_parts_can_be_measured_by_themselves(monkeypatch):
    asked: list[StorePlan] = []
    monkeypatch.setattr(bench, "run_store_benchmark", lambda plan, tell: asked.append(plan) or StoreReport(plan, {}))
    monkeypatch.setattr("asyncdist.bench.report.store_table.about_store", lambda report: "")
    shown = CliRunner().invoke(main, ["bench", "store", "--only", "theirs,crowd", "--clients", "8"])
    assert shown.exit_code == 0, shown.output
    assert asked == [StorePlan(parts=("theirs", "crowd"), clients=(8,))]
    assert CliRunner().invoke(main, ["bench", "store", "--only", "nothing"]).exit_code == 2


def test_collectives_are_still_measured_by_name():
    assert "COLLECTIVE" in CliRunner().invoke(main, ["bench", "--help"]).output
    assert "TCPStore" in CliRunner().invoke(main, ["bench", "store", "--help"]).output
    assert CliRunner().invoke(main, ["bench", "nothing"]).exit_code == 2
