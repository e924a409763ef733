"""The example `train_digits.py`, with and without a launcher."""

import re

import pytest

PROGRAM = "train_digits.py"
pytestmark = pytest.mark.processes


def figures(stdout):
    accuracy = float(re.search(r"test accuracy (\d\.\d+)", stdout)[1])
    difference = float(re.search(r"single process: (\S+)", stdout)[1])
    return accuracy, difference


@pytest.mark.parametrize("epochs", [1, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_two_ranks_give_the_weights_of_one_process_and_are_accurate_after_some_epochs(run_example, tmp_path, epochs):
    result = run_example(PROGRAM, "--epochs", str(epochs), ranks=2, forked=epochs == 1)
    accuracy, difference = figures(result.stdout)
    assert (result.returncode, accuracy >= 0.97) == ((0, True) if epochs == 6 else (1, False)), result.stderr
    assert ("the accuracy is below 0.97: train for at least five --epochs" in result.stderr) is (epochs == 1)
    assert 0 < difference <= 1e-5  # zero would mean that the runs were not independent
    assert len(re.findall(rf"(?m)^epoch +\d+/{epochs} +loss \d", result.stdout)) == epochs, "only rank 0 prints"
    picture = tmp_path / "out" / "train_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_one_process_gives_its_own_weights(run_example, tmp_path):
    result = run_example(PROGRAM, "--epochs", "1", "--out", "elsewhere/picture.png")
    assert figures(result.stdout)[1] == 0
    assert (tmp_path / "elsewhere" / "picture.png").exists()
