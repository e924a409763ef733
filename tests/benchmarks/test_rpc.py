"""The benchmark of remote calls: a short run with real processes."""

from __future__ import annotations

import pytest

from asyncdist.errors import BenchmarkError
from benchmarks.rpc.benchmark import RpcBenchmark, RpcPlan


@pytest.mark.processes
@pytest.mark.exhaustive
def test_every_case_is_measured():
    plan = RpcPlan(rounds=1, calls=5, bursts=2, in_flight=20, nbytes=1 << 20, transfers=2, fan_outs=1)
    said = []
    report = RpcBenchmark.run(plan, said.append)
    single, rate, tensor, fan_out = report.cases
    for case in (single, rate, tensor):
        assert {"unix", "tcp", "torch"} <= case.samples.keys()
        assert all(case.median(who) > 0 for who in case.samples)
    assert list(fan_out.samples) == ["unix"]
    assert said[0] == "starting the processes"
    assert said[-1] == f"{fan_out.name}: round 1 of 1"
    assert len(RpcBenchmark.page(report).grids[0].rows) == 4


@pytest.mark.processes
def test_end_of_a_caller_is_reported_with_its_last_words(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("def serve(*_): ...\n\ndef call(*_):\n    print('no such thing', flush=True)\n")
    monkeypatch.setattr(RpcBenchmark, "program", program)
    with pytest.raises(BenchmarkError, match=r"a process of the benchmark failed: .*no such thing"):
        RpcBenchmark.run(RpcPlan(rounds=1))
