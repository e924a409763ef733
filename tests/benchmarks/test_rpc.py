"""The benchmark of remote calls: a short run with real processes, and its table."""

from __future__ import annotations

import pytest

from asyncdist.cli.machine import machine
from asyncdist.errors import BenchmarkError
from benchmarks.rpc import benchmark
from benchmarks.rpc.benchmark import RpcCase, RpcPlan, RpcReport, run_rpc_benchmark
from benchmarks.rpc.table import rpc_page


@pytest.mark.processes
@pytest.mark.exhaustive
def test_every_case_is_measured():
    plan = RpcPlan(rounds=1, calls=5, burst=40, in_flight=20, nbytes=1 << 20, transfers=2, fan_outs=1)
    said = []
    report = run_rpc_benchmark(plan, said.append)
    single, rate, tensor, fan_out = report.cases
    for case in (single, rate, tensor):
        assert {"unix", "tcp", "torch"} <= case.figures.keys()
        assert all(figure > 0 for figure in case.figures.values())
    assert list(fan_out.figures) == ["unix"]
    assert said[0] == "starting the processes"
    assert said[-1] == f"{fan_out.name}: round 1 of 1"


@pytest.mark.processes
def test_end_of_a_caller_is_reported_with_its_last_words(monkeypatch):
    monkeypatch.setattr(benchmark, "python", lambda *_: ["sh", "-c", "echo 'no such thing' >&2"])
    with pytest.raises(BenchmarkError, match="a process that makes calls has ended") as caught:
        run_rpc_benchmark(RpcPlan(rounds=1))
    assert "no such thing" in caught.value.__notes__[0]


def test_table_compares_with_torch_in_the_right_direction():
    cases = [
        RpcCase("a round trip", "s", {"unix": 50e-6, "tcp": 60e-6, "torch": 200e-6}, 60e-6),
        RpcCase("calls", "/s", {"unix": 20_000.0, "torch": 4_000.0}, 30_000.0),
        RpcCase("all objects", "s", {"unix": 0.03}, 60e-3),
    ]
    page = rpc_page(RpcReport(RpcPlan(), machine(), cases))
    assert page.grids[0].columns == (
        "case",
        "asyncdist, one host",
        "asyncdist, TCP",
        "torch RPC",
        "vs torch RPC",
        "target",
    )
    assert page.grids[0].rows == [
        ("a round trip", "50.0 µs", "60.0 µs", "200 µs", "4.00×", "≤ 60.0 µs"),
        ("calls", "20,000/s", "—", "4,000/s", "5.00×", "≥ 30,000/s"),
        ("all objects", "30.0 ms", "—", "—", "—", "≤ 60.0 ms"),
    ]
