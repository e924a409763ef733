"""The example `serve_rollouts.py`: a rank of a replica is killed, the replica is replaced, and all answers are right."""

import re

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_prompts_are_answered_although_a_replica_is_killed(run_example):
    ended = run_example("serve_rollouts.py", "--steps=10")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "replica 0 is lost" in ended.stdout
    assert "all 160 answers are right" in ended.stdout
    assert set(re.findall(r"replica (\d): \d+ prompts", ended.stdout)) == {"0", "1", "2"}
