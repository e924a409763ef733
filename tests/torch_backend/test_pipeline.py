"""torch.distributed.pipelining, compared with the same over gloo.

Ranks exchange activations and gradients without a reduction, so the results agree bit for bit.
"""

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", ["1F1B", "interleaved 1F1B", "ZBV zero bubble"])
def test_schedule(same_over_gloo, name):
    same_over_gloo("programs_pipeline", "trained", name)


def test_sharded_stages(same_over_gloo):
    same_over_gloo("programs_pipeline", "sharded_stages")
