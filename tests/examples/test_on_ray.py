"""The example on Ray, where Ray is installed."""

import importlib.util
import re

import pytest

pytestmark = pytest.mark.processes
INSTALLED = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(not INSTALLED, reason="Ray is not installed: pip install ray")
def test_ranks_train_and_answer_calls(run_example):
    ended = run_example("on_ray.py", "--steps=600")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the weights of the ranks are equal" in ended.stdout
    answered = [int(count) for count in re.findall(r"(\d+) │$", ended.stdout, re.MULTILINE)]
    assert len(answered) == 2
    assert answered[0] > 0, "the driver asks rank 0"


@pytest.mark.exhaustive
@pytest.mark.skipif(INSTALLED, reason="Ray is installed")
def test_missing_ray_is_reported(run_example):
    assert run_example("on_ray.py", "--help").stdout.startswith("usage: on_ray.py")
    ended = run_example("on_ray.py")
    assert (ended.returncode, ended.stderr.strip()) == (1, "Ray is not installed: pip install ray")
