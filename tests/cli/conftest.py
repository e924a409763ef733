"""What the tests of the programs share: a folder whose name is short enough for Unix sockets, whatever TMPDIR is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def short_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of the test's own, which is TMPDIR meanwhile, also for what it starts."""
    tmp_path_factory.getbasetemp()  # pytest's folder for all tests: it would be made in this one, and go with it
    with tempfile.TemporaryDirectory(prefix="cli-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
