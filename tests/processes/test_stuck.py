"""Ranks that hang dump their flight recorders on a signal, or when one of them is killed."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from asyncdist.cli.trace import trace
from asyncdist.kernel.tracing import desync_report
from tests.processes.conftest import two_are_in_it

pytestmark = pytest.mark.processes


def test_signal_dump_names_ranks_missing_from_the_call(job, until, tmp_path, face):
    ranks = job.world(3, face, ASYNCDIST_DUMP_DIR=str(tmp_path / "dumps"), ASYNCDIST_DUMP_SIGNAL="USR2")
    for told in ranks[:2]:
        told.tell("barrier", "world")
    until(lambda: two_are_in_it(ranks, tmp_path / "dumps"))
    ranks[2].tell("barrier", "world")
    for told in ranks:
        assert told.hear() is None


def test_killed_rank_is_the_one_without_a_dump(job, tmp_path):
    ranks = job.met(3, ASYNCDIST_DUMP_DIR=str(tmp_path / "dumps"))
    for told in (ranks[0], ranks[2]):
        told.tell("all_reduce", "world", 300_000)
    ranks[1].process.kill()
    for told in (ranks[0], ranks[2]):
        assert told.hear().kind == "PeerLostError"
    (records,) = desync_report.read(tmp_path / "dumps")
    assert [record.rank for record in records] == [0, 2]
    assert "rank 1 left no flight recorder" in next(iter(desync_report.tell(records)))


WAITS = """
import sys, time
from pathlib import Path
import asyncdist.sync as dist

folder = Path(sys.argv[1])
dist.init_process_group()
if dist.get_rank() == 1:
    (folder / "up").touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("pkill") is None, reason="there is no pkill")
def test_dump_command_signals_ranks_of_torchrun_but_not_torchrun(until, tmp_path):
    program, dumps = tmp_path / "train.py", tmp_path / "dumps"
    program.write_text(WAITS)
    told = re.search(r"pkill [^#\n]*", trace.callback.__doc__)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program, tmp_path]
    environment = {**os.environ, "ASYNCDIST_DUMP_DIR": str(dumps), "ASYNCDIST_DUMP_SIGNAL": "USR2"}
    with subprocess.Popen(command, env=environment) as torchrun:
        try:
            until(lambda: (tmp_path / "up").exists())
            subprocess.run(["bash", "-c", told[0].replace("train.py", str(program))], check=True)
            until(lambda: len(list(dumps.glob("*.json"))) == 2)
            (tmp_path / "go on").touch()
            assert torchrun.wait(timeout=120) == 0
        finally:
            torchrun.terminate()
