"""Commands between hosts: ``asyncdist bench --hosts`` and ``--calibrate``, and ``asyncdist top``."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.groups.calibration.profile import read_profile
from tests.hosts.conftest import Job

pytestmark = pytest.mark.processes
ASYNCDIST = sys.executable, "-m", "asyncdist.cli"
NS_PER_BYTE = 80.0
"""At 100mbit, a rate that processes on a busy machine reach too."""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("hosts")
def test_run_between_hosts_names_the_link_as_the_limit(tmp_path):
    arguments = "--hosts 2 --ranks-per-host 2 --link 100mbit --sizes 4,4M --repeat 3 --against gloo,raw".split()
    command = [*ASYNCDIST, "bench", "all_reduce", *arguments, "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "hosts.json").read_text())
    small, large = figures["rows"]
    assert set(small["contenders"]) == {"asyncdist", "gloo", "raw"}
    # 4 MiB cross the link once in each direction, which takes 336 ms.
    assert 0.3 < large["contenders"]["asyncdist"]["median_us"] / 1e6 < 0.42
    assert "2 hosts with 2 ranks each, links of 100mbit" in (tmp_path / "hosts.md").read_text()
    assert (tmp_path / "hosts.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_profile_has_the_rate_of_the_link(hosts, tmp_path):
    hosts.shape("100mbit")
    path = tmp_path / "links.json"
    settings = {
        "WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29400", "COLUMNS": "120",
        "ASYNCDIST_TOKEN": "for this test only",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            hosts.command(rank, *ASYNCDIST, "bench", "--calibrate", str(path)),
            env=hosts.environment(rank) | settings | {"RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "Links between 2 hosts" in said[0]
    assert said[1] == ""
    # The first bytes of a message pass faster than the rate: the limit allows bursts.
    assert 0.5 * NS_PER_BYTE < read_profile(str(path))["beta"] * 1e9 < 2 * NS_PER_BYTE
    assert json.loads(path.read_text())["hosts"] == 2


def test_calibration_of_ranks_on_one_host_is_refused(tmp_path):
    path = tmp_path / "links.json"
    alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = CliRunner(env=alone).invoke(main, ["bench", "--calibrate", str(path)])
    assert run.exit_code == 2
    assert "all ranks of this job are on one host" in run.output
    assert not path.exists()


@pytest.mark.exhaustive
def test_machine_without_a_rank_shows_the_job_and_its_stacks(hosts, nursery):
    where = f"{hosts.addresses[0]}:29500"
    job = Job(hosts, nursery, f"tcp://{where}", (0, 0, 0))
    # The last rank does not join in.
    for rank in job.ranks[:2]:
        rank.say(("all_reduce_in_vain", 1000))

    def top(*arguments):
        command = hosts.command(1, *ASYNCDIST, "top", where, *arguments)
        environment = {**hosts.environment(1), "ASYNCDIST_TOKEN": "for this test only"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60.0)

    status = json.loads(top("--once", "--json").stdout)
    assert [row["rank"] for row in status["ranks"]] == [0, 1, 2]
    stacks = top("--stacks", "0")
    assert (stacks.returncode, stacks.stderr) == (0, "")
    assert "all_reduce_in_vain" in stacks.stdout
    job.ranks[2].say(("all_reduce_in_vain", 1000))
    assert [rank.hear() for rank in job.ranks] == [("no failure", None)] * 3
    job.end()
