"""Fixtures of the examples' tests: run an example under torchrun or alone, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import Nursery

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def bare_nursery():
    with Nursery(("torch._dynamo", "asyncdist.ddp", "sklearn.datasets", "matplotlib.pyplot")) as nursery:
        yield nursery


@pytest.fixture
def run_example(tmp_path, run_python):
    """Run an example in an empty folder and return the completed process: ``run_example("pipeline.py", ranks=2)``.

    Without ``ranks`` it runs as one process without a launcher. With ``forked`` the processes are forked, and the standard
    output has the errors, too.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    environment |= {"COLUMNS": "120", "PYTHONWARNINGS": "error::UserWarning:__main__"}

    def run_example(program, *options, ranks=None, forked=False):
        if forked:
            torchrun = "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--start-method=fork"
            command = "-m", *torchrun, "--run-path", EXAMPLES / program, *options
            status, output = run_python(*command, folder=tmp_path, environment={"COLUMNS": "120"})
            return subprocess.CompletedProcess(command, status, output, output)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        command = [sys.executable, *launcher, str(EXAMPLES / program), *options]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )

    return run_example
