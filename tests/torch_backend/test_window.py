"""Windows by torch's names: ``torch.distributed._new_window`` of torch 2.15, and `ProcessGroup.new_window` of all."""

import pytest

pytestmark = pytest.mark.processes
PROGRAM = "programs_window.py"
PLACES = {"one host": {}, "two hosts": {"ASYNCDIST_TRANSPORT": "tcp"}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_put_into_the_next_one_and_signal(start_world, place, world):
    ranks = start_world(PROGRAM, "pass_around", world, **PLACES[place])
    for rank in ranks:
        outcomes = rank.hear()
        assert len(outcomes) == 36
        assert all(outcomes)


def test_works_of_a_window_are_awaited(start_world):
    ranks = start_world(PROGRAM, "await_works", 2)
    assert [rank.hear() for rank in ranks] == [16.0, 8.0]


def test_wrong_calls_raise_runtime_errors_that_say_what_to_do(start_world):
    ranks = start_world(PROGRAM, "refuse", 2)
    for rank, process in enumerate(ranks):
        outcomes, kinds, late = process.hear()
        for outcome, text in zip(
            outcomes,
            ["not registered", "not registered", "double registration", "exceeds the window size"],
            strict=True,
        ):
            assert text in outcome
        assert kinds == ["WindowAccessType.SEPARATE", "WindowAccessType.UNIFIED"]
        assert rank or "timed out after 0.05 s, waiting for data from rank 1" in late
    for process in ranks:
        process.kill()
