"""The runner of `make prove-gpu`: parts, limits, reports and the exit status. Here the parts need no device."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROVE = Path(__file__).parents[2] / "gpu" / "prove.py"
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("prove_gpu", PROVE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["prove_gpu"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prove_gpu"]


@pytest.fixture
def prove(runner, tmp_path):
    """Run parts, given as (name, program, limit); return the exit status, both reports and the lines of progress."""

    def prove(*parts, total=60.0, figures=runner.json_line):
        said = []
        made = [runner.Part(name, [sys.executable, "-c", program], limit, figures) for name, program, limit in parts]
        status = runner.prove(made, tmp_path, total, said.append)
        report = json.loads((tmp_path / "report.json").read_text())
        return status, report, (tmp_path / "report.txt").read_text(), said

    return prove


def test_run_in_which_every_part_passes(prove, tmp_path):
    status, report, text, said = prove(("one", "print('{\"largest\": 2}')", 30), ("two", "print('words')", 30))
    assert (status, report["outcome"], report["pending"]) == (0, "passed", [])
    assert [(part["name"], part["outcome"], part["status"]) for part in report["parts"]] == [
        ("one", "passed", 0),
        ("two", "passed", 0),
    ]
    assert report["parts"][0]["figures"] == {"largest": 2}
    assert text.startswith("PASSED: 2 of 2 parts passed")
    assert (tmp_path / "two.log").read_text() == "words\n"
    assert said[0].startswith("[1/2] one, at most ")
    assert said[3].startswith("[2/2] two: passed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.log", "report.json", "report.txt", "two.log"]


def test_failed_part_does_not_keep_the_next_from_running(prove):
    status, report, text, _ = prove(("bad", "print('the reason'); raise SystemExit(3)", 30), ("good", "pass", 30))
    assert (status, report["outcome"]) == (1, "failed")
    assert [part["outcome"] for part in report["parts"]] == ["failed", "passed"]
    assert "bad failed: exit status 3; bad.log ends with\n  | the reason" in text


def test_error_far_above_the_end_of_a_log_is_in_the_report(prove):
    program = "print('ValueError: the cause'); print('noise\\n' * 50); raise SystemExit(1)"
    _, _, text, _ = prove(("bad", program, 30))
    assert "  | ValueError: the cause\n  | …\n  | noise" in text


def test_figures_that_name_a_problem_make_the_part_fail(prove, runner):
    status, report, text, _ = prove(("tests", "print('83 skipped in 0.63s')", 30), figures=runner.gpu_test_figures)
    assert (status, report["parts"][0]["figures"]["skipped"]) == (1, 83)
    assert "no test has passed" in text


def test_part_that_exceeds_its_limit_is_interrupted_and_its_processes_are_killed(prove, tmp_path):
    # The child has a session of its own, like torchrun's ranks, and ignores SIGINT.
    child = "import signal, sys; signal.signal(2, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    program = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
try:
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    status, report, text, _ = prove(("slow", program, 3.0), ("next", "pass", 30))
    assert status == 1
    assert [part["outcome"] for part in report["parts"]] == ["cut off", "passed"]
    assert "not done after 3 s; interrupted" in text
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_parts_for_which_no_time_is_left_are_named(prove):
    status, report, text, _ = prove(("first", "pass", 30), ("second", "pass", 30), total=12.0)
    assert [part["outcome"] for part in report["parts"]] == ["not run", "not run"]
    assert status == 1
    assert "second          not run" in text
    assert "no time was left of 12 s" in text


def test_targets_are_compared_with_the_benchmark(runner):
    def row(ranks, collective, nbytes, ticks=None, **microseconds):
        contenders = {name.replace("_s_", "'s "): {"figure": 1e-6 * each} for name, each in microseconds.items()}
        facts = {"ranks": ranks, "nbytes": nbytes, "device": "1 x H200", "absent": {}, "latest_ticks": ticks or {}}
        return {"collective": collective, **facts, "contenders": contenders}

    rows = [
        row(2, "all_reduce", 100 << 20, cuda_ipc=300, gloo=18_000, copy=60),
        row(2, "all_reduce", 4 << 10, cuda_ipc=100),
        row(2, "broadcast", 1 << 30, {"awaited": 1e-3}, cuda_ipc=500),
        row(1, "all_reduce", 4 << 10, nccl=30, torch_s_nccl=15),
    ]
    outcomes = [runner.Outcome("bench", "passed", "", figures={"rows": rows})]
    targets = runner.targets_of(outcomes)
    assert [target["met"] for target in targets] == [True, False, True, True, True, False]
    assert [target["found"] for target in targets] == pytest.approx([60, 20, 100, 2147.48, 1000, 15], rel=1e-4)
    assert [target["met"] for target in runner.targets_of([])] == [None] * 6


def test_numbers_of_tests_come_from_pytest(runner, tmp_path):
    log = """
SKIPPED [2] ../conftest.py:22: no test of NCCL: no cupy
FAILED tests/gpu/test_on_gpu.py::test_a - AssertionError
================== 1 failed, 80 passed, 2 skipped in 91.25s (0:01:31) ==================
"""
    found = runner.gpu_test_figures(tmp_path, log)
    assert (found["passed"], found["failed"], found["skipped"]) == (80, 1, 2)
    assert found["not_passed"] == ["tests/gpu/test_on_gpu.py::test_a"]
    assert found["skipped_because"] == ["no test of NCCL: no cupy"]
    assert "problem" not in found


def test_unknown_part_is_refused():
    run = subprocess.run([sys.executable, str(PROVE), "--only", "nothing"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "no part is called nothing; there are facts, tests," in run.stderr


@pytest.mark.exhaustive
def test_dry_run_on_the_cpu(tmp_path):
    command = [sys.executable, str(PROVE), "--device", "cpu", "--seconds", "3600", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    figures = {part["name"]: part["figures"] for part in report["parts"]}
    assert figures["stock-torch"]["fsdp2"]["largest_difference"] < 1e-4
    assert figures["train-digits"]["largest_difference"] < 1e-5
    assert figures["weight-sync"]["last_parameters"] == "equal"
    assert figures["remote-calls"]["result, 1048576 bytes, host"] > 0
    assert {row["ranks"] for row in figures["bench-4"]["rows"]} == {4}
    assert all(target["met"] is None for target in report["targets"]), "the targets are those of devices"
