"""Fixtures of the examples' tests: run an example under torchrun or alone, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def run_example(tmp_path):
    """Run an example in an empty folder and return the completed process: ``run_example("pipeline.py", ranks=2)``.

    Without ``ranks`` it runs as one process without a launcher.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    environment |= {"COLUMNS": "120", "PYTHONWARNINGS": "error::UserWarning:__main__"}

    def run_example(program, *options, ranks=None):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
        command = [sys.executable, *launcher, str(EXAMPLES / program), *options]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
        )

    return run_example
