"""Ctrl-C of an example that starts processes: one line, the exit status 130, and no process is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.resources import children

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]


def has_loaded_torch(pid):
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    ("program", "count"),
    [("actor_learner.py", 3), ("ddp_with_parameter_server.py", 2), ("parameter_server.py", 3), ("survive.py", 4)],
)
def test_interrupt_prints_one_line_and_ends_all_processes(program, count, tmp_path, until):
    example = subprocess.Popen(
        [sys.executable, EXAMPLES / program],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with example:
        # The example has started the last one for long when that one has loaded torch.
        until(lambda: sum(map(has_loaded_torch, children(example.pid))) == count)
        started = children(example.pid)
        # The processes of a terminal's foreground group get the signal.
        os.killpg(example.pid, signal.SIGINT)
        assert example.communicate(timeout=60.0)[1].split() == ["interrupted"]
    assert example.returncode == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
