"""The runner of `make test-ecosystem`, with programs that need no library."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent / "run.py"
specification = importlib.util.spec_from_file_location("ecosystem_run", PATH)
run = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = run  # dataclasses look their module up
specification.loader.exec_module(run)

PROGRAM = """\
import torch
import torch.distributed as dist
from regression import end_together, report

import asyncdist.torch_backend

dist.init_process_group("asyncdist")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
"""
ENDINGS = {
    "equal": "report(total=total)\nend_together()",
    "different": "report(total=total, name=[dist.get_backend()])\nend_together()",
    "raising": "raise ValueError('no result')",
    "silent": "",
    "aborting": "import os, signal\nprint('last words', flush=True)\nos.abort() if dist.get_rank() else signal.pause()",
}


@pytest.fixture
def write_case(tmp_path):
    """Write a program with one of `ENDINGS`; return its case."""

    def write_case(ending):
        (tmp_path / "program.py").write_text(PROGRAM + ENDINGS[ending])
        return run.Case("torch", ending, "program")

    return write_case


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize(("ending", "found"), [("equal", ""), ("different", "[0].name[0]: asyncdist instead of gloo")])
def test_results_on_both_back_ends_are_compared(write_case, tmp_path, ending, found):
    case = write_case(ending)
    ours, theirs = (run.run_case(case, backend, tmp_path, tmp_path / backend) for backend in run.BACKENDS)
    assert (ours.reason, theirs.reason) == ("", "")
    assert [each["total"] for each in ours.results] == [[3.0]] * 2
    assert run.compare(ours, theirs) == found
    assert "import asyncdist" not in (tmp_path / "gloo" / "program.py").read_text()
    page = run.page({case: {"asyncdist": ours, "gloo": theirs}})
    assert f"| torch | {ending} | passed | passed | {found or 'equal'} |" in page


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("raising", "exit status 1; ValueError: no result"),
        ("silent", "rank 0 reported nothing"),
        (
            "aborting",
            "exit status 1; rank 1 ended with SIGABRT; no exception in log; last lines: last words | last words",
        ),
    ],
)
def test_program_fails(write_case, tmp_path, ending, reason):
    outcome = run.run_case(write_case(ending), "asyncdist", tmp_path, tmp_path / "asyncdist")
    assert outcome.reason == reason
    passed = run.Outcome(1.0, "")
    assert run.compare(outcome, passed) == f"fails on asyncdist only: {reason}"
    assert run.compare(passed, outcome) == ""


def test_results_of_another_back_end_fail(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank-{rank}.json").write_text('{"back end": "gloo", "process group": "Group"}')
    assert run.check_results(tmp_path, "asyncdist", 1.0).reason == "rank 0 used gloo (Group)"


@pytest.mark.parametrize(
    ("ours", "theirs", "found"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.0 + 1e-7]}, ""),
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.1]}, "a[1]: 2.0 instead of 2.1"),
        ({"a": [1.0]}, {"a": [1.0, 2.0]}, "a: [1.0] instead of [1.0, 2.0]"),
        ({"a": 1}, {"b": 1}, ": {'a': 1} instead of {'b': 1}"),
        ({"a": 1}, {"a": 2}, "a: 1 instead of 2"),
        ({"a": float("nan")}, {"a": 1.0}, "a: nan instead of 1.0"),
    ],
)
def test_difference(ours, theirs, found):
    assert run.difference(ours, theirs) == found


@pytest.mark.exhaustive
@pytest.mark.processes
def test_program_that_does_not_end_is_killed(tmp_path):
    (tmp_path / "program.py").write_text("import threading\nthreading.Event().wait()\n")
    case = run.Case("torch", "hanging", "program", launched=False, limit=1.0)
    outcome = run.run_case(case, "asyncdist", tmp_path, tmp_path / "asyncdist")
    assert outcome.reason == "no end after 1 s; no exception in log; nothing was written"


OF_TORCHRUN = """\
E1125 19:28:42.248000 7 torch/distributed/elastic/agent/api.py:2] failed (exitcode: {}) local_rank: 0 (pid: 8) of binary: b
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
program.py FAILED
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError: closed by peer [127.0.0.1]:33\n",
            "RuntimeError: closed by peer [127.0.0.1]:33",
        ),
        ("RuntimeError: closed by peer [127.0.0.1]:33\n", "RuntimeError: closed by peer [127.0.0.1]:33"),
        ("[default0]:[rank0]: a.b.MismatchError: barrier; more\n", "a.b.MismatchError: barrier"),
        (
            "one\nW1125 19:28:42.180000 7 torch/distributed/elastic/agent/server/api.py:725] Received 15\nTraceback\n"
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 5 got signal: 15\n",
            "no exception in log; last lines: one",
        ),
        ("/a/site-packages/b.py:7: W: old\nwarnings.warn(\n", "no exception in log; last lines: b.py:7: W: old"),
        ("one\ntwo\n\nthree\nfour\n", "no exception in log; last lines: two | three | four"),
        (
            f"W1125 19:28:42.180000 7 torch/distributed/run.py:1028] OMP\n{OF_TORCHRUN.format(3)}",
            "rank 0 ended with exit status 3; no exception in log; nothing was written",
        ),
        (f"RuntimeError: b\n{OF_TORCHRUN.format(1)}", "RuntimeError: b"),
        (f"RuntimeError: b\n{OF_TORCHRUN.format(-11)}", "rank 0 ended with SIGSEGV; RuntimeError: b"),
    ],
)
def test_log_explains_a_failure(tmp_path, log, reason):
    (tmp_path / "log").write_text(log)
    assert run.reason_in(tmp_path / "log") == reason


RANK = """\
import os, threading
with open("ranks", "w") as ranks:
    print(os.getpid(), file=ranks)
threading.Event().wait()
"""


@pytest.mark.exhaustive
@pytest.mark.processes
def test_end_of_torchrun_ends_its_ranks(tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    os.mkfifo(tmp_path / "ranks")
    reader = os.open(tmp_path / "ranks", os.O_RDWR)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True) as launcher:
        said = b""
        while said.count(b"\n") < 2:
            said += os.read(reader, 100)
        run.end_launcher(launcher)
    os.close(reader)
    assert [rank for rank in said.decode().split() if Path(f"/proc/{rank}").exists()] == []


@pytest.mark.parametrize("case", run.CASES, ids=lambda case: f"{case.program}-{case.what}")
def test_programs_exist_and_name_the_back_end(case):
    text = (run.HERE / "programs" / f"{case.program}.py").read_text()
    assert '"asyncdist"' in text
    assert "report(" in text
