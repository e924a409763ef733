"""Tests of README.md, CONTRIBUTING.md and docs: the code of the pages runs, and the names they mention exist.

A block whose first line is ``# path`` is appended to that file in a copy of the package; ``# path, in Class`` appends it to
that class. A block whose path is a test file is a test that must pass.

In a block of the language ``console``, each line that begins with ``$`` is a command. It runs in the folder of the page's
programs, must succeed, and must print the lines below it, possibly among others and in any order; … matches any text.
Port 29500 is replaced by a free port. A missing launcher (mpirun, srun) is replaced by a script that sets its variables.
"""

from __future__ import annotations

import ast
import asyncio
import fnmatch
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import asyncdist
from asyncdist.config import Config
from asyncdist.engine.work import Work
from asyncdist.errors import GroupAbortedError, OperationTimeoutError, PeerLostError
from asyncdist.groups.group import Group
from asyncdist.testing.cluster import world_of
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
}
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
ENTRY_POINT_GROUP = "asyncdist.transports"
FRAGMENTS = "README.md"
"""The page whose blocks are parts of programs. They are compiled, not run."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# ([\w/.]+\.(?:py|toml))(?:, in (\w+))?\n")
SPAN = re.compile(r"`([^`\n]+)`")
PYTEST = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"

pages = pytest.mark.parametrize("page", PAGES)


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return BLOCK.sub("", PAGES[page].read_text(encoding="utf-8"))


def code_of(page: str) -> list[str]:
    """Return the Python and TOML blocks of a page."""
    blocks = BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))
    return [code for language, code in blocks if language in ("python", "toml")]


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands in the console blocks of a page, each with the lines that it must print."""
    commands: list[tuple[str, list[str]]] = []
    for language, text in BLOCK.findall(PAGES[page].read_text(encoding="utf-8")):
        for line in text.splitlines() if language == "console" else ():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            else:
                commands[-1][1].append(line)
    return commands


# -- code of the pages ----------------------------------------------------------------------------------


def insert_block(folder: Path, name: str, within: str | None, code: str) -> None:
    """Append a block of a page to a file, or to a class of that file."""
    path = folder / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    end = len(lines)
    if within is not None:
        classes = [n for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.ClassDef) and n.name == within]
        assert classes, f"{name} has no class {within}"
        end = classes[0].end_lineno or 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines[:end], "", code, *lines[end:], ""]), encoding="utf-8")


def register_entry_points(folder: Path) -> None:
    """Write the metadata that installing the package of ``pyproject.toml`` would write for its entry points."""
    if (folder / "pyproject.toml").exists():
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        insert_block(
            info, "METADATA", None, f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}"
        )
        for group, points in project["entry-points"].items():
            insert_block(
                info, "entry_points.txt", None, "\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items())])
            )


LAUNCHER = """#!/bin/sh
count=$2
shift 2
for rank in $(seq 0 $((count - 1))); do
    export OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$count
    export SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=$count
    "$@" &
    ranks="$ranks $!"
done
for each in $ranks; do wait $each || status=1; done
exit ${status:-0}
"""


def command_environment(folder: Path) -> dict[str, str]:
    """Return the environment of a page's commands, in which programs find this package and its launchers."""
    for launcher in ("mpirun", "srun"):
        if shutil.which(launcher) is None:
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / launcher).write_text(LAUNCHER)
            (folder / "bin" / launcher).chmod(0o755)
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(folder / "bin")]),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "transports")]),
        # Unbuffered, Python writes a line and its end separately, which mixes the lines of several ranks.
        "PYTHONUNBUFFERED": "",
        # torchrun's variable for --standalone, which takes a free port.
        "PET_STANDALONE": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def check_command(command: str, expected: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    """Run a command of a page and compare its output with the expected lines."""
    arguments = ["bash", "-c", command.replace("29500", str(free_port()))]
    run = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
    for line in expected:
        pattern = re.compile(re.escape(line).replace("…", ".*"))
        # Search anywhere in the output: ranks share it, and the lines of two ranks may be joined.
        assert pattern.search(run.stdout), f"no {line!r} in:\n{run.stdout}"


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page) and page != FRAGMENTS])
def test_code_of_page_runs(page: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "asyncdist", tmp_path / "asyncdist", ignore=shutil.ignore_patterns("__pycache__"))
    tests = []
    for code in code_of(page):
        place = PLACE.match(code)
        assert place is not None, f"{page}: the first line of this block is not a path:\n{code}"
        insert_block(tmp_path, place[1], place[2], code[place.end() :])
        if Path(place[1]).name.startswith("test_"):
            tests.append(place[1])
    assert tests or commands_of(page), f"{page} has code, but neither a test nor a command that runs it"
    register_entry_points(tmp_path)
    if tests:
        run_tests(tests, tmp_path)
    for command, expected in commands_of(page):
        if "before.py" in command and importlib.util.find_spec("mpi4py") is None:
            # before.py is the program to be ported; it needs mpi4py.
            continue
        check_command(command, expected, tmp_path, command_environment(tmp_path))


