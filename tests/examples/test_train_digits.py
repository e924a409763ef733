"""The example `train_digits.py`, with and without a launcher."""

from __future__ import annotations

import re

import pytest

PROGRAM = "train_digits.py"
pytestmark = pytest.mark.processes


def figures(stdout):
    accuracy = float(re.search(r"test accuracy (\d\.\d+)", stdout)[1])
    difference = float(re.search(r"single process: (\S+)", stdout)[1])
    return accuracy, difference


def test_two_ranks_give_the_weights_of_one_process(run_example, tmp_path):
    result = run_example(PROGRAM, "--epochs", "6", ranks=2)
    assert result.returncode == 0, result.stderr
    accuracy, difference = figures(result.stdout)
    assert accuracy >= 0.97
    assert 0 < difference <= 1e-5  # zero would mean that the runs were not independent
    assert len(re.findall(r"(?m)^epoch +\d+/6 +loss \d", result.stdout)) == 6, "only rank 0 prints"
    picture = tmp_path / "out" / "train_digits.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_low_accuracy_is_an_error(run_example, tmp_path):
    result = run_example(PROGRAM, "--epochs", "1", "--out", "elsewhere/picture.png")
    assert result.returncode == 1
    assert "the accuracy is below 0.97: train for at least five --epochs" in result.stderr
    assert figures(result.stdout)[1] == 0
    assert (tmp_path / "elsewhere" / "picture.png").exists()
