"""``asyncdist bench --calibrate`` measures links whose rate is known, and a job uses what it has written."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.groups.calibration.profile import read_profile

RATE, NS_PER_BYTE = "100mbit", 80.0
"""A rate that processes on a busy machine reach too."""


def commands(hosts, tmp_path, *command):
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


def test_ranks_on_one_host_are_refused(tmp_path):
    path = tmp_path / "links.json"
    alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = CliRunner(env=alone).invoke(main, ["bench", "--calibrate", str(path)])
    assert run.exit_code == 2
    assert "all ranks of this job are on one host" in run.output
    assert not path.exists()
