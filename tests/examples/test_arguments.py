"""The examples refuse impossible arguments before the ranks meet and before they train."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PICTURES = ["train_digits.py", "weight_sync.py", "pipeline.py", "tensor_parallel.py"]
pytestmark = pytest.mark.processes


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run an example as rank 0 of 2 without a rank 1; return its error message."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def refused(program, *arguments):
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        said = capsys.readouterr().err
        assert (
            ended.value.code == 2 if said else isinstance(ended.value.code, str)
        )  # which Python prints, and ends with 1
        return said or ended.value.code

    return refused


@pytest.mark.parametrize("program", [*PICTURES, "fsdp2_gpt.py"])
def test_folder_that_cannot_be_created_is_refused(refused, tmp_path, program):
    (tmp_path / "file").touch()
    assert re.search(r"error: --out file/\S+ cannot be written \(\w", refused(program, "--out=file/below/picture.png"))


@pytest.mark.parametrize("program", PICTURES)
@pytest.mark.parametrize("name", ["picture.nothing", "picture"])
def test_file_name_without_a_picture_format_is_refused(refused, tmp_path, program, name):
    assert f"error: --out {name} cannot be drawn: its name must end in .png" in refused(program, f"--out={name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["train_digits.py", "fsdp2_gpt.py"])
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder into which even root cannot write")
def test_unwritable_folder_is_refused(refused, program):
    out = "/proc/picture.png" if program in PICTURES else "/proc"
    assert f"error: --out {out} cannot be written (" in refused(program, f"--out={out}")


@pytest.mark.parametrize(
    ("program", "option", "said"),
    [
        ("train_digits.py", "--epochs=0", "--epochs 0: one at least"),
        ("train_digits.py", "--batch=1", "--batch 1: one sample at least for each rank"),
        ("fsdp2_gpt.py", "--steps=0", "--steps 0: one at least"),
        ("pipeline.py", "--micro-batches=0", "--micro-batches 0: one at least"),
        ("tensor_parallel.py", "--steps=-1", "--steps -1: one at least"),
        ("weight_sync.py", "--versions=1", "--versions 1: two at least"),
        ("weight_sync.py", "--rate=0", "--rate 0.0: more than nothing"),
    ],
)
def test_arguments_that_leave_nothing_to_do_are_refused(refused, program, option, said):
    assert f"error: {said}" in refused(program, option)


def test_weight_sync_needs_three_processes(refused):
    assert "three at least: torchrun --nproc-per-node=3" in refused("weight_sync.py")
