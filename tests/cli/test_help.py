"""Help without the import of torch, and the errors for invalid arguments and settings."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncdist import __version__
from asyncdist.cli import main

_PROGRAM = """
import sys
from asyncdist.cli import main
try:
    main(sys.argv[1:], prog_name="asyncdist")
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {"torch", "numpy", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["store", "--help"], ["bench", "--help"], ["info", "--help"], ["explain", "--help"]],
    ids=str,
)
def test_help_imports_nothing_heavy(arguments):
    run = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Usage: asyncdist" in run.stdout


def test_commands_that_look_at_a_job_import_nothing_heavy(tmp_path):
    """`trace` reads a dump without calls; of `top`, which needs a job, the modules are imported."""
    dump = {
        "rank": 0,
        "world": "a" * 16,
        "world_size": 1,
        "host": "h",
        "pid": 1,
        "reason": "",
        "time": 2.0,
        "clock": 1.0,
    }
    dump |= {"groups": {}, "entries": []}
    (tmp_path / "asyncdist-aaaaaaaa-rank0.json").write_text(json.dumps(dump))
    imports = "import asyncdist.status.viewer, asyncdist.cli.top_view, asyncdist.kernel.tracing.job_status\n"
    run = subprocess.run(
        [sys.executable, "-c", imports + _PROGRAM, "trace", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_help_lists_the_commands():
    commands = CliRunner().invoke(main, ["--help"]).output.partition("Commands:\n")[2]
    names = [line.split()[0] for line in commands.splitlines() if line[2] != " "]
    assert names == ["bench", "explain", "info", "store", "top", "trace"]


def test_version_is_printed():
    assert CliRunner().invoke(main, ["--version"]).output == f"asyncdist, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["bench", "all_reduse"], "'all_reduse' is not one of 'all_reduce'"),
        (["bench", "--sizes", "4,many"], "'4,many' is not a list of sizes such as 4,64K,25M"),
        (["bench", "--sizes", ","], "not a list of sizes"),
        (["bench", "--against", "nccl"], "'nccl' is not one of gloo, mpi, raw"),
        (["bench", "--ranks", "1"], "1 is not in the range"),
        (["bench", "store"], "in a checkout of the sources, `python -m benchmarks store` measures that"),
        (["info", "--collective", "sum"], "'sum' is not one of"),
        (["info", "--ranks", "5"], "--ranks needs --collective: name the collective to explain"),
        (["store", "--port", "70000"], "70000 is not in the range"),
        (["store", "--c10d", "sometimes"], "'sometimes' is not one of 'off', 'loopback', 'any'"),
        (["bench", "--transport", "auto,gloo"], "'gloo' is not a transport"),
        (["bench", "--transport", ","], "not a list of transports"),
        (["bench", "--device", "cuda"], "in a checkout of the sources, `python -m benchmarks devices` measures that"),
        (["bench", "send"], "`python -m benchmarks devices` measures that"),
        (["bench", "--ddp"], "`python -m benchmarks ddp steps sharded` measures that"),
    ],
    ids=str,
)
def test_invalid_argument_is_named(arguments, error):
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 2
    assert error in run.output


@pytest.mark.parametrize("command", [["info"], ["store", "--port", "0"], ["bench"]], ids=str)
def test_invalid_setting_is_named(command):
    run = CliRunner(env={"ASYNCDIST_TCP_LANES": "several"}).invoke(main, command)
    assert run.exit_code == 2
    assert "ASYNCDIST_TCP_LANES='several' is not a whole number" in run.output
