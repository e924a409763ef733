"""``asyncdist bench``: small runs as a user starts them, what ends them, and what may be asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncdist.bench import launch, processes
from asyncdist.bench.machine import machine
from asyncdist.bench.plan import COLLECTIVES, STEPS, THROUGH_TORCH, BenchPlan
from asyncdist.bench.result import Report
from asyncdist.cli import main
from asyncdist.errors import BenchmarkError, UnsupportedError

PATIENCE = 20.0
"""Seconds for a process to start, or to be gone."""


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncdist.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


# -- whole runs -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_small_run_gives_table_figures_and_pictures(tmp_path):
    folder, picture = tmp_path / "out", tmp_path / "all.svg"
    asked = ["all_reduce", "barrier", "--sizes", "4,1K", "--against", "gloo,raw", "--awaited", "--ddp", "--repeat", "2"]
    asked += ["--transport", "tcp,auto"]
    run = bench(*asked, "--output", str(folder), "--plot", str(picture), "--json", "-")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)  # with --json - the table goes to stderr
    assert [(row["collective"], row["nbytes"]) for row in found["rows"]] == [
        ("all_reduce", 4),
        ("all_reduce", 1024),
        ("barrier", 0),
    ]
    for row in found["rows"]:
        assert set(row["contenders"]) | {"copy"} == {"asyncdist", "auto", "awaited", "gloo", "raw", "copy"}
        assert ("copy" in row["contenders"]) == (row["collective"] != "barrier")
        assert all(timing["calls"] == 2 and timing["median_us"] > 0 for timing in row["contenders"].values())
        assert set(row["times_faster_than"]["asyncdist"]) == {"gloo", "raw"}
    (training,) = found["training"]
    assert set(training["contenders"]) == {"asyncdist", "gloo", "alone"}
    assert training["parameters"] == pytest.approx(6.3e6, rel=0.01)
    for words in ("all_reduce, 2 ranks", "1 KiB", "vs gloo", "vs raw", "memory copy", "await − block", "× alone"):
        assert words in run.stderr
    page = (folder / "bench.md").read_text()
    assert "| 1 KiB |" in page
    assert found["machine"]["processor"] in page
    assert json.loads((folder / "bench.json").read_text()) == found
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in picture.read_text()


@pytest.mark.exhaustive
@pytest.mark.processes
def test_torch_distributed_is_measured_on_our_back_end_and_on_gloo():
    # A wrong result, or weights that differ after training, end a run: figures mean that all was right.
    run = bench("--through", "torch", "--sizes", "4K", "--repeat", "2", "--json", "-")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert {row["collective"] for row in found["rows"]} == set(THROUGH_TORCH)
    for row in found["rows"]:
        assert set(row["contenders"]) | {"copy"} == {"asyncdist", "torch", "idle", "gloo", "copy"}
        assert row["times_faster_than"]["torch"]["gloo"] > 0
        assert row["above_blocking_us"]["torch"] == pytest.approx(
            row["contenders"]["torch"]["median_us"] - row["contenders"]["asyncdist"]["median_us"]
        )
    assert [training["step"] for training in found["training"]] == list(STEPS)
    for training in found["training"]:
        assert set(training["contenders"]) | {"asyncdist"} == {"asyncdist", "torch", "gloo", "alone"}
    for words in (
        "through torch",
        "− direct",
        "torch, idle",
        "stock FSDP2 on asyncdist",
        "stock tensor parallel on gloo",
    ):
        assert words in run.stderr


@pytest.mark.processes
@pytest.mark.skipif(launch.mpi_missing() is not None, reason=str(launch.mpi_missing()))
def test_open_mpi_computes_what_is_asked():
    # A contender's wrong result ends a run, so figures mean that all results were right.
    plan = BenchPlan(COLLECTIVES, (4, 65_540), ranks=3, against=("mpi",), transports=("tcp",), repeat=2)
    report = processes.run(plan)
    assert [(row.collective, row.nbytes > 0) for row in report.rows] == [(name, size > 0) for name, size in plan.cases]
    assert all(row.timings["mpi"].median > 0 for row in report.rows)
    assert report.machine["mpi"].startswith("Open MPI ")


@pytest.mark.processes
def test_registered_tensors_compete():
    report = processes.run(BenchPlan(COLLECTIVES, (4, 65_540), registered=True, repeat=2))
    assert all(row.timings["registered"].median > 0 for row in report.rows)


@pytest.mark.processes
@pytest.mark.parametrize("against", ["raw", "mpi"])
def test_a_rank_that_fails_is_told_of_and_nobody_is_left(against):
    if against == "mpi" and (missing := launch.mpi_missing()) is not None:
        pytest.skip(missing)
    run = bench("--sizes", "4", "--transport", "pigeon", "--against", against)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: the benchmark failed; rank ")
    assert "there is no transport 'pigeon'; there are inproc, " in run.stderr


@pytest.mark.processes
def test_a_folder_too_deep_for_a_socket_is_named(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(BenchmarkError, match="set TMPDIR to a folder with a short name"):
        processes.run(BenchPlan())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('no such thing')", "did not start:\nno such thing"),
        ("raise SystemExit(3)", "did not start, and said nothing"),
        (
            "import os, sys; from asyncdist.bench import rank; "
            "rank._run = lambda *_: sys.stderr.write('out of oil\\n') and sys.stderr.flush() or os._exit(3); "
            "rank.run_rank(sys.argv[1], sys.argv[2])",
            "rank [01] ended without a word:\nout of oil",
        ),
    ],
    ids=["at once with words", "at once without", "at work"],
)
def test_a_rank_that_dies_is_told_of(program, said, monkeypatch):
    def commands(plan, folder):
        return [[sys.executable, "-c", program, str(folder), str(rank)] for rank in range(plan.ranks)]

    monkeypatch.setattr(launch, "commands", commands)
    with pytest.raises(BenchmarkError, match=said):
        processes.run(BenchPlan())


def descendants(number):
    """Return the processes that a process has started, and those that they have."""
    found = set()
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        found.update(children, *(descendants(child) for child in children))
    return found


def measures(number):
    """Say whether a process is a rank that knows its plan: it loads torch only then."""
    try:
        return "libtorch_cpu" in Path(f"/proc/{number}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def lives(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
@pytest.mark.parametrize("against", ["raw", "mpi"])
def test_no_rank_outlives_the_run(against, how, until):
    if against == "mpi" and (missing := launch.mpi_missing()) is not None:
        pytest.skip(missing)
    command = [sys.executable, "-m", "asyncdist.cli", "bench", "--sizes", "4", "--repeat", "1000000"]
    command += ["--transport", "tcp", "--against", against]
    with (
        tempfile.TemporaryDirectory() as folder,  # a killed one leaves its own
        subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder}) as run,
    ):
        until(lambda: sum(map(measures, descendants(run.pid))) == 2)
        started = descendants(run.pid)
        run.send_signal(how)
        assert run.wait(PATIENCE) != 0
        until(lambda: not any(map(lives, started)))
        if how is signal.SIGINT:
            assert not list(Path(folder).glob("asyncdist-bench-*"))


# -- what is asked ----------------------------------------------------------------------------------


def test_through_torch_goes_over_the_first_transport(tmp_path):
    program = "from asyncdist.config import Config; print(Config.from_environment().transport)"
    (first, _) = launch.commands(BenchPlan(through=("torch",), transports=("tcp", "auto")), tmp_path)
    prefix = first[: first.index(sys.executable)]
    said = subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "tcp\n"


@pytest.fixture
def without_mpi(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(launch, "commands", lambda *_: pytest.fail("something was started"))


@pytest.mark.parametrize(
    ("option", "name", "said"),
    [
        ("--json", "absent/figures.json", "there is no folder"),
        ("--plot", "absent/figures.png", "there is no folder"),
        ("--plot", "figures.xyz", "let its name end in png, svg or pdf"),
        ("--output", "file/folder", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_told_of_before_anything_is_measured(option, name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(processes, "run", None)
    run = CliRunner().invoke(main, ["bench", "all_reduce", "--sizes", "4", option, name])
    assert (run.exit_code, type(run.exception)) == (2, SystemExit)
    assert said in run.output


def test_without_mpi_nothing_is_measured(without_mpi):
    with pytest.raises(UnsupportedError, match=r"pip install 'asyncdist\[mpi\]'"):
        processes.run(BenchPlan(against=("mpi",)))


@pytest.mark.parametrize(("there", "said"), [(None, "install Open MPI"), ("/bin/mpirun", "is not Open MPI's")])
def test_without_open_mpi_it_is_said_what_to_install(there, said, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(launch.shutil, "which", lambda name: there)
    monkeypatch.setattr(launch.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "HYDRA\n"))
    assert said in launch.mpi_missing()


def test_all_that_is_available_competes(without_mpi, monkeypatch):
    plans = []
    monkeypatch.setattr(
        processes, "run", lambda plan, progress: plans.append(plan) or Report(plan, dict.fromkeys(machine(), "?"))
    )
    said = CliRunner().invoke(main, ["bench", "--against", "available", "--transport", "auto,tcp,tcp"])
    assert said.exit_code == 0, said.output
    assert "mpi is left out: mpi4py is not installed" in said.output
    assert (plans[0].against, plans[0].transports) == (("gloo", "raw"), ("auto", "tcp"))
    assert 4 << 20 in plans[0].sizes


@pytest.mark.parametrize(
    ("ranks", "left_out"),
    [
        (2, ()),
        (3, ("tensor_parallel",)),
        (4, ()),
        (8, ("tensor_parallel",)),
    ],
)
def test_through_torch_measures_the_steps_that_the_ranks_can_share(ranks, left_out, monkeypatch):
    plans = []
    monkeypatch.setattr(
        processes, "run", lambda plan, progress: plans.append(plan) or Report(plan, dict.fromkeys(machine(), "?"))
    )
    said = CliRunner().invoke(main, ["bench", "--through", "torch", "--against", "raw", "--ranks", str(ranks)])
    assert said.exit_code == 0, said.output
    assert plans[0].collectives == THROUGH_TORCH
    assert set(plans[0].against) == {"raw", "gloo"}
    assert set(STEPS) - set(plans[0].steps) == set(left_out)
    assert ("tensor parallel is left out: " in said.output) == ("tensor_parallel" in left_out)


@pytest.mark.parametrize(("text", "said"), [("auto,gloo", "'gloo' is not a transport"), (",", "name at least one")])
def test_a_transport_is_no_rival(text, said):
    run = CliRunner().invoke(main, ["bench", "--transport", text])
    assert run.exit_code == 2
    assert said in run.output
