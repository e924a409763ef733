"""Fixtures of the command line's tests: a folder whose name is short enough for Unix sockets, independent of TMPDIR."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def short_folder(monkeypatch, tmp_path_factory):
    """A new folder, which is TMPDIR for the test and for its processes."""
    tmp_path_factory.getbasetemp()  # created before TMPDIR changes, because it must outlive this folder
    with tempfile.TemporaryDirectory(prefix="cli-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
