"""Tests of README.md, CONTRIBUTING.md and docs: a reader who follows a page succeeds, and the names it mentions exist.

The blocks of a page are files of a new folder. A block whose first line is ``# path`` is appended to that file;
``# path, in Class`` appends it to that class. In a block of the language ``console``, each line that begins with ``$`` is a
command. It runs in that folder, must succeed, and must print the lines below it, possibly among others and in any order; …
matches any text. A command that ends with ``&`` runs until the end of the page. The environment holds asyncdist and what
the page installs (`ReaderEnvironment`). A page that changes or installs asyncdist begins with its sources in the folder.

Port 29500 is replaced by a free port. A missing launcher (mpirun, srun) is replaced by a script that sets its variables.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import asyncdist
from asyncdist.config import Config, variable_of
from tests.support.ports import free_port
from tests.support.reader_environment import NOT_HERE, ReaderEnvironment, build_wheel

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
}
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
ENTRY_POINT_GROUP = "asyncdist.transports"
INSTALLS = ("README.md", "docs/install.md")
"""The pages that install asyncdist."""
CHANGES = "docs/adding-a-collective.md"
"""The page whose blocks are parts of the sources of asyncdist."""
EXCERPTS = "docs/libraries.md"
"""The page whose blocks are lines of programs in tests/ecosystem, which need the libraries."""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# ([\w/.]+\.(?:py|toml|ini))(?:, in (\w+))?\n")
SPAN = re.compile(r"`([^`\n]+)`")

pages = pytest.mark.parametrize("page", PAGES)


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return BLOCK.sub("", PAGES[page].read_text(encoding="utf-8"))


def code_of(page: str) -> list[str]:
    """Return the blocks of a page that are parts of files."""
    blocks = BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))
    return [code for language, code in blocks if language in ("python", "toml", "ini")]


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


def variables_of(environment: ReaderEnvironment, folder: Path) -> dict[str, str]:
    """Return the variables of a page's commands, which find the programs of the environment and launchers."""
    for launcher in ("mpirun", "srun"):
        if shutil.which(launcher) is None:
            (environment.bin / launcher).write_text(LAUNCHER)
            (environment.bin / launcher).chmod(0o755)
    # The programs of the environment that runs the tests, which may be activated, are not the reader's.
    homes = {str(Path(found).parent) for found in map(shutil.which, ("bash", "mpirun", "srun")) if found is not None}
    return {
        **{name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "ASYNCDIST_"))},
        "PATH": os.pathsep.join([str(environment.bin), *homes, os.defpath]),
        # Unbuffered, Python writes a line and its end separately, which mixes the lines of several ranks.
        "PYTHONUNBUFFERED": "",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