def run_tests(tests: Sequence[str], folder: Path) -> None:
    """Run the test files that the blocks of a page form."""
    (folder / "pytest.ini").write_text(PYTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *tests]
    paths = os.pathsep.join([str(folder), str(ROOT / "transports")])
    run = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_readme_code_compiles_and_names_exist() -> None:
    objects = {"dist": asyncdist, "asyncdist": asyncdist, "group": Group}
    for code in code_of(FRAGMENTS):
        tree = ast.parse("async def program():\n" + textwrap.indent(code, "    "))
        compile(tree, FRAGMENTS, "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in objects:
                assert hasattr(objects[node.value.id], node.attr), f"{FRAGMENTS} has {ast.unparse(node)}"


# -- names in the pages ---------------------------------------------------------------------------


@pages
def test_links_have_targets(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", prose(page)):
        if "://" not in target:
            assert (PAGES[page].parent / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("path", DECISIONS, ids=[path.stem for path in DECISIONS])
def test_decision_page_has_all_sections_and_valid_links(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {path.name[:4]}. ")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Measurements", "Consequences"]
    missing = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not (path.parent / link).exists()]
    assert missing == []


def test_decision_index_lists_every_page_in_order() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.*?) \|", index, re.MULTILINE)
    titles = [path.read_text(encoding="utf-8").partition("\n")[0][len("# 0000. ") :] for path in DECISIONS]
    assert rows == [(path.name[:4], path.name, title) for path, title in zip(DECISIONS, titles, strict=True)]
    assert [int(number) for number, _, _ in rows] == list(range(1, len(DECISIONS) + 1))


@pages
def test_named_files_exist(page: str) -> None:
    for span in SPAN.findall(prose(page)):
        if "/" in span and re.fullmatch(r"[\w/.]+", span):
            homes = (ROOT, ROOT / "asyncdist", ROOT / "transports/asyncdist_transports", ROOT / "docs")
            assert any((home / span).exists() for home in homes), f"{page} names {span}"


@pages
def test_named_modules_and_attributes_exist(page: str) -> None:
    for span in SPAN.findall(prose(page)):
        if re.fullmatch(r"asyncdist(\.\w+)+", span) and span != ENTRY_POINT_GROUP:
            try:
                importlib.import_module(span)
            except ModuleNotFoundError:
                module, _, attribute = span.rpartition(".")
                assert hasattr(importlib.import_module(module), attribute), f"{page} names {span}"


@pages
def test_named_settings_exist(page: str) -> None:
    known = {field.metadata["variable"] for field in fields(Config)}
    named = {name for name in re.findall(r"\bASYNCDIST_[A-Z_]+\b", prose(page)) if not name.endswith("_")}
    assert named <= known, f"{page} names {named - known}"


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"`make ([\w-]+)`", prose(page))}
    assert named
    assert named <= targets, named - targets


def test_readme_figures_equal_the_benchmark_report() -> None:
    measured = (ROOT / "docs" / "bench" / "bench.md").read_text(encoding="utf-8").splitlines()
    section = PAGES["README.md"].read_text(encoding="utf-8").partition("## How fast\n")[2].partition("\n## ")[0]
    tables = [line for line in section.splitlines() if line.startswith("|")]
    assert len(tables) > 10
    assert [line for line in tables if line not in measured] == []


def test_contributing_lists_the_layers_in_order() -> None:
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text(encoding="utf-8"))
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    layers = next(ast.literal_eval(n.value) for n in assignments if ast.unparse(n.targets[0]) == "LAYERS")
    map_of_layers = (
        PAGES["CONTRIBUTING.md"].read_text(encoding="utf-8").partition("## The map\n")[2].partition("\n## ")[0]
    )
    assert tuple(re.findall(r"^\| `(\w+)` \|", map_of_layers, re.MULTILINE)) == layers


def test_contributing_has_at_most_150_lines() -> None:
    assert len(PAGES["CONTRIBUTING.md"].read_text(encoding="utf-8").splitlines()) <= 150


def test_glossary_terms_are_defined_where_it_says() -> None:
    rows = re.findall(
        r"^\| (.*?) \| .*? \| `(\w+)` in `([\w/.]+)` \|", PAGES["docs/glossary.md"].read_text(), re.MULTILINE
    )
    assert len(rows) > 100
    homes = (ROOT / "asyncdist", ROOT / "transports/asyncdist_transports")
    wrong = []
    for term, name, path in rows:
        files = [home / path for home in homes if (home / path).exists()]
        if not any(re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")) for file in files):
            wrong.append(f"{term}: {name} is not in {path}")
    assert wrong == []


# -- the failure model of docs/architecture.md --------------------------------------------------------


async def outcomes(groups: Sequence[Group], call: Callable[[Group], Work]) -> list[BaseException]:
    """Return the errors of the ranks whose works fail."""
    return [error for error in await asyncio.gather(*map(call, groups), return_exceptions=True) if error is not None]


async def test_deadline_of_one_rank_aborts_the_group_on_the_others() -> None:
    async with world_of(3) as groups:
        impatient, *patient = await outcomes(groups[:2], lambda g: g.barrier(timeout=0.05 if g.rank() == 0 else None))
        assert isinstance(impatient, OperationTimeoutError)
        assert impatient.peers == (2,)
        assert [type(error) for error in patient] == [GroupAbortedError]
        assert "rank 0 timed out" in str(patient[0])


async def test_orderly_departure_fails_only_groups_that_wait_for_the_rank() -> None:
    async with world_of(3) as groups:
        pair = [group.world.new_group([0, 1]) for group in groups[:2]]
        await asyncio.gather(*(group.barrier() for group in groups))
        waiting = asyncio.ensure_future(outcomes(groups[:2], lambda g: g.all_reduce(torch.ones(4))))
        await groups[2].world.close()
        errors = await waiting
        assert [type(error) for error in errors] == [PeerLostError] * 2
        assert all("rank 2 was lost" in str(error) for error in errors)
        await asyncio.gather(*(group.barrier() for group in pair))


def test_source_distribution_contains_the_files_of_the_makefile():
    """Check that the commands of the README run in an unpacked source distribution."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    patterns = [*hatch["build"]["targets"]["sdist"]["include"], "pyproject.toml"]  # that one is always in
    words = set(re.findall(r"[\w./-]+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {Path(word).parts[0] for word in words if (ROOT / word).is_file()}
    assert "constraints.txt" in named
    assert [name for name in named if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
