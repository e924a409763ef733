"""``asyncdist bench``: small runs, the end of their processes, and the options."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.cli.bench import launch
from asyncdist.cli.bench.contenders import mpi
from asyncdist.cli.bench.launch import Programs
from asyncdist.cli.bench.plan import COLLECTIVES, THROUGH_TORCH, BenchPlan
from asyncdist.cli.bench.result import Report, ResultRow, read_earlier
from asyncdist.cli.bench.tables import about_run
from asyncdist.cli.machine import machine, measured_machine
from asyncdist.errors import BenchmarkError, UnsupportedError

needs_mpi = pytest.mark.skipif(mpi.mpi_missing() is not None, reason=str(mpi.mpi_missing()))
RIVAL = pytest.mark.parametrize("against", ["raw", pytest.param("mpi", marks=needs_mpi)])


def bench(*arguments):
    command = [sys.executable, "-m", "asyncdist.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_run_with_every_contender_gives_tables_figures_and_plots(tmp_path):
    # A wrong result ends a run.
    folder, plot = tmp_path / "out", tmp_path / "all.svg"
    options = "--sizes 4,1K --against raw --through torch --awaited --repeat 2 --transport tcp,auto --json -".split()
    run = bench(*options, "--output", str(folder), "--plot", str(plot))
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)  # with --json - the table goes to stderr
    assert {row["collective"] for row in found["rows"]} == set(THROUGH_TORCH)
    contenders = {"asyncdist", "torch", "idle", "auto", "awaited", "gloo", "raw", "copy"}
    for row in found["rows"]:
        assert set(row["contenders"]) | {"copy"} == contenders
        assert ("copy" in row["contenders"]) == (row["collective"] != "barrier")
        assert all(timing["calls"] == 2 and timing["median_us"] > 0 for timing in row["contenders"].values())
        assert [set(row["times_faster_than"][who]) for who in ("asyncdist", "torch")] == [{"gloo", "raw"}] * 2
        medians = [row["contenders"][who]["median_us"] for who in ("torch", "asyncdist")]
        assert row["above_blocking_us"]["torch"] == pytest.approx(medians[0] - medians[1])
    for words in ("all_reduce, 2 ranks", "1 KiB", "vs gloo", "memory copy", "through torch", "torch, idle", "× copy"):
        assert words in run.stderr
    page = (folder / "bench.md").read_text()
    assert "| 1 KiB |" in page
    assert found["machine"]["processor"] in page
    assert json.loads((folder / "bench.json").read_text()) == found
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in plot.read_text()


@pytest.mark.processes
@needs_mpi
def test_open_mpi_computes_every_collective():
    plan = BenchPlan(COLLECTIVES, (4, 65_540), ranks=3, against=("mpi",), transports=("tcp",), repeat=2)
    report = launch.run(plan)
    assert [(row.name, row.nbytes > 0) for row in report.rows] == [(name, size > 0) for name, size in plan.cases]
    assert all(row.timings["mpi"].median > 0 for row in report.rows)
    assert report.machine["mpi"].startswith("Open MPI ")


@pytest.mark.processes
def test_registered_tensors_are_measured():
    report = launch.run(BenchPlan(("all_reduce", "barrier"), (4, 65_540), registered=True, repeat=2))
    assert all(row.timings["registered"].median > 0 for row in report.rows)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_busy_processes_compute_beside_the_ranks_and_end_with_the_run(monkeypatch):
    started, start = [], Programs.start

    def noted(self, command, environment=None):
        start(self, command, environment)
        if command is launch.BUSY:
            started.append(self.running[-1])

    monkeypatch.setattr(Programs, "start", noted)
    used = []

    def note(row):
        used.extend(int(stat.split()[13]) for stat in map(_stat, (program.pid for program in started)))

    report = launch.run(BenchPlan(("all_reduce",), (4, 1 << 20), repeat=50, busy=2), note)
    assert len(started) == 2
    assert max(used) > 0
    assert all(program.poll() is not None for program in started)
    assert "beside 2 busy processes" in about_run(report)


def _stat(pid):
    return Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.processes
@RIVAL
def test_failure_of_a_rank_is_reported(against):
    run = bench("--sizes", "4", "--transport", "pigeon", "--against", against)
    assert run.returncode == 1
    assert run.stderr.startswith("Error: the benchmark failed; rank ")
    assert "there is no transport 'pigeon'; there are inproc, " in run.stderr


@pytest.mark.processes
def test_error_for_a_long_socket_path_names_tmpdir(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(BenchmarkError, match="set TMPDIR to a folder with a short name"):
        launch.run(BenchPlan())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('no such thing')", "did not start:\nno such thing"),
        ("raise SystemExit(3)", "did not start, and wrote nothing"),
        (
            "import os, sys; from asyncdist.cli.bench import rank; "
            "rank._measure = lambda *_: sys.stderr.write('a reason\\n') and sys.stderr.flush() or os._exit(3); "
            "rank.run_rank(*sys.argv[1:4])",
            "rank [01] ended without a message:\na reason",
        ),
    ],
    ids=["at once with a message", "at once without a message", "while it measures"],
)
def test_end_of_a_rank_is_reported(program, words, monkeypatch):
    def commands(plan, folder, hosts):
        return [[sys.executable, "-c", program, str(folder), str(rank), "127.0.0.1"] for rank in range(plan.ranks)]

    monkeypatch.setattr(launch, "commands", commands)
    with pytest.raises(BenchmarkError, match=words):
        launch.run(BenchPlan())


@pytest.mark.processes
def test_last_words_are_the_last_lines_and_do_not_move_the_place_of_the_next():
    """The processes share the offset of the file: if a reader moved it, they would overwrite each other's lines."""
    with Programs() as programs:
        assert programs.last_words() == ", and wrote nothing to standard error"
        for command, last in (("yes | head -c 1000000 >&2; echo the end", "the end"), ("echo more", "the end\nmore")):
            programs.start(["sh", "-c", f"{command} >&2"])
            programs.running[-1].wait()
            assert len(programs.last_words().splitlines()) == 13
            assert programs.last_words().endswith(f"\n{last}")


