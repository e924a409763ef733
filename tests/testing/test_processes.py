"""The nursery, which forks ranks from a process that has imported their modules."""

from __future__ import annotations

from multiprocessing.connection import Connection, Pipe

import pytest

from benchmarks import processes
from benchmarks.processes import PATIENCE, Nursery


@pytest.mark.processes
def test_limit_of_a_start_begins_when_the_modules_are_imported(monkeypatch, tmp_path):
    limits = []

    class Noting(Connection):
        def poll(self, timeout=0.0):
            limits.append(timeout)
            return super().poll(timeout)

    def pipe():
        ours, theirs = Pipe()
        ours.__class__ = Noting
        return ours, theirs

    program = tmp_path / "program.py"
    program.write_text("def run(test): pass")
    monkeypatch.setattr(processes, "Pipe", pipe)
    with Nursery(("json",)) as nursery:
        assert nursery.start(program, "run").wait() == 0
    assert limits[:2] == [None, PATIENCE]
