"""Run programs of the libraries above torch on asyncdist and on gloo, and compare the outcomes and the results.

``make test-ecosystem`` installs the libraries of requirements.txt and starts this program; ``--help`` lists its options.
A program names the back end as ``"asyncdist"``. For the run on gloo, this word is replaced and the import of asyncdist is
dropped; nothing else differs. Each rank hands its results to `report` in programs/regression.py. The exit status is 1 if a
program that passes on gloo fails on asyncdist, or if its results differ.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncdist.cli.machine import processor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BACKENDS = ("asyncdist", "gloo")
RANKS = 2
GROUPS = {
    "asyncdist": "asyncdist.torch_backend.process_group.ProcessGroup",
    "gloo": "torch.distributed.distributed_c10d.ProcessGroup",
}
TORCHFT = str(ROOT / ".venv-torchft" / "bin" / "python")
"""The environment with torchft, which needs a later torch than the other libraries."""
TOLERANCE = 1e-5
"""Relative tolerance of results, for another order of summation."""
LIMIT = 600.0
"""Seconds after which a program counts as failed."""
GRACE = 60.0
"""Seconds for a launcher to end its ranks. torchrun kills them after 30."""
LINES, LINE = 3, 200
"""How many of a log's last lines explain a failure without an exception, and how many characters of each."""

# After the prefixes that torch puts before the lines of a rank. torchrun's own exceptions only say that something ended.
_EXCEPTION = re.compile(
    r"(?:\[\w+\]: ?)*((?!torch\.distributed\.elastic\.)(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception): .*)", re.ASCII
)
_END_OF_RANK = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) ")
_END_BY_TORCHRUN = re.compile(r"[WE]\d{4} .* \S*torch/distributed/elastic/(?:agent|multiprocessing)/")
_OF_TORCHRUN = re.compile(r"[WE]\d{4} .* \S*torch/distributed/|\*+$|Setting OMP_NUM_THREADS |warnings\.warn\($")
_FOLDER = re.compile(r"\S*/site-packages/")


@dataclass(frozen=True)
class Case:
    """A program in a row of the table.

    ``launched`` is False for a program that starts its ranks itself; torchrun starts the others. ``ranks`` report results.
    ``python`` is that of the environment with the library.
    """

    library: str
    what: str
    program: str
    arguments: tuple[str, ...] = ()
    launched: bool = True
    limit: float = LIMIT
    ranks: int = RANKS
    python: str = sys.executable

    @property
    def version(self) -> str:
        """The version of the library, in the environment of the program."""
        return versions_at(self.python)[self.library]


@functools.cache
def versions_at(python: str) -> dict[str, str]:
    """Return the versions of the packages of an environment by name."""
    program = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    made = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return dict(json.loads(made.stdout))


CASES = (
    Case("accelerate", "`test_utils` script `test_script`", "accelerate_script", ("test_script",)),
    Case("accelerate", "`test_utils` script `test_ops`", "accelerate_script", ("test_ops",)),
    Case("accelerate", "`test_utils` script `test_sync`", "accelerate_script", ("test_sync",)),
    Case(
        "accelerate", "`test_utils` script `test_distributed_data_loop`", "accelerate_script",
        ("test_distributed_data_loop",), limit=90.0,
    ),
    Case(
        "accelerate", "the same script without uneven inputs", "accelerate_script",
        ("test_distributed_data_loop", "test_default_ensures_even_batch_sizes", "test_can_disable_even_batches",
         "test_pickle_accelerator"),
    ),
    Case("accelerate", "training, collectives, saved state", "accelerate_training"),
    Case("accelerate", "`notebook_launcher`", "accelerate_notebook", launched=False),
    Case("accelerate", "DDP's communication hooks", "accelerate_hooks"),
    Case("lightning", "Trainer, DDP, its own launcher", "lightning_trainer", launched=False),
    Case("lightning", "Trainer, DDP, forked", "lightning_forked", launched=False),
    Case("lightning", "Trainer, FSDP2", "lightning_fsdp2"),
    Case("lightning", "Fabric, DDP", "fabric_ddp"),
    Case("lightning", "Fabric, FSDP2", "fabric_fsdp2"),
    Case("torchmetrics", "13 metrics, uneven, in a subgroup", "torchmetrics_sync"),
    Case("pytorch-ignite", "training, metrics, collectives", "ignite_training"),
    Case("pytorch-ignite", "`Parallel`, its own launcher", "ignite_parallel", launched=False),
    Case("transformers", "`Trainer`, a GPT-2 of one layer", "transformers_trainer"),
    *(Case("deepspeed", f"ZeRO stage {stage}", "deepspeed_zero", (str(stage),)) for stage in range(4)),
    Case("deepspeed", "pipeline of two stages", "deepspeed_pipeline"),
    Case("ray", "`TorchTrainer`", "ray_train", launched=False),
    *(
        Case("torchft-nightly", f"{what}, a replica is replaced", "torchft_training", (how,), False, python=TORCHFT)
        for what, how in (("Manager, DDP", "ddp"), ("LocalSGD", "local_sgd"), ("DiLoCo", "diloco"))
    ),
    Case("torchft-nightly", "its own tests", "torchft_tests", (), False, limit=1800.0, ranks=1, python=TORCHFT),
)  # fmt: skip

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # tests of torchft have numbers in the order of a set
    "ACCELERATE_USE_CPU": "true",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Outcome:
    """What a program did on a back end. ``reason`` is empty if it passed; ``results`` are those of each rank."""

    seconds: float
    reason: str
    results: tuple[dict[str, Any], ...] = ()


