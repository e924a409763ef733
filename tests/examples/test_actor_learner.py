"""The example `actor_learner.py`: actors play with the newest policy, and one of them is killed and replaced."""

import re

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_policy_improves_although_an_actor_is_killed(run_example, tmp_path):
    ended = run_example("actor_learner.py", "--updates=80", "--actors=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "actor 0: player.rollout()" in ended.stdout
    rollouts = dict(re.findall(r"actor (\d): (\d+) rollouts", ended.stdout))
    assert set(rollouts) == {"0", "1", "2"}
    assert int(re.search(r"stays up for (\d+) steps at the end", ended.stdout)[1]) >= 150
    assert (tmp_path / "out" / "actor_learner.png").read_bytes().startswith(b"\x89PNG")
