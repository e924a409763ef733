"""The examples refuse impossible arguments before the ranks meet and before they train."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PLOTTING = ["train_digits.py", "weight_sync.py", "pipeline.py", "tensor_parallel.py"]
ALONE = {"actor_learner.py", "fsdp2_gpt.py", "serve_rollouts.py"}
"""The examples that need no extra."""
pytestmark = pytest.mark.processes


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run an example as rank 0 of ``ranks``, of which no other one exists; return its error message."""
    for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def refused(program, *arguments, ranks=2):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        message = capsys.readouterr().err
        # Python prints the string of a SystemExit and exits with status 1.
        assert ended.value.code == 2 if message else isinstance(ended.value.code, str)
        return message or ended.value.code

    return refused


@pytest.fixture
def uninstall(monkeypatch):
    """Make packages look as if they were not installed; modules of them may have been imported by other tests."""

    def uninstall(*packages):
        loaded = [name for name in sys.modules if name.partition(".")[0] in packages]
        for name in {*packages, *loaded}:
            monkeypatch.setitem(sys.modules, name, None)

    return uninstall


@pytest.mark.parametrize("program", sorted({path.name for path in EXAMPLES.glob("*.py")} - ALONE))
def test_missing_package_names_the_extra_that_has_it(refused, uninstall, program):
    uninstall("sklearn")
    assert refused(program, "--help").endswith("; in the checkout: pip install '.[examples]'")


@pytest.mark.parametrize("program", sorted(ALONE))
def test_example_starts_without_the_extra(monkeypatch, uninstall, capsys, program):
    uninstall("sklearn", "matplotlib", "aiohttp")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert (ended.value.code, "usage:" in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize("program", [*PLOTTING, "fsdp2_gpt.py"])
def test_folder_that_cannot_be_created_is_refused(refused, tmp_path, program):
    (tmp_path / "file").touch()
    assert re.search(r"error: --out file/\S+ cannot be written \(\w", refused(program, "--out=file/below/plot.png"))


@pytest.mark.parametrize("program", PLOTTING)
@pytest.mark.parametrize("name", ["plot.nothing", "plot"])
def test_file_name_without_a_picture_format_is_refused(refused, tmp_path, program, name):
    assert f"error: --out {name}: the name must end in .png" in refused(program, f"--out={name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no folder into which even root cannot write")
@pytest.mark.parametrize(("program", "out"), [("train_digits.py", "/proc/plot.png"), ("fsdp2_gpt.py", "/proc")])
def test_unwritable_folder_is_refused(refused, program, out):
    assert f"error: --out {out} cannot be written (" in refused(program, f"--out={out}")


@pytest.mark.parametrize(
    ("program", "ranks", "option", "message"),
    [
        ("train_digits.py", 2, "--epochs=0", "--epochs 0: must be at least 1"),
        ("train_digits.py", 2, "--batch=1", "--batch 1: each rank needs at least one sample"),
        ("fsdp2_gpt.py", 2, "--steps=0", "--steps 0: must be at least 1"),
        ("fsdp2_gpt.py", 2, "--batch=25", "pass a multiple of 2 as --batch"),
        ("fsdp2_gpt.py", 2, "--resume", "run without --resume first"),
        ("fsdp2_gpt.py", 2, "--heads=3", "change --width or --heads"),
        ("tensor_parallel.py", 2, "--steps=-1", "--steps -1: must be at least 1"),
        ("tensor_parallel.py", 3, "--steps=1", "start 1, 2 or 4 ranks"),
        ("pipeline.py", 2, "--micro-batches=0", "--micro-batches 0: must be at least 1"),
        ("pipeline.py", 1, "--steps=1", "torchrun --nproc-per-node=2"),
        ("pipeline.py", 2, "--batch=100", "pass a multiple of 8 as --batch"),
        ("pipeline.py", 4, "--micro-batches=2", "pass --micro-batches 4 or more"),
        ("weight_sync.py", 3, "--versions=1", "--versions 1: must be at least 2"),
        ("weight_sync.py", 3, "--rate=0", "--rate 0.0: must be greater than 0"),
        ("weight_sync.py", 2, "--steps=1", "at least three ranks: torchrun --nproc-per-node=3"),
    ],
)
def test_impossible_arguments_are_refused_with_advice(refused, program, ranks, option, message):
    assert message in refused(program, option, ranks=ranks)
