"""The benchmark of idle ranks: a short run, and its page."""

from __future__ import annotations

import pytest

from benchmarks.idle.benchmark import CONTENDERS, IdleBenchmark, IdlePlan

MIB = 1 << 20


@pytest.mark.processes
@pytest.mark.exhaustive
def test_idle_ranks_are_measured_and_keep_little() -> None:
    said: list[str] = []
    report = IdleBenchmark.run(IdlePlan(ranks=2, rounds=1), said.append)
    assert len(said) == len(CONTENDERS)
    first, other = report.cases
    for case in report.cases:
        assert all(case.median(who) > 3 and case.median(who, "threads") > 1 for who in CONTENDERS)
    for kept in map(other.facts["kept"].get, CONTENDERS[:2]):
        # numpy may have threads of its own.
        assert sum(kept["world"]["threads"].values()) - sum(kept["import"]["threads"].values()) == 2
    # 1.6 and 8.3 MiB on the machine of the documentation.
    assert other.median("shm,tcp", "private") < 2.2 * MIB
    assert other.median("shm,tcp", "imported_private") < 9.3 * MIB
    assert first.median("gloo", "imported_private") < 2 * MIB
    assert [len(grid.rows) for grid in IdleBenchmark.page(report).grids[:1]] == [2 * len(CONTENDERS)]
