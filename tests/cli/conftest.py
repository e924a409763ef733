"""What the tests of the programs share: a folder whose name is short enough for Unix sockets, whatever TMPDIR is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own, which is TMPDIR meanwhile, also for what it starts."""
    with tempfile.TemporaryDirectory(prefix="cli-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
