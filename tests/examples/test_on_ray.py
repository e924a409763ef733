"""The example on Ray, where Ray is installed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = pytest.mark.processes


def test_it_trains_and_answers_meanwhile(run_example):
    ended = run_example("on_ray.py", "--steps=600")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the ranks agree on the weights" in ended.stdout
    answered = [int(count) for count in re.findall(r"(\d+) │$", ended.stdout, re.MULTILINE)]
    assert len(answered) == 2
    assert answered[0] > 0  # rank 0, which the driver asks
