"""torch.distributed.checkpoint over asyncdist: saved and loaded by different numbers of ranks and by either backend."""

import pytest

pytestmark = pytest.mark.processes
MODULE = "programs_checkpoint"


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["save", "save_in_the_background"])
@pytest.mark.parametrize("reader", ["as many", "others", "gloo"])
def test_training_resumes_from_the_checkpoint(teams, transport, world, check_alike, tmp_path, how, reader):
    saved = teams[transport, world].run(MODULE, how, str(tmp_path / "checkpoint"))
    readers = {"as many": (transport, world), "others": (transport, {2: 4, 4: 2}[world]), "gloo": ("gloo", world)}[
        reader
    ]
    for loaded in teams[readers].run(MODULE, "load", str(tmp_path / "checkpoint")):
        check_alike(loaded, saved[0], close=True)


def test_checkpoint_saved_over_gloo_is_loaded(teams, transport, world, check_alike, tmp_path):
    saved = teams["gloo", world].run(MODULE, "save", str(tmp_path / "checkpoint"))
    for loaded in teams[transport, world].run(MODULE, "load", str(tmp_path / "checkpoint")):
        check_alike(loaded, saved[0], close=True)


def test_same_as_over_gloo(teams, transport, world, check_alike, tmp_path):
    expected = teams["gloo", world].run(MODULE, "save_and_load_tensors", str(tmp_path / "gloo"))
    ours = teams[transport, world].run(MODULE, "save_and_load_tensors", str(tmp_path / "ours"))
    check_alike(ours, expected)
