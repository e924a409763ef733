"""The tensor transport for Ray, with Ray's own actors, where Ray is installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program_ray.py"
ROOT = PROGRAM.parents[2]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"),
]


def test_actors_share_or_copy_tensors_of_the_step_in_which_they_were_returned(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'transports'}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    ended = subprocess.run(
        [sys.executable, str(PROGRAM)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(r"^(\d) \((.*?), (.*?), \[3, 4\], (\d+)\) \((.*?), (.*?), \[3, 4\], (\d+)\)$", ended.stdout, re.M)
    assert len(rows) == 6, ended.stdout + ended.stderr
    for step, *values in rows:
        assert values[:2] == values[3:5] == [f"{step}.0"] * 2
        # An actor keeps few segments mapped, and one on another host has its own memory.
        assert 1 <= int(values[2]) <= 5
    assert "kept 5.0 5.0" in ended.stdout
    assert "after death 5.0" in ended.stdout
