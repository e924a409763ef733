"""Ranks killed at random points, several hundred times: no hang, no leak, no wrong sum."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from asyncdist.testing.processes import Nursery

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_sums.py"
ROUNDS = int(os.environ.get("ASYNCDIST_TEST_KILLS", "300"))
SOON = 1.0
"""Seconds within which every survivor must have heard of a death."""


@pytest.fixture(scope="module")
def nursery():
    with Nursery(("torch", "asyncdist", "asyncdist.sync", "asyncdist_transports.shm")) as nursery:
        yield nursery


def test_the_name_of_a_rank_that_was_killed_at_its_door_goes_with_the_next_door(nursery, tmp_path):
    environment = {"TMPDIR": str(tmp_path)}
    victim = nursery.start(PROGRAM, "dies_at_its_door", environment=environment)
    assert victim.wait() == -9
    assert [entry.is_socket() for entry in tmp_path.iterdir()] == [True]
    nursery.start(PROGRAM, "opens_its_door", environment=environment).hear()
    assert list(tmp_path.iterdir()) == []
    nursery.clear()


def test_ranks_killed_at_random_points_leave_no_hang_no_leak_and_no_wrong_sum(nursery, tmp_path):
    chance = random.Random(1)
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {"TMPDIR": str(folder)}
    survivors = [nursery.start(PROGRAM, "sums", environment=environment) for _ in range(2)]
    remaining, done_in_all = [], 0
    for number in range(ROUNDS):
        dead, size = chance.randrange(3), 3
        victim = nursery.start(PROGRAM, "sums", environment=environment)
        ranks = list(survivors)
        ranks.insert(dead, victim)
        seed = chance.random()
        for rank, process in enumerate(ranks):
            process.say((f"file://{tmp_path}/world{number}", rank, size, seed))
        assert [process.hear() for process in ranks] == ["ready"] * size
        time.sleep(chance.uniform(0, 0.03))  # the moment is what is varied: there is nothing to wait for
        since = nursery.stopwatch()
        victim.kill()
        for survivor in survivors:
            done, kind, peer, text, at = survivor.hear()
            assert (kind, peer) == ("PeerLostError", dead), f"round {number}: {text}"
            assert (took := since.seconds(at)) < SOON, f"round {number}: {took:g} s"
            done_in_all += done
        remaining.append([survivor.hear() for survivor in survivors])
        assert victim.wait() == -9
        victim.close()
    assert done_in_all > ROUNDS
    assert max(segments for round in remaining for _, segments, _ in round) < 80
    assert list(folder.iterdir()) == []
    for survivor in survivors:
        survivor.say(None)
        assert survivor.hear() == (1, 2, 0)  # the runtime's own socket, the process's own segment, nothing in it
        assert survivor.wait() == 0
    nursery.clear()
