"""Ranks that are real processes: killed ones, and jobs that torchrun starts."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncdist.errors import RendezvousError

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent


async def test_kill_of_rank_0_fails_a_waiting_exchange(meet_as, in_thread):
    command = [sys.executable, HERE / "program_leads.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:  # noqa: ASYNC220  # it is quick
        try:
            where = (await in_thread(leader.stdout.readline)).strip()
            other = await meet_as(where, 1, 3, timeout=60)
            waiting = asyncio.ensure_future(other.exchange(b""))
            await other.store.underlying_store.wait([other.keys("part0", 0, 0), other.keys("part0", 0, 1)])
            leader.kill()
            with pytest.raises(RendezvousError, match="rank 0 left or died before the world was complete"):
                await waiting
        finally:
            leader.kill()


def torchrun(folder, *options, crash=False):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASYNCDIST_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    program = [str(HERE / "program_meets.py"), str(folder), *(["crash"] if crash else [])]
    done = subprocess.run(
        [*command, *program], env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


def check_generation(outcomes):
    first, second = outcomes
    assert [outcome["rank"] for outcome in outcomes] == [0, 1]
    assert first["pids"] == second["pids"] == [first["pid"], second["pid"]]
    assert first["world_id"] == second["world_id"]
    assert first["token"] == second["token"]
    assert first["token"], "the token that rank 0 generated"
    assert "torchrun's store at" in first["where"]


@pytest.mark.exhaustive
def test_torchrun_job_meets_in_the_agents_store(tmp_path):
    outcomes = torchrun(tmp_path)
    assert sorted(outcomes) == ["0-0", "0-1"]
    check_generation([outcomes["0-0"], outcomes["0-1"]])


@pytest.mark.exhaustive
def test_restarted_job_ignores_the_record_of_the_failed_one(tmp_path):
    outcomes = torchrun(tmp_path, "--max-restarts=1", "--monitor-interval=0.1", crash=True)
    assert sorted(outcomes) == ["0-0", "0-1", "1-0", "1-1"]
    for generation in (0, 1):
        check_generation([outcomes[f"{generation}-{rank}"] for rank in range(2)])
    assert outcomes["0-0"]["world_id"] != outcomes["1-0"]["world_id"]
    assert outcomes["0-0"]["token"] != outcomes["1-0"]["token"]
