"""Fixtures of the command line's tests: a folder whose name is short enough for Unix sockets, independent of TMPDIR."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def short_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new folder, which is TMPDIR for the test and for its processes."""
    tmp_path_factory.getbasetemp()  # created before TMPDIR changes, because it must outlive this folder
    with tempfile.TemporaryDirectory(prefix="cli-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
