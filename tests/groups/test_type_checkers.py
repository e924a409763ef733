"""mypy and pyright on a program that uses the installed package. `program_types` says what they must know."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("program_types.py")
PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")


def check(command, folder):
    """Run a type checker outside of the checkout, where it sees the package as it is installed."""
    shutil.copy(PROGRAM, folder / "program.py")
    run = subprocess.run([*command, "program.py"], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.exhaustive
@pytest.mark.processes
def test_mypy_knows_results_and_rejects_wrong_arguments(tmp_path):
    pytest.importorskip("mypy")
    check([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_pyright_knows_results_and_rejects_wrong_arguments(tmp_path):
    options = {
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "enableTypeIgnoreComments": True,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    check([str(PYRIGHT), "--pythonpath", sys.executable], tmp_path)
