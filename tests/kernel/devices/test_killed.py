"""A rank is killed while others wait for it with tensors on a device."""

from pathlib import Path

import pytest

from benchmarks.processes import Nursery

PROGRAM = Path(__file__).with_name("program_on_device.py")


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("message", [False, True], ids=["all_reduce", "recv"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_survivor_names_the_killed_rank(transport, message, tmp_path):
    meeting = (tmp_path / "meeting").as_uri()
    with Nursery() as nursery:
        ranks = [nursery.start(PROGRAM, "lose_a_peer", rank, 3, meeting, transport, message) for rank in range(3)]
        assert [rank.hear() for rank in ranks] == ["met"] * 3
        ranks[1].kill()
        for survivor in (ranks[0], ranks[2]):
            peer, words = survivor.hear()
            assert peer == 1, words
            assert survivor.hear() == 1
            assert survivor.wait() == 0, survivor.output()
