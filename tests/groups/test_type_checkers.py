"""mypy and pyright on programs that use the installed package: `program_types`, which says what they must know, and the
programs of README and of the pages of docs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import CHANGES, EXCERPTS, PAGES, PLACE, code_of, insert_block

PROGRAM = Path(__file__).with_name("program_types.py")
PYRIGHT = shutil.which("basedpyright", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


NOT_FOR_PYRIGHT = (
    # Imports mpi4py.
    "docs_moving_from_mpi/before.py",
    # The works of torch.distributed can be awaited on asyncdist, which torch's annotations cannot know.
    "docs_moving_from_gloo/awaiting.py", "docs_quick_start_torch/stock.py",
)  # fmt: skip
MYPY = """[mypy]
strict = True
namespace_packages = True
explicit_package_bases = True
untyped_calls_exclude = torch

[mypy-torch.*]
implicit_reexport = True

[mypy-mpi4py.*]
ignore_missing_imports = True
"""


def check(command, folder):
    """Run a type checker outside of the checkout, where it sees the package as it is installed."""
    run = subprocess.run([*command, "programs"], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the programs, those of each page in a package of their own."""
    folder = tmp_path_factory.mktemp("checked")
    programs = folder / "programs"
    programs.mkdir()
    shutil.copy(PROGRAM, programs / "program.py")
    for page in PAGES.keys() - {EXCERPTS, CHANGES}:
        for code in code_of(page):
            name, within = PLACE.match(code).groups()
            if name.endswith(".py"):
                insert_block(programs / re.sub(r"\W", "_", page.removesuffix(".md")), name, within, code)
    return folder


@pytest.mark.exhaustive
@pytest.mark.processes
def test_mypy_accepts_the_programs_of_the_pages_and_rejects_wrong_arguments(folder):
    pytest.importorskip("mypy")
    (folder / "mypy.ini").write_text(MYPY)
    check([sys.executable, "-m", "mypy", "--cache-dir", str(folder / "cache")], folder)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.skipif(PYRIGHT is None, reason="pyright is not installed")
def test_pyright_accepts_the_programs_of_the_pages_and_rejects_wrong_arguments(folder):
    options = {
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "reportPrivateImportUsage": "none",  # torch does not say which names it re-exports
        "reportPossiblyUnboundVariable": "none",  # after a loop that runs at least once
        "ignore": [f"programs/{name}" for name in NOT_FOR_PYRIGHT],
        "enableTypeIgnoreComments": True,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(options))
    check([str(PYRIGHT), "--pythonpath", sys.executable], folder)
