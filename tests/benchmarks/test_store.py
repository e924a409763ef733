"""The benchmark of the store: a small run, its processes, and its report."""

from __future__ import annotations

import contextlib
import gc

import pytest

from benchmarks.laboratory import Laboratory
from benchmarks.processes import RankEndedError
from benchmarks.store.benchmark import StoreBenchmark, StorePlan
from benchmarks.store.processes import Clients, call_rate

SMALL = StorePlan(
    rounds=1, seconds=0.02, clients=(1, 2), in_flight=10, crowd=8, crowd_rounds=1, crowd_processes=2, logged=300
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.processes
def test_small_run_measures_every_case():
    progress: list[str] = []
    report = StoreBenchmark.run(SMALL, progress.append)
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
            assert abs(case.median("asyncdist")) < 1024
        else:
            assert case.median("asyncdist") > 0
    assert all(case.of("torch") for case in report.cases[:-3])
    assert len(progress) == 9


@pytest.fixture
def bench():
    """The benchmark with its processes."""
    with Laboratory(StoreBenchmark.program, StoreBenchmark.preload, lambda doing: None) as laboratory:
        yield StoreBenchmark(SMALL, laboratory)


@pytest.mark.processes
def test_error_of_a_client_process_shows_its_standard_error(bench):
    (worker,) = bench.start_clients(1)
    worker.say(("nonsense",))
    with pytest.raises(RankEndedError, match="Traceback"):
        worker.hear()


@pytest.mark.processes
def test_measured_time_of_a_crowd_contains_no_garbage_collection(bench, monkeypatch):
    collections: list[bool] = []
    with bench.server() as server:
        clients = Clients(bench.laboratory.token)
        with contextlib.closing(clients.loop):
            monkeypatch.setattr(gc, "collect", lambda: collections.append(True))
            assert clients.prepare_crowd("asyncdist") == 0
            assert clients.crowd("asyncdist", server.port, 2, 2, "crowd")[0] == 2
    assert collections == [True]


def test_call_rate_of_a_delayed_client_is_positive():
    assert call_rate(lambda: None, 1e-9) > 0
