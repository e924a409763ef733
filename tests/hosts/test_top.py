"""``asyncdist top`` on a machine without a rank of the job."""

import json
import subprocess
import sys

import pytest

from tests.hosts.conftest import Job

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]


def test_machine_without_a_rank_shows_the_job_and_its_stacks(hosts, nursery):
    where = f"{hosts.addresses[0]}:29500"
    job = Job(hosts, nursery, f"tcp://{where}", (0, 0, 0))
    # The last rank does not join in.
    for rank in job.ranks[:2]:
        rank.say(("all_reduce_in_vain", 1000))

    def top(*arguments):
        command = hosts.command(1, sys.executable, "-m", "asyncdist.cli", "top", where, *arguments)
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
