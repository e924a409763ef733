"""Which backwards average gradients: those that follow a forward of the wrapper."""

import runpy
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program_backwards.py"
CHEAP = ["bypasses_after_steps", "accumulation", "gradients_taken_away", "two_forwards_one_backward",
         "frozen_for_the_step_of_another_model", "frozen_while_its_inputs_are_trained"]  # fmt: skip
pytestmark = pytest.mark.processes


def outcomes(nursery, tmp_path, names, world_size, transport):
    """Return by case and rank the gradients of torch's class over gloo, over asyncdist, and of asyncdist's class."""
    where, environment = f"file://{tmp_path}/world", {"ASYNCDIST_TRANSPORT": transport}
    ranks = [
        nursery.start(PROGRAM, "compare", rank, world_size, where, environment=environment)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.say(names)
    found = {name: [rank.hear() for rank in ranks] for name in names}
    assert [rank.wait() for rank in ranks] == [0] * world_size
    return found


def near(seen):
    return [pytest.approx(each, rel=1e-6) for each in seen]


def test_common_backwards_average_as_in_torch(nursery, tmp_path):
    for name, on_ranks in outcomes(nursery, tmp_path, CHEAP, 2, "shm,tcp").items():
        for over_gloo, over_asyncdist, ours in on_ranks:
            assert over_gloo, name
            assert over_asyncdist == ours == over_gloo, name


@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["shm,tcp", "tcp"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_backwards_average_as_in_torch_except_second_backwards_and_no_sync(nursery, tmp_path, world_size, transport):
    """All gradients are small whole numbers; only the division by three ranks, a multiplication in gloo, is not exact."""
    names = runpy.run_path(str(PROGRAM))["CASES"]
    found = outcomes(nursery, tmp_path, names, world_size, transport)
    average, local = [(world_size + 1) / 2] * 2, [[rank + 1.0] * 2 for rank in range(world_size)]
    expected_of_ours = {
        "two_backwards_of_one_forward": lambda own: [average, average, own],
        "two_forwards_two_backwards": lambda own: [average, average, own],
        "no_sync_after_an_output_thrown_away": lambda own: [own],
        "checkpoints_of_the_whole": lambda own: [average, average, own] * 2,
    }
    expected_of_torch = {
        "two_backwards_of_one_forward": lambda own: [average, own, own],
        "two_forwards_two_backwards": lambda own: [average, own, own],
        "no_sync_after_an_output_thrown_away": lambda own: [average],
        "checkpoints_of_the_whole": lambda own: [],
    }
    for name, on_ranks in found.items():
        for rank, (over_gloo, over_asyncdist, ours) in enumerate(on_ranks):
            assert over_asyncdist == near(over_gloo), name
            if name in expected_of_ours:
                assert over_gloo == near(expected_of_torch[name](local[rank])), name
                assert ours == expected_of_ours[name](local[rank]), name
            else:
                assert over_gloo, name
                assert ours == near(over_gloo), name
