"""The pages for people who change the code are true: their code runs, and what they name exists.

A block whose first line is ``# path`` is put at the end of that file, ``# path, in Class`` at the end of that class, in a
copy of the package; so the steps of a worked example are what they say, and its last block is a test that must pass.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from asyncdist.config import Config

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path for path in [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# ([\w/.]+\.(?:py|toml))(?:, in (\w+))?\n")
SPAN = re.compile(r"`([^`\n]+)`")
PYTEST = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"

pages = pytest.mark.parametrize("page", PAGES)


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return BLOCK.sub("", PAGES[page].read_text(encoding="utf-8"))


# -- the code runs ----------------------------------------------------------------------------------


def put(folder: Path, name: str, within: str | None, code: str) -> None:
    """Put a block of a page where its first line says."""
    path = folder / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    end = len(lines)
    if within is not None:
        classes = [n for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.ClassDef) and n.name == within]
        assert classes, f"{name} has no class {within}"
        end = classes[0].end_lineno or 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines[:end], "", code, *lines[end:], ""]), encoding="utf-8")


def announce(folder: Path) -> None:
    """Do for the package of a ``pyproject.toml`` what installing it does for its entry points."""
    if (folder / "pyproject.toml").exists():
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        put(info, "METADATA", None, f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}")
        for group, points in project["entry-points"].items():
            put(info, "entry_points.txt", None, "\n".join([f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]))


@pages
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    blocks = [code for language, code in BLOCK.findall(PAGES[page].read_text()) if language in ("python", "toml")]
    if not blocks:
        pytest.skip("a page without code")
    shutil.copytree(ROOT / "asyncdist", tmp_path / "asyncdist", ignore=shutil.ignore_patterns("__pycache__"))
    tests = []
    for code in blocks:
        place = PLACE.match(code)
        assert place is not None, f"{page}: this block does not say where it belongs:\n{code}"
        put(tmp_path, place[1], place[2], code[place.end() :])
        if Path(place[1]).name.startswith("test_"):
            tests.append(place[1])
    assert tests, f"{page} has code and no test of it"
    announce(tmp_path)
    (tmp_path / "pytest.ini").write_text(PYTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *tests]
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "transports")])
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


# -- what is named exists ---------------------------------------------------------------------------


@pages
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", prose(page)):
        if "://" not in target:
            assert (PAGES[page].parent / target).exists(), f"{page} links to {target}"


@pages
def test_files_that_are_named_exist(page: str) -> None:
    for span in SPAN.findall(prose(page)):
        if "/" in span and re.fullmatch(r"[\w/.]+", span):
            homes = (ROOT, ROOT / "asyncdist", ROOT / "transports/asyncdist_transports", ROOT / "docs")
            assert any((home / span).exists() for home in homes), f"{page} names {span}"


@pages
def test_modules_and_attributes_that_are_named_exist(page: str) -> None:
    for span in SPAN.findall(prose(page)):
        if re.fullmatch(r"asyncdist(\.\w+)+", span) and span != "asyncdist.transports":  # that is an entry-point group
            try:
                importlib.import_module(span)
            except ModuleNotFoundError:
                module, _, attribute = span.rpartition(".")
                assert hasattr(importlib.import_module(module), attribute), f"{page} names {span}"


@pages
def test_settings_that_are_named_exist(page: str) -> None:
    known = {field.metadata["variable"] for field in fields(Config)}
    named = {name for name in re.findall(r"\bASYNCDIST_[A-Z_]+\b", prose(page)) if not name.endswith("_")}
    assert named <= known, f"{page} names {named - known}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"`make (\w+)`", prose(page))}
    assert named
    assert named <= targets, named - targets


def test_the_layers_are_those_of_the_architecture_test() -> None:
    tree = ast.parse((ROOT / "tests/test_architecture.py").read_text())
    held = next(n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "LAYERS")
    assert held is not None
    layers = [set(layer) for layer in ast.literal_eval(held)]
    rows = re.findall(r"^\| (\d) [^|]*\| ([^|]*) \|", PAGES["CONTRIBUTING.md"].read_text(), re.MULTILINE)
    drawn = {int(number): set(SPAN.findall(modules)) for number, modules in rows}
    assert list(drawn) == list(range(len(layers)))
    for number, layer in enumerate(layers):
        assert drawn[number] == layer, f"CONTRIBUTING.md, layer {number}: these differ: {drawn[number] ^ layer}"
