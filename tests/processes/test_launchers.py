"""Worlds as users start them: by torchrun, by hand with variables, at an address, in a file."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ports import free_port

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_launched.py"


def torchrun(count, mode, folder, *options):
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", *options]
    return subprocess.Popen(
        [*command, str(PROGRAM), mode, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(launched):
    """Return the exit status of a job, and its output."""
    try:
        output, _ = launched.communicate(timeout=300)
    finally:
        launched.kill()
    return launched.returncode, output


def lines(folder, rank):
    return (folder / f"rank{rank}").read_text().splitlines()


@pytest.mark.exhaustive
def test_two_torchrun_jobs_run_at_once_on_one_machine(tmp_path):
    jobs = [torchrun(2, "both", tmp_path / name, "--standalone") for name in ("one", "other")]
    for job, name in zip(jobs, ("one", "other"), strict=True):
        status, output = ended(job)
        assert status == 0, output
        for rank in range(2):
            assert lines(tmp_path / name, rank) == [
                f"blocking: rank {rank} of 2, sum 3",
                f"awaiting: rank {rank} of 2, sum 6",
            ]


@pytest.mark.exhaustive
def test_four_ranks_of_torchrun_without_a_rendezvous_backend(tmp_path):
    """Without --standalone the agent's store is at the given address, MASTER_ADDR and MASTER_PORT."""
    job = torchrun(4, "blocking", tmp_path / "job", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    status, output = ended(job)
    assert status == 0, output
    assert [lines(tmp_path / "job", rank) for rank in range(4)] == [
        [f"blocking: rank {rank} of 4, sum 10"] for rank in range(4)
    ]


@pytest.mark.exhaustive
def test_restarted_generation_meets_after_a_failed_one(tmp_path):
    status, output = ended(torchrun(2, "restart", tmp_path / "job", "--standalone", "--max-restarts=1"))
    assert status == 0, output
    assert lines(tmp_path / "job", 1) == ["fails", "generation 1 has met"]
    # The agent may have ended rank 0 before it wrote a line.
    first, *rest = lines(tmp_path / "job", 0)
    assert [first, *rest][-1] == "generation 1 has met"
    assert rest == [] or first == "generation 0: PeerLostError"


@pytest.mark.exhaustive
def test_exception_on_one_rank_ends_the_job(tmp_path):
    status, output = ended(torchrun(2, "crash", tmp_path / "job", "--standalone"))
    over = time.monotonic()
    assert status == 1
    assert "RuntimeError: rank 1 crashes" in output
    (crashed,) = lines(tmp_path / "job", 1)
    # torchrun would kill a rank that did not exit itself after thirty seconds.
    assert over - float(crashed) < 25.0


@pytest.mark.parametrize("given", ["variables", "address", "address in variables"])
def test_ranks_started_by_hand_meet_at_rank_0(job, all_do, face, given):
    """Rank 0 serves the store; a rank that starts earlier waits for it."""
    port, ranks = free_port(), []
    for rank in (2, 0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        (told,) = job.start(1, face, **({} if given == "address" else variables))
        if given == "variables":
            told.tell("init", "env://", -1, -1)
        else:
            known = (rank, 3) if given == "address" else (-1, -1)
            told.tell("init", f"tcp://127.0.0.1:{port}", *known)
        ranks.append(told)
    assert [told.hear() for told in ranks] == [None] * 3
    assert all_do(ranks, "all_reduce", "world", 1000) == [3.0] * 3
    assert all_do(ranks, "destroy") == [None] * 3