class Terminal:
    """The terminal of a reader: runs the commands of a page."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder, self.variables = folder, variables
        self._background: list[subprocess.Popen[str]] = []

    def run(self, command: str, expected: Sequence[str]) -> None:
        """Run a command and compare its output with the expected lines."""
        variables = self.variables
        if "--rdzv" not in command:
            variables = variables | {
                "PET_STANDALONE": "1"
            }  # torchrun's variable for --standalone, which takes a free port
        if command.endswith(" &"):
            self._start(command[:-2], expected, variables)
            return
        arguments = ["bash", "-c", command]
        run = subprocess.run(arguments, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=300)
        if run.returncode == NOT_HERE:
            pytest.skip(run.stderr.strip())
        assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
        for line in expected:
            # Search anywhere in the output: ranks share it, and the lines of two ranks may be joined.
            assert pattern_of(line).search(run.stdout), f"no {line!r} in:\n{run.stdout}"

    def _start(self, command: str, expected: Sequence[str], variables: dict[str, str]) -> None:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=variables, stdout=subprocess.PIPE, text=True
        )
        self._background.append(process)
        assert process.stdout is not None
        for line in expected:
            assert any(pattern_of(line).search(printed) for printed in process.stdout), (
                f"{command} ended without {line!r}"
            )

    def close(self) -> None:
        for process in self._background:
            process.terminate()
            process.communicate()


def pattern_of(line: str) -> re.Pattern[str]:
    return re.compile(re.escape(line).replace("…", ".*"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("page", [page for page in PAGES if page != EXCERPTS and (code_of(page) or commands_of(page))])
def test_code_of_page_runs(page: str, tmp_path: Path, wheel: Path) -> None:
    folder, environment = tmp_path / "reader", ReaderEnvironment(tmp_path / "venv")
    folder.mkdir()
    port = str(free_port())
    placed = []
    for code in code_of(page):
        place = PLACE.match(code)
        assert place is not None, f"{page}: the first line of this block is not a path:\n{code}"
        placed.append((place[1], place[2], code[place.end() :].replace("29500", port)))
    if page in INSTALLS or any(path.startswith("asyncdist/") for path, _, _ in placed):
        copy_sources(folder)
    else:
        environment.unpack(wheel)
    for path, within, code in placed:
        insert_block(folder, path, within, code)
    commands = commands_of(page)
    tests = {path for path, _, _ in placed if Path(path).name.startswith("test_")}
    assert commands, f"{page} has code, but no command that runs it"
    assert all(any(test in command for command, _ in commands) for test in tests), (
        f"{page} does not say how to run {tests}"
    )
    if importlib.util.find_spec("mpi4py") is not None:
        environment.install("mpi4py")
    terminal = Terminal(folder, variables_of(environment, folder))
    try:
        for command, expected in commands:
            if "before.py" in command and importlib.util.find_spec("mpi4py") is None:
                # before.py is the program to be ported; it needs mpi4py.
                continue
            terminal.run(command.replace("29500", port), [line.replace("29500", port) for line in expected])
    finally:
        terminal.close()


@pytest.mark.exhaustive
@pytest.mark.processes
def test_code_of_page_runs_without_what_the_page_does_not_install(tmp_path: Path, wheel: Path) -> None:
    environment = ReaderEnvironment(tmp_path / "venv")
    environment.unpack(wheel)
    terminal = Terminal(tmp_path, variables_of(environment, tmp_path))
    terminal.run("python -c 'import asyncdist.sync, asyncdist_transports.shm'", [])
    with pytest.raises(AssertionError, match="No module named 'pytest'"):
        terminal.run("python -c 'import pytest'", [])
    terminal.run("pip install pytest && pytest --version", ["pytest …"])


@pytest.mark.exhaustive
@pytest.mark.processes
def test_errors_are_explained_where_only_the_wheel_is_installed(tmp_path: Path, wheel: Path) -> None:
    environment = ReaderEnvironment(tmp_path / "venv")
    environment.unpack(wheel)
    terminal = Terminal(tmp_path, variables_of(environment, tmp_path))
    terminal.run("asyncdist explain PeerLostError", ["## PeerLostError", "- **What to do:** …"])


def test_nothing_points_to_what_is_not_published() -> None:
    """The package is on no index, and the pages are at no address, unless `PUBLISHED` says so."""
    sources = [
        path for folder in ("asyncdist", "transports", "examples", "docs") for path in (ROOT / folder).rglob("*")
    ]
    files = [*sources, *PAGES.values(), ROOT / "CHANGELOG.md", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    unpublished = re.compile(
        r"(?<![\w-])asyncdist\[|pip install (-\w+ )*'?asyncdist\b|https?://[\w.]*asyncdist[\w.]*\.\w+"
    )
    wrong = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path.suffix in (".py", ".md", ".toml", ".yml", ".yaml", ".sh")
        for line in path.read_text(encoding="utf-8").splitlines()
        if unpublished.search(line)
    }
    assert wrong == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page == "README.md" or "quick-start" in page])
def test_torchrun_of_a_quick_start_does_not_warn_of_threads(page: str) -> None:
    commands = [command for command, _ in commands_of(page)]
    ranks = [place for place, command in enumerate(commands) if command.startswith("torchrun")]
    assert ranks
    assert any(command.startswith("export OMP_NUM_THREADS=1") for command in commands[: ranks[0]])


def copy_sources(folder: Path) -> None:
    """Copy what a reader has who works in a checkout of the sources."""
    for name in ("asyncdist", "transports", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "docs/errors.md"):
        shutil.copy(ROOT / name, folder / name)


def test_code_of_the_readme_has_existing_names() -> None:
    for code in code_of("README.md"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                assert hasattr(asyncdist, node.attr), f"README.md has {ast.unparse(node)}"


def test_excerpts_are_lines_of_their_programs_in_order() -> None:
    for code in code_of(EXCERPTS):
        place = PLACE.match(code)
        assert place is not None, code
        program = iter((ROOT / place[1]).read_text(encoding="utf-8").splitlines())
        lines = [line.strip() for line in code[place.end() :].splitlines()]
        missing = next((line for line in lines if not any(line == each.strip() for each in program)), None)
        assert missing is None, f"{place[1]} has no {missing!r} there"


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
    numbers = [number for number, _, _ in rows]
    assert numbers == sorted(set(numbers))


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
    known = {variable_of(field) for field in fields(Config)}
    named = {name for name in re.findall(r"\bASYNCDIST_[A-Z_]+\b", prose(page)) if not name.endswith("_")}
    assert named <= known, f"{page} names {named - known}"


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"`make ([\w-]+)`", prose(page))}
    assert named
    assert named <= targets, named - targets


def tables_of(text: str) -> list[list[dict[str, str]]]:
    """Return the tables of a page: of each row its cells by the names of the columns."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        names, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        tables.append([dict(zip(names, row, strict=True)) for row in rows])
    return tables


