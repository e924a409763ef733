"""The benchmark of growing worlds: a short run with real worlds."""

import pytest

from asyncdist.rendezvous import BLOCK
from benchmarks.scale.benchmark import ScaleBenchmark, ScalePlan


@pytest.mark.processes
def test_store_sends_far_less_than_all_introductions_to_all_ranks():
    size = BLOCK + 2
    report = ScaleBenchmark.run(ScalePlan(ranks=(2, size), barriers=2, rounds=1))
    small, large = report.cases
    introduction = small.median("asyncdist", "most_read") / 4
    assert introduction * size < large.median("asyncdist", "sent") < introduction * size**2 / 4
    for case in report.cases:
        assert case.median("asyncdist", "sent") >= case.median("asyncdist", "most_read") > 0
        assert case.median("asyncdist", "first") > 0
    (table,) = ScaleBenchmark.page(report).grids
    assert [row[0] for row in table.rows] == ["2", str(size)]