def prepare(case: Case, backend: str, programs: Path, folder: Path) -> None:
    """Copy the programs of a case, on gloo with the name of the back end replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "results").mkdir(parents=True)
    for source in (programs / f"{case.program}.py", HERE / "programs" / "regression.py"):
        text = source.read_text(encoding="utf-8")
        if backend != "asyncdist":
            text = text.replace('"asyncdist"', f'"{backend}"').replace("import asyncdist.torch_backend\n", "")
        (folder / source.name).write_text(text, encoding="utf-8")


def run_case(case: Case, backend: str, programs: Path, folder: Path) -> Outcome:
    """Run a program on two ranks."""
    prepare(case, backend, programs, folder)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"] if case.launched else []
    command = [case.python, *launcher, f"{case.program}.py", *case.arguments]
    environment = {**os.environ, **ENVIRONMENT, "ECOSYSTEM_RESULTS": str(folder / "results")}
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    started = time.monotonic()
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            status = process.wait(case.limit)
            reason = status_name(status) if status else ""
        except subprocess.TimeoutExpired:
            reason = f"no end after {case.limit:.0f} s"
            end_launcher(process)
        finally:
            # The ranks that a launcher left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - started
    if reason:
        return Outcome(seconds, f"{reason}; {reason_in(folder / 'log')}")
    return check_results(folder / "results", backend, seconds, case.ranks)


def end_launcher(process: subprocess.Popen[bytes]) -> None:
    """Let a launcher end its ranks, which torchrun starts in sessions of their own."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def check_results(folder: Path, backend: str, seconds: float, ranks: int = RANKS) -> Outcome:
    """Read the results of all ranks. A rank without results, or on another back end, fails the program."""
    results = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}.json"
        if not path.exists():
            return Outcome(seconds, f"rank {rank} reported nothing")
        result = json.loads(path.read_text(encoding="utf-8"))
        used = result.pop("back end"), result.pop("process group")
        if used != (backend, GROUPS[backend]):
            return Outcome(seconds, f"rank {rank} used {used[0]} ({used[1]})")
        results.append(result)
    return Outcome(seconds, "", tuple(results))


def reason_in(log: Path) -> str:
    """Return why a program failed: the signal that ended a rank, and the first exception or what was written last."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    exception = next((found[1].partition("; ")[0] for line in lines if (found := _EXCEPTION.match(line))), "")
    end = next(filter(None, map(_END_OF_RANK.search, lines)), None)
    ended = f"rank {end[2]} ended with {status_name(int(end[1]))}; " if end else ""
    if exception:
        return f"{ended if 'SIG' in ended else ''}{exception}"
    own = itertools.takewhile(lambda line: not _END_BY_TORCHRUN.match(line), lines)
    last = [_FOLDER.sub("", line)[:LINE] for line in own if line and not _OF_TORCHRUN.match(line)][-LINES:]
    return f"{ended}no exception in {log.name}; {'last lines: ' + ' | '.join(last) if last else 'nothing was written'}"


def status_name(status: int) -> str:
    """Return the name of the signal that ended a process, or its exit status."""
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Return where two results differ, or an empty string."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(f"{where}.{key}".lstrip("."), ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, float) and isinstance(theirs, float):
        close = math.isclose(ours, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE / 10)
        return "" if close else f"{where}: {ours} instead of {theirs}"
    else:
        return "" if ours == theirs else f"{where}: {ours} instead of {theirs}"
    return next(filter(None, (difference(a, b, place) for place, a, b in pairs)), "")


def compare(ours: Outcome, theirs: Outcome) -> str:
    """Return what is wrong with asyncdist's outcome compared with gloo's, or an empty string."""
    if theirs.reason:
        return ""
    if ours.reason:
        return f"fails on asyncdist only: {ours.reason}"
    return difference([*ours.results], [*theirs.results])


PAGE = """\
# Libraries on asyncdist