def test_figures_equal_the_benchmark_reports() -> None:
    folder = ROOT / "docs" / "bench"
    report = (folder / "bench.md").read_text(encoding="utf-8")
    section = PAGES["README.md"].read_text(encoding="utf-8").partition("## How fast\n")[2].partition("\n## ")[0]
    (shown,), measured = tables_of(section), tables_of(report)[0]
    assert len(shown) == 6
    assert [row for row in shown if not any(row.items() <= full.items() for full in measured)] == []

    lines = {line for path in folder.glob("[!R]*.md") for line in path.read_text(encoding="utf-8").splitlines()}
    summary = (folder / "README.md").read_text(encoding="utf-8").partition("\n## Failures\n")[0]
    tables = [line for line in summary.splitlines() if line.startswith("|")]
    assert len(tables) > 10
    assert [line for line in tables if line not in lines] == []


def test_contributing_lists_the_layers_in_order() -> None:
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text(encoding="utf-8"))
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    layers = next(ast.literal_eval(n.value) for n in assignments if ast.unparse(n.targets[0]) == "LAYERS")
    map_of_layers = (
        PAGES["CONTRIBUTING.md"].read_text(encoding="utf-8").partition("## The map\n")[2].partition("\n## ")[0]
    )
    assert tuple(re.findall(r"^\| `([\w.]+)` \|", map_of_layers, re.MULTILINE)) == layers


def test_contributing_has_at_most_150_lines() -> None:
    assert len(PAGES["CONTRIBUTING.md"].read_text(encoding="utf-8").splitlines()) <= 150


def test_glossary_terms_are_used_by_the_code() -> None:
    glossary = PAGES["docs/glossary.md"].read_text(encoding="utf-8")
    terms = [
        term for term in re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", glossary, re.MULTILINE) if term != "term"
    ]
    assert len(terms) > 60
    files = [path for folder in ("asyncdist", "transports") for path in (ROOT / folder).rglob("*.py")]
    source = re.sub(r"[\s_-]+", "", "".join(path.read_text(encoding="utf-8") for path in files).lower())
    assert [word for term in terms for word in term.split(", ") if re.sub(r"[\s_-]+", "", word) not in source] == []


def test_source_distribution_contains_the_files_of_the_makefile():
    """Check that the commands of the README run in an unpacked source distribution."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    patterns = [*hatch["build"]["targets"]["sdist"]["include"], "pyproject.toml"]  # that one is always in
    words = set(re.findall(r"[\w./-]+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    named = {Path(word).parts[0] for word in words if (ROOT / word).is_file()}
    assert "constraints.txt" in named
    assert [name for name in named if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


# -- the documentation site ---------------------------------------------------------------------------


def entries_of(page: str) -> set[str]:
    """Return the names that a page of the reference describes."""
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text(encoding="utf-8")
    names = re.findall(r"^::: ([\w.]+)$|\{ #([\w.]+) \}", text, re.MULTILINE)
    return {described or anchor for described, anchor in names}


@pytest.mark.parametrize("package", ["asyncdist", "sync", "store", "ddp", "rpc", "weights", "torch_backend"])
def test_reference_has_every_public_name(package: str) -> None:
    module = importlib.import_module("asyncdist" if package == "asyncdist" else f"asyncdist.{package}")
    entries = entries_of(package)
    text = (ROOT / "docs" / "reference" / f"{package}.md").read_text(encoding="utf-8")
    missing = {
        name
        for name in module.__all__
        if f"{module.__name__}.{name}" not in entries
        # A name that is the same object in both APIs refers to the page of `asyncdist`.
        and not (f"[`{name}`][asyncdist.{name}]" in text and getattr(module, name) is getattr(asyncdist, name))
    }
    assert missing == set()


def test_reference_has_every_module_of_the_test_kit() -> None:
    modules = {f"asyncdist.testing.{path.stem}" for path in (ROOT / "asyncdist/testing").glob("[!_]*.py")}
    assert modules <= entries_of("testing")


def test_tables_of_user_pages_have_at_most_five_columns() -> None:
    """A wider table is cut off on a phone, and belongs into a report."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    names = re.findall(r": (\S+\.md)$", navigation.partition("- Reference:")[0].partition("- Start:")[2], re.MULTILINE)
    assert len(names) > 20
    for page in ("README.md", *(f"docs/{name}" for name in names)):
        for row in re.findall(r"^\|.*\|$", prose(page), re.MULTILINE):
            assert len(re.findall(r"(?<!\\)\|", row)) <= 6, f"{page}: {row}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    paths = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in paths if not path.startswith("decisions/0") and f": {path}\n" not in navigation} == set()
