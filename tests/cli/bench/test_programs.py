"""The processes of a benchmark: what they wrote to standard error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncdist.cli.bench.programs import Programs

_WRITER = """
import os
os.write(2, b"some words")
os.lseek(2, 4, os.SEEK_SET)
print("written", flush=True)
input()
print(os.lseek(2, 0, os.SEEK_CUR), flush=True)
"""


@pytest.mark.processes
def test_reading_leaves_the_place_where_processes_write():
    """The processes share the offset of the file: if a reader moved it, they would overwrite each other's lines."""
    with Programs() as programs:
        writer = programs.start([sys.executable, "-c", _WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert writer.stdout.readline() == "written\n"
        assert programs.last_words() == ":\nsome words"
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "4\n"


@pytest.mark.processes
def test_processes_that_wrote_nothing():
    with Programs() as programs:
        programs.start(["true"]).wait()
        assert programs.last_words() == ", and wrote nothing to standard error"


@pytest.mark.processes
def test_only_the_last_lines_of_long_output():
    with Programs() as programs:
        programs.start(["sh", "-c", "yes | head -c 1000000 >&2; echo the end >&2"]).wait()
        lines = programs.last_words().splitlines()
        assert len(lines) == 13
        assert lines[-1] == "the end"
