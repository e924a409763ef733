"""A model's state has the same names in checkpoints of torch, whichever class has wrapped it, or none."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "program_checkpoint.py"
pytestmark = pytest.mark.processes


def result(nursery, tmp_path, function):
    rank = nursery.start(PROGRAM, function, f"file://{tmp_path}/world", str(tmp_path))
    found = rank.hear()
    assert rank.wait() == 0
    return found


def test_checkpoints_are_exchanged_with_the_class_of_torch_and_with_bare_models(nursery, tmp_path):
    assert result(nursery, tmp_path, "exchange") == []


@pytest.mark.exhaustive
def test_names_of_nested_models_are_those_with_the_class_of_torch(nursery, tmp_path):
    torchs, ours = result(nursery, tmp_path, "nest")
    assert ours == torchs
    assert ours["inside"][0] == "tower.0.weight"
