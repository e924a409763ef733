"""A virtual environment that holds only what the reader of a page has installed.

Its `pip install` takes distributions from the environment that runs the tests, as links, because tests have no network. A
distribution that is not installed there ends `pip` with the status `NOT_HERE`. A folder, as in ``pip install .``, is built
by its own build back end.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from itertools import pairwise
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
NOT_HERE = 66
_PIP = """#!/bin/sh
PYTHONPATH={root} exec {python} -m tests.support.reader_environment {folder} "$@"
"""
_SCRIPT = """#!{python}
import sys
from {module} import {first}
sys.exit({attribute}())
"""


class ReaderEnvironment:
    """A virtual environment in a new folder, or one that was made there before."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
            (self.bin / "pip").write_text(_PIP.format(root=ROOT, python=sys.executable, folder=folder))
            (self.bin / "pip").chmod(0o755)
        self._site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
        self._linked: set[tuple[str, frozenset[str]]] = set()

    def install(self, text: str, *, editable: bool = False) -> None:
        """Install what an argument of ``pip install`` names, with all that it requires."""
        if text.startswith((".", "/")):
            path, _, extras = text.partition("[")
            with tempfile.TemporaryDirectory() as folder:
                wheel = build_wheel(Path(path), Path(folder), editable=editable)
                self.unpack(wheel, frozenset(extras.rstrip("]").split(",")) if extras else frozenset())
        else:
            self._link(Requirement(text))

    def unpack(self, wheel: Path, extras: frozenset[str] = frozenset()) -> None:
        """Install a wheel."""
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self._site)
        name = wheel.name.partition("-")[0]
        installed = self._installed(name)
        assert installed is not None
        self._write_scripts(installed)
        self._require(installed, extras)

    def _installed(self, name: str) -> Distribution | None:
        found = distributions(path=[str(self._site)])
        return next((one for one in found if canonicalize_name(one.name) == canonicalize_name(name)), None)

    def _link(self, requirement: Requirement) -> None:
        extras = frozenset(requirement.extras)
        if (key := (canonicalize_name(requirement.name), extras)) in self._linked:
            return
        self._linked.add(key)
        found = self._installed(requirement.name)
        if found is None:
            try:
                found = distribution(requirement.name)
            except PackageNotFoundError:
                print(f"{requirement.name} is not installed where the tests run", file=sys.stderr)
                raise SystemExit(NOT_HERE) from None
            self._link_files(found)
            self._write_scripts(found)
        self._require(found, extras)

    def _require(self, found: Distribution, extras: frozenset[str]) -> None:
        for requirement in map(Requirement, found.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                self._link(requirement)

    def _link_files(self, found: Distribution) -> None:
        home = Path(str(found.locate_file("")))
        for file in found.files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            # A folder without __init__.py may hold parts of several distributions, so only its content is linked.
            depth = 1
            while depth < len(file.parts) and not self._is_whole(home.joinpath(*file.parts[:depth])):
                depth += 1
            target = self._site.joinpath(*file.parts[:depth])
            if not target.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(home.joinpath(*file.parts[:depth]))

    @staticmethod
    def _is_whole(folder: Path) -> bool:
        return (folder / "__init__.py").exists() or folder.suffix in (".dist-info", ".libs")

    def _write_scripts(self, found: Distribution) -> None:
        for point in found.entry_points.select(group="console_scripts"):
            script = self.bin / point.name
            first = point.attr.partition(".")[0]
            script.write_text(
                _SCRIPT.format(python=self.python, module=point.module, first=first, attribute=point.attr)
            )
            script.chmod(0o755)


def build_wheel(project: Path, folder: Path, *, editable: bool = False) -> Path:
    """Build the wheel of a project into a folder."""
    system = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    kind = "build_editable" if editable else "build_wheel"
    code = f"import sys, {system['build-backend']} as back_end; back_end.{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, folder], cwd=project, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def main(folder: str, command: str, *arguments: str) -> None:
    """Perform a ``pip install`` of the environment in ``folder``."""
    assert command == "install", f"pip {command}"
    environment = ReaderEnvironment(Path(folder))
    for before, argument in pairwise(("", *arguments)):
        if not argument.startswith("-") and before != "--index-url":
            environment.install(argument, editable="-e" in arguments)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main(*sys.argv[1:])
