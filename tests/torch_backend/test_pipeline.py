"""torch.distributed.pipelining, compared with the same over gloo.

Ranks exchange activations and gradients without a reduction, so the results agree bit for bit.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "program", ["all_forward_then_all_backward", "one_forward_one_backward", "interleaved", "looped", "without_bubbles",
                "without_bubbles_in_a_v", "traced", "evaluated"],
)  # fmt: skip
def test_schedule(same_over_gloo, program):
    same_over_gloo("programs_pipeline", program)


def test_pipeline_with_fsdp2(same_over_gloo):
    same_over_gloo("programs_pipeline", "beside_sharding")
