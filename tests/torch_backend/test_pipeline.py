"""Pipelines of stock torch, against the same over gloo. Nothing is summed between ranks: everything is equal to the bit."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "program", ["all_forward_then_all_backward", "one_forward_one_backward", "interleaved", "looped", "without_bubbles",
                "without_bubbles_in_a_v", "traced", "evaluated"],
)  # fmt: skip
def test_schedule(same_over_gloo, program):
    same_over_gloo("programs_pipeline", program)


@pytest.mark.usefixtures("fsdp2", "means_over_gloo")
def test_beside_sharding(same_over_gloo):
    same_over_gloo("programs_pipeline", "beside_sharding")
