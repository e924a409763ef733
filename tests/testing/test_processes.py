"""The nursery, which forks ranks from a process that has imported their modules."""

from __future__ import annotations

from multiprocessing.connection import Connection, Pipe

import pytest

from benchmarks import processes
from benchmarks.processes import PATIENCE, Nursery, Origin


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
    monkeypatch.delenv(processes.ORIGIN, raising=False)
    with Nursery(("json",)) as nursery:
        assert nursery.start(program, "run").wait() == 0
    assert limits[:2] == [None, PATIENCE]


@pytest.mark.processes
def test_nurseries_of_one_origin_share_its_imports_and_end_with_it(monkeypatch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "def run(test):\n"
        "    test.send(('wave' in sys.modules, 'colorsys' in sys.modules, os.environ.get('COLOUR'), os.getcwd()))\n"
        "    test.recv()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    origin = Origin(("wave",))
    monkeypatch.setenv(processes.ORIGIN, origin.address)
    with Nursery(("json",)) as one, Nursery(("colorsys",)) as other:
        monkeypatch.setenv("COLOUR", "blue")
        ranks = [one.start(program, "run"), other.start(program, "run", environment={"COLOUR": "green"})]
        assert [rank.hear() for rank in ranks] == [
            (True, False, "red", str(tmp_path)), (True, True, "green", str(tmp_path))
        ]  # fmt: skip
        ranks[0].say("end")
        assert ranks[0].wait() == 0
        ranks[1].kill()
        assert ranks[1].wait() == -9
    origin.close()
