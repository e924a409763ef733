from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_gradients_and_state_equal_stock_ddps_over_gloo():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, str(HERE / "program_against_torch.py")], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.split("\n")) == ["", "rank 0 agrees", "rank 1 agrees"]


@pytest.mark.exhaustive
def test_a_peer_that_dies_in_backward_ends_the_others_backward(tmp_path):
    command = [sys.executable, str(HERE / "program_dies_in_backward.py")]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    (said, complained), _ = [process.communicate(timeout=300) for process in ranks]
    assert said.decode().splitlines() == [
        "backward 2 on rank 0 lost rank 1",
        "the next forward refuses",
        "the group says so too",
    ], complained.decode()
    assert [process.returncode for process in ranks] == [0, 7]
    assert b"never retrieved" not in complained
