"""Which backwards average gradients: those that follow a forward of the wrapper."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program_backwards.py"
pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_backwards_average_as_in_torch_except_second_backwards_and_no_sync(nursery, tmp_path):
    names = runpy.run_path(str(PROGRAM))["CASES"]
    ranks = [nursery.start(PROGRAM, "compare", rank, f"file://{tmp_path}/world") for rank in range(2)]
    for rank in ranks:
        rank.say(names)
    found = {name: [rank.hear() for rank in ranks] for name in names}
    assert [rank.wait() for rank in ranks] == [0, 0]
    average, local = [1.5, 1.5], [[1.0, 1.0], [2.0, 2.0]]
    for name in ("two_backwards_of_one_forward", "two_forwards_two_backwards"):
        for rank, seen in enumerate(found.pop(name)):
            assert seen == ([average, local[rank], local[rank]], [average, average, local[rank]]), name
    for rank, seen in enumerate(found.pop("no_sync_after_an_output_thrown_away")):
        assert seen == ([average], [local[rank]])
    for rank, seen in enumerate(found.pop("checkpoints_of_the_whole")):
        assert seen == ([], [average, average, local[rank]] * 2)
    for name, on_ranks in found.items():
        for theirs, ours in on_ranks:
            assert theirs, name
            assert ours == theirs, name
