"""The benchmark of the store: a small run, its processes, and its report."""

from __future__ import annotations

import contextlib
import gc
import json

import pytest
from click.testing import CliRunner

from asyncdist.errors import BenchmarkError
from benchmarks.__main__ import main
from benchmarks.store import benchmark
from benchmarks.store.benchmark import Case, StorePlan, StoreProcesses, StoreReport, run_store_benchmark
from benchmarks.store.client_process import Clients, call_rate
from benchmarks.store.table import store_page

SMALL = StorePlan(
    rounds=1, seconds=0.02, clients=(1, 2), in_flight=10, crowd=8, crowd_rounds=1, crowd_processes=2, logged=300
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.processes
def test_small_run_measures_every_case():
    progress: list[str] = []
    report = run_store_benchmark(SMALL, progress.append)
    assert [case.name for case in report.cases] == [
        "torch's client: get",
        "torch's client: add",
        "2 of torch's clients: get",
        "2 of torch's clients: add",
        "asyncdist's client, one at a time: get",
        "asyncdist's client, 10 in flight: get",
        "8 clients connect, authenticate, add, meet at a barrier",
        "memory per connection, asyncdist's format",
        "memory per connection, torch's format",
        "restart from a log of 300 sets",
    ]
    for case in report.cases:
        if case.unit == "KiB":  # few connections may fit into pages that the server already had
            assert abs(case.ours) < 1024
        else:
            assert case.ours > 0
    assert all(case.torchs for case in report.cases[:-3])
    assert len(progress) == 9


@pytest.mark.processes
def test_error_of_a_client_process_shows_its_standard_error():
    def send_unknown_command() -> None:
        with StoreProcesses() as processes:
            (worker,) = processes.start_clients(1)
            worker.send(do="nonsense")
            worker.receive()

    with pytest.raises(BenchmarkError, match="ended during a command") as caught:
        send_unknown_command()
    assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.processes
def test_measured_time_of_a_crowd_contains_no_garbage_collection(monkeypatch):
    collections: list[bool] = []
    with StoreProcesses() as processes, processes.server() as server:
        clients = Clients(processes.token)
        with contextlib.closing(clients.loop):
            monkeypatch.setattr(gc, "collect", lambda: collections.append(True))
            assert clients.prepare_crowd("asyncdist") == 0
            assert clients.crowd("asyncdist", server.port, 2, 2, "crowd")["served"] == 2
    assert collections == [True]


def test_call_rate_of_a_delayed_client_is_positive():
    assert call_rate(lambda: None, 1e-9) > 0


@pytest.mark.parametrize(
    ("case", "ratio", "reached"),
    [
        (Case("", "calls/s", 30.0, 20.0, 1.5), 1.5, True),
        (Case("", "calls/s", 29.0, 20.0, 1.5), 1.45, False),
        (Case("", "s", 2.0, 3.0, 1.0, less_is_better=True), 1.5, True),
        (Case("", "s", 4.0, 2.0, 1.0, less_is_better=True), 0.5, False),
        (Case("", "KiB", 19.0, None, 20.0), None, True),
        (Case("", "KiB", 21.0, None, 20.0), None, False),
    ],
)
def test_case_compares_its_ratio_or_its_figure_with_the_bar(case, ratio, reached):
    assert (case.ratio, case.reached) == (ratio, reached)


@pytest.fixture
def plans(monkeypatch, unknown_machine):
    """The plans of benchmarks, which are recorded instead of executed; each reports the same two cases."""
    cases = [Case("get", "calls/s", 1234.5, 1000.0, 1.0), Case("m", "KiB", 2.5, None, 20.0)]
    found: list[StorePlan] = []

    def run(plan, progress):
        found.append(plan)
        return StoreReport(plan, unknown_machine, cases)

    monkeypatch.setattr(benchmark, "run_store_benchmark", run)
    return found


def test_command_shows_and_writes_the_report(plans, tmp_path):
    run = CliRunner().invoke(main, ["store", "--rounds", "3", "--output", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    assert plans == [StorePlan(rounds=3)]
    assert "1,234" in run.output
    page = (tmp_path / "out/store.md").read_text()
    assert "| get | 1,234 | 1,000 | calls/s | 1.23× | ≥ 1× | yes |" in page
    assert page.startswith("# The store\n\n?, ? cores")
    found = json.loads((tmp_path / "out/store.json").read_text())
    assert [(case["ratio"], case["reached"]) for case in found["cases"]] == [(1.2345, True), (None, True)]


def test_command_measures_selected_parts(plans):
    run = CliRunner().invoke(main, ["store", "--only", "torch,crowd", "--clients", "8"])
    assert run.exit_code == 0, run.output
    assert plans == [StorePlan(parts=("torch", "crowd"), clients=(8,))]
    assert CliRunner().invoke(main, ["store", "--only", "nothing"]).exit_code == 2
    assert store_page(StoreReport(plans[0], dict.fromkeys(benchmark.machine(), "?"))).grids[0].rows == []


@pytest.mark.parametrize("clients", ["1,0", "many"])
def test_invalid_number_of_clients_is_named(clients):
    run = CliRunner().invoke(main, ["store", "--clients", clients])
    assert run.exit_code == 2
    assert f"'{clients}' is not a list of positive numbers such as 1,8" in run.output
