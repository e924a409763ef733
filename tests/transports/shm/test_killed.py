"""Ranks that are killed at random points, several hundred times."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support.stopwatch import Stopwatch

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_sums.py"
ROUNDS = int(os.environ.get("ASYNCDIST_TEST_KILLS", "300"))
SOON = 1.0
"""Seconds within which every survivor must learn of a death."""

TIMEOUTS = {"meeting": 1.0, "work": 30.0, "leaving": 30.0}
"""Timeouts of the worlds: only the timeout shows that a killed rank does not join."""

LONGEST = {"meeting": 0.06, "work": 0.03, "leaving": 0.003}
"""Most seconds after which a rank is killed: after its command, after it has joined, or after it began to leave."""


def moment(number):
    """Return when the victim of a round dies."""
    return "meeting" if number % 16 == 15 else "leaving" if number % 3 == 2 else "work"


def test_socket_file_of_killed_rank_is_removed_by_next_listener(nursery, tmp_path):
    environment = {"TMPDIR": str(tmp_path)}
    victim = nursery.start(PROGRAM, "dies_while_socket_has_a_name", environment=environment)
    assert victim.wait() == -9
    assert [entry.is_socket() for entry in tmp_path.iterdir()] == [True]
    nursery.start(PROGRAM, "listens_by_descriptor", environment=environment).hear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_ranks_killed_at_random_points_cause_no_hang_leak_or_wrong_sum(nursery, tmp_path):
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
        seed, when = chance.random(), moment(number)
        for rank, process in enumerate(ranks):
            steps = chance.randrange(20) if when == "leaving" and process is victim else -1
            process.say((f"file://{tmp_path}/world{number}", rank, size, seed, TIMEOUTS[when], steps))
        if when != "meeting":
            assert [process.hear() for process in ranks] == ["ready"] * size
        if when == "leaving":
            victim.hear()
        # The test varies the moment of the death.
        time.sleep(chance.uniform(0, LONGEST[when]))
        since = Stopwatch.of(nursery)
        victim.kill()
        for survivor in survivors:
            said = survivor.hear()
            done, kind, peer, text, at = survivor.hear() if said == "ready" else said
            if when == "meeting" and kind != "PeerLostError":
                assert kind.startswith("Rendezvous"), f"round {number}: {text}"
                continue
            assert (kind, peer) == ("PeerLostError", dead), f"round {number}: {text}"
            assert (took := since.seconds(at)) < SOON, f"round {number}, {when}: {took:g} s"
            done_in_all += done
        remaining.append([survivor.hear() for survivor in survivors])
        assert victim.wait() == -9
        victim.close()
    assert done_in_all > ROUNDS
    assert max(segments for round in remaining for _, segments, _ in round) < 80
    assert list(folder.iterdir()) == []
    for survivor in survivors:
        survivor.say(None)
        # The background loop's socket, the process's own segment and perhaps that of its parent, and no used memory.
        assert survivor.hear() in ((1, 1, 0), (1, 2, 0))
        assert survivor.wait() == 0
