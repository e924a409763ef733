"""torch.distributed.pipelining, compared with the same over gloo.

Ranks exchange activations and gradients without a reduction, so the results agree bit for bit.
"""

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "name", ["GPipe", "1F1B", "interleaved 1F1B", "looped BFS", "interleaved zero bubble", "ZBV zero bubble"]
)
def test_schedule(same_over_gloo, name):
    same_over_gloo("programs_pipeline", "trained", name)


@pytest.mark.parametrize(
    "program", [pytest.param("traced", marks=pytest.mark.exhaustive), "evaluated", "sharded_stages"]
)
def test_pipeline(same_over_gloo, program):
    same_over_gloo("programs_pipeline", program)
