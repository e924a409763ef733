"""``asyncdist bench --calibrate`` measures links whose rate is known, and a job uses what it has written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncdist.groups.calibration.profile import read_profile
from asyncdist.testing.hosts import Hosts

RATE, NS_PER_BYTE = "100mbit", 80.0
"""A rate that processes on a busy machine reach too."""


def commands(hosts: Hosts, tmp_path, *command: str) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            hosts.command(rank, sys.executable, *command),
            env={
                **hosts.environment(rank), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0],
                "MASTER_PORT": "29400", "ASYNCDIST_TOKEN": "for this test only", "COLUMNS": "120",
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.processes
@pytest.mark.exhaustive
def test_profile_has_the_rate_of_the_link(hosts, tmp_path):
    hosts.shape(RATE)
    path = tmp_path / "links.json"
    ranks = commands(hosts, tmp_path, "-m", "asyncdist.cli", "bench", "--calibrate", str(path))
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "Links between 2 hosts" in said[0]
    assert said[1] == ""
    values = read_profile(str(path))
    # The first bytes of a message pass faster than the rate: the limit allows bursts.
    assert 0.5 * NS_PER_BYTE < values["beta"] * 1e9 < 2 * NS_PER_BYTE
    assert json.loads(path.read_text())["hosts"] == 2


@pytest.mark.processes
def test_ranks_on_one_host_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "links.json"
    command = [sys.executable, "-m", "asyncdist.cli", "bench", "--calibrate", str(path)]
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "all ranks of this job are on one host" in run.stderr
    assert not path.exists()