`make test-ecosystem` installs libraries above torch.distributed, runs programs of each with two ranks on the back end
`asyncdist` and then on gloo, and compares the results. [How to use each library](libraries.md) with asyncdist has the lines
that the programs contain. [Torch's own tests](conformance.md) are another page.

`tests/ecosystem/run.py --page docs/ecosystem.md` wrote this page, with torch {torch} and Python {python} on
{machine}.
{versions}.

| library | program | asyncdist | gloo | results | seconds on asyncdist | on gloo |
|---|---|---|---|---|--:|--:|
{rows}

A program passes if every rank ends without an error, and if its default group belongs to the back end of the column. Most
programs train a small model and also compare its weights with those of training in one process. *equal*: each rank's
results are those on gloo, within a relative {tolerance:g}. The scripts check their own results and report none. The times
include imports, on a machine with other work: they are no measurement of the back ends.

torchft runs with the torch of constraints-torch2.15.txt. In its programs a replica is killed and replaced. Its tests come
with its wheel; the program names those that are left out, such as tests of gloo by name.

Accelerate does not join uneven inputs on CPUs. In `test_distributed_data_loop` the ranks therefore call different
collectives: gloo hangs, and asyncdist raises an error.
{failures}
## Left out

These scripts of `accelerate.test_utils` are not in the table:

- `test_ddp_comm_hook` passes CUDA device numbers to DDP, `test_pippy` does nothing without GPUs, and `test_merge_weights`
  fails on CPUs, where Accelerate does not use FSDP. The program of communication hooks above takes the place of the first.
- `test_notebook` tests the launcher of notebooks, which the table has too; `test_cli` starts no group.
- All scripts in `external_deps` but `test_pippy` download models or data sets.

Lightning refuses FSDP1 without a GPU, but not FSDP2. DeepSpeed compiles operators at run time. The programs use torch's
optimizer, and switch off the only operator that DeepSpeed would compile for them, so they need no compiler.
"""


def page(outcomes: dict[Case, dict[str, Outcome]]) -> str:
    """Return the text of docs/ecosystem.md."""
    rows, failures = [], []
    for case, (ours, theirs) in ((case, (each["asyncdist"], each["gloo"])) for case, each in outcomes.items()):
        cells = ["failed" if outcome.reason else "passed" for outcome in (ours, theirs)]
        same = "–" if ours.reason or theirs.reason or not any(ours.results) else compare(ours, theirs) or "equal"
        times = [f"{outcome.seconds:.0f}" for outcome in (ours, theirs)]
        rows.append(f"| {case.library} | {case.what} | {' | '.join([*cells, same, *times])} |")
        for backend, outcome in (("asyncdist", ours), ("gloo", theirs)):
            if outcome.reason:
                failures.append(f"- {case.library}, {case.what}, on {backend}: {outcome.reason}")
    libraries = {case.library: case.version for case in outcomes}
    versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return PAGE.format(
        torch=importlib.metadata.version("torch"), python=platform.python_version(),
        machine=f"{os.cpu_count()} cores of {processor()}, {system}",
        versions=f"The libraries are {versions}", rows="\n".join(rows),
        tolerance=TOLERANCE,
        failures="".join(["\n## Failures\n\n", "\n".join(failures), "\n"]) if failures else "",
    )  # fmt: skip


def run_all(cases: Sequence[Case], folder: Path, console: Console) -> dict[Case, dict[str, Outcome]]:
    """Run each case on both back ends, one after the other."""
    outcomes: dict[Case, dict[str, Outcome]] = {}
    for case in cases:
        name = "-".join([case.program, *case.arguments])
        for backend in BACKENDS:
            with console.status(f"{case.library}: {case.what} on {backend}"):
                outcome = run_case(case, backend, HERE / "programs", folder / backend / name)
            outcomes.setdefault(case, {})[backend] = outcome
            verdict = outcome.reason or "passed"
            console.print(f"{case.library}, {case.what}, {backend}: {verdict}, {outcome.seconds:.0f} s", markup=False)
    return outcomes


def main() -> int:
    """Run the cases, print a table; return the exit status."""
    parser = argparse.ArgumentParser(description="Run programs of libraries above torch on asyncdist and on gloo.")
    parser.add_argument("-k", dest="part", default="", help="only programs with this text in their name or library")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "ecosystem", help="folder of programs and logs")
    parser.add_argument("--page", type=Path, help="write the outcomes to this file, in the form of docs/ecosystem.md")
    options = parser.parse_args()
    console = Console()
    cases = [case for case in CASES if options.part in f"{case.library} {case.program} {case.what}"]
    outcomes = run_all(cases, options.output.resolve(), console)
    table = Table("library", "program", *BACKENDS, "seconds", "comparison", title=f"{RANKS} ranks")
    wrong = 0
    for case, each in outcomes.items():
        found = compare(each["asyncdist"], each["gloo"])
        wrong += bool(found)
        cells = ["failed" if each[backend].reason else "passed" for backend in BACKENDS]
        times = ", ".join(f"{each[backend].seconds:.0f}" for backend in BACKENDS)
        table.add_row(
            f"{case.library} {case.version}",
            case.what,
            *cells,
            times,
            found or ("" if each["gloo"].reason else "equal"),
        )
    console.print(table, markup=False)
    if options.page:
        options.page.write_text(page(outcomes), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