def read(path):
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return ""


def descendants(pid):
    """Return the process ids of a process's children, their children, and so on."""
    children = {int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in read(path).split()}
    return children.union(*map(descendants, children))


def measures(pid):
    """Return whether a process is a rank that has received its plan: it loads torch only then."""
    return "libtorch_cpu" in read(Path(f"/proc/{pid}/maps"))


def runs(pid):
    return read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"])


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@RIVAL
def test_no_rank_outlives_the_run(against, number, until):
    command = [sys.executable, "-m", "asyncdist.cli", "bench", "--sizes", "4", "--repeat", "1000000"]
    command += ["--transport", "tcp", "--against", against]
    with (
        tempfile.TemporaryDirectory() as folder,  # a killed run does not delete its folder
        subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": folder}) as run,
    ):
        until(lambda: sum(map(measures, descendants(run.pid))) == 2)
        started = descendants(run.pid)
        run.send_signal(number)
        assert run.wait() != 0
        until(lambda: not any(map(runs, started)))
        if number is signal.SIGINT:
            assert not list(Path(folder).glob("asyncdist-bench-*"))


@pytest.fixture
def plans(monkeypatch):
    """The plans of the command, which are recorded instead of executed."""
    found = []

    def run(plan, note):
        found.append(plan)
        return Report(plan, dict.fromkeys(machine(), "?"))

    monkeypatch.setattr(launch, "run", run)
    return found


def test_through_torch_uses_the_first_transport(tmp_path):
    program = "from asyncdist.config import Config; print(Config.from_environment().transport)"
    plan = BenchPlan(through=("torch",), transports=("tcp", "auto"))
    (first, _) = launch.commands(plan, tmp_path, None)
    prefix = first[: first.index(sys.executable)]
    run = subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "tcp\n"


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--json", "absent/figures.json", "there is no folder"),
        ("--plot", "figures.xyz", "its name must end in png, svg or pdf"),
        ("--output", "file/folder", "cannot be written"),
    ],
)
def test_unwritable_file_is_refused_before_measuring(option, name, words, tmp_path, monkeypatch, plans):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    run = CliRunner().invoke(main, ["bench", "all_reduce", "--sizes", "4", option, name])
    assert (run.exit_code, type(run.exception)) == (2, SystemExit)
    assert words in run.output
    assert not plans


def test_figures_of_an_earlier_run_stand_beside_those_of_the_same_machine(tmp_path, timing):
    path, row = tmp_path / "figures.json", ResultRow("all_reduce", 4, 2, {"asyncdist": timing(2)})
    path.write_text(json.dumps(Report(BenchPlan(), measured_machine(), [row]).as_json()))
    assert "GB/s" in path.read_text()
    report = Report(BenchPlan(than=str(path)), machine(), [ResultRow("all_reduce", 4, 2, {"asyncdist": timing(1)})])
    report.add_earlier(read_earlier(path))
    assert report.as_json()["rows"][0]["times_faster_than"]["asyncdist"] == {"earlier": pytest.approx(2)}


@pytest.mark.parametrize("kind", ["processor", "cores", "caches"])
def test_figures_of_another_machine_are_refused_before_measuring(kind, tmp_path, plans):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"rows": [], "machine": {**machine(), kind: "another"}}))
    run = CliRunner().invoke(main, ["bench", "--than", str(path)])
    assert run.exit_code
    assert f"{kind} another there" in f"{run.output}{run.exception}"
    assert not plans
    path.write_text("")
    assert (
        "has no figures" in f"{(run := CliRunner().invoke(main, ['bench', '--than', str(path)])).output}{run.exception}"
    )


@pytest.fixture
def without_mpi(monkeypatch):
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: None)


def test_without_mpi_nothing_is_measured(without_mpi, monkeypatch):
    monkeypatch.setattr(launch, "commands", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(UnsupportedError, match=r"pip install mpi4py"):
        launch.run(BenchPlan(against=("mpi",)))


@pytest.mark.parametrize(("mpirun", "words"), [(None, "install Open MPI"), ("/bin/mpirun", "is not Open MPI's")])
def test_error_without_open_mpi_says_what_to_install(mpirun, words, monkeypatch):
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mpi.shutil, "which", lambda name: mpirun)
    monkeypatch.setattr(mpi.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "HYDRA\n"))
    assert words in mpi.mpi_missing()


def test_against_available_omits_missing_rivals(without_mpi, plans):
    run = CliRunner().invoke(main, ["bench", "--against", "available", "--transport", "auto,tcp,tcp"])
    assert run.exit_code == 0, run.output
    assert "mpi is left out: mpi4py is not installed" in run.output
    assert (plans[0].against, plans[0].transports) == (("gloo", "raw"), ("auto", "tcp"))
    assert 4 << 20 in plans[0].sizes


def test_through_torch_measures_the_collectives_of_training_against_gloo(plans):
    run = CliRunner().invoke(main, ["bench", "--through", "torch", "--against", "raw", "--ranks", "3"])
    assert run.exit_code == 0, run.output
    assert (plans[0].collectives, set(plans[0].against), plans[0].ranks) == (THROUGH_TORCH, {"raw", "gloo"}, 3)
