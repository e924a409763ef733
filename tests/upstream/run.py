"""Run torch's own tests of process groups on asyncdist and on gloo, and compare the outcomes.

``make test-upstream`` starts this program; ``python tests/upstream/run.py --help`` lists its options. The tests are those
of the installed torch (`distributed_suite.py`). Outcomes are kept in a file, so that an interrupted run continues with the
tests that are still missing; ``--fresh`` starts again. The exit status is 0 if every test has run and none failed on
asyncdist, 1 if one failed on asyncdist, and 3 if some have not run.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
SUITE = HERE / "distributed_suite.py"
SOURCE = "torch/testing/_internal/distributed/distributed_test.py"
BACKENDS = ("asyncdist", "gloo")
OUTCOMES = ("passed", "failed", "skipped")
NOT_FINISHED = 3

PAGE = """\
# Conformance with torch's own tests

The wheel of torch contains the tests that torch runs on each of its own back ends: the class `DistributedTest` in
{source}. `make test-upstream` runs them with {ranks} ranks on the
back end `asyncdist` and on gloo, and an interrupted run continues where it stopped.

`tests/upstream/run.py --page docs/conformance.md` wrote this page, with torch {torch} and Python {python} on
{machine}.

| back end | passed | failed | skipped |
|---|--:|--:|--:|
{counts}

The file selects its tests by the name of the back end. The program lets it select gloo's tests on both back ends, also
those of timeouts and of `monitored_barrier`, which match gloo's words. It then replaces the name, so that the
default group and its subgroups belong to the back end of the row. A test that asks for a group of gloo by name gets one.
Tests that torch runs only with eight ranks or more, or only with MPI, run too. A test passes if every rank ends without
an error.

{comparison}

Torch skips the other tests for these reasons:

| reason | tests |
|---|--:|
{reasons}
"""

Result = dict[str, str | float]
Results = dict[str, Result]


class Record:
    """The outcomes by back end and test, kept in a file of JSON lines."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.results: dict[str, Results] = {backend: {} for backend in BACKENDS}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not fresh:
            for line in path.read_text(encoding="utf-8").splitlines():
                backend, result = json.loads(line)
                self.results[backend][result["test"]] = result
        self._file = path.open("w" if fresh else "a", encoding="utf-8")

    def add(self, backend: str, result: Result) -> None:
        self.results[backend][str(result["test"])] = result
        print(json.dumps([backend, result]), file=self._file, flush=True)

    def count(self, backend: str, outcome: str) -> int:
        return sum(result["outcome"] == outcome for result in self.results[backend].values())


def names_of_tests(ranks: int, part: str) -> list[str]:
    """Return the names of all tests that contain ``part``."""
    command = [sys.executable, str(SUITE), "--list", str(ranks)]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return [name for name in listed if part in name]


def run_tests(backend: str, ranks: int, names: list[str], log: Path, until: float) -> Iterator[Result]:
    """Run tests and yield each outcome. A program that ends within a test fails this test; the others still run."""
    left = list(names)
    while left and time.monotonic() < until:
        running = None
        command = [sys.executable, str(SUITE), backend, str(ranks), *left]
        with (
            log.open("a") as output,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as suite,
        ):
            assert suite.stdout is not None
            try:
                for line in suite.stdout:
                    result = json.loads(line)
                    running = result["test"]
                    if result["outcome"] == "started":
                        continue
                    left.remove(running)
                    running = None
                    yield result
                    if time.monotonic() >= until:
                        return
            finally:
                suite.terminate()
        if running is None and left:
            running = left[0]
        if running is not None:
            left.remove(running)
            yield {"test": running, "outcome": "failed", "seconds": 0.0, "reason": f"the program ended; see {log}"}


def run_all(record: Record, backends: list[str], ranks: int, names: list[str], folder: Path, until: float) -> None:
    """Run the tests that have no outcome yet, with a progress bar per back end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        for backend in backends:
            left = [name for name in names if name not in record.results[backend]]
            task = progress.add_task(backend, total=len(names), completed=len(names) - len(left))
            for result in run_tests(backend, ranks, left, folder / f"{backend}.log", until):
                record.add(backend, result)
                progress.update(task, advance=1, description=f"{backend} {result['test']}")
                if result["outcome"] == "failed":
                    progress.console.print(f"{backend}: [red]failed[/red] {result['test']}", highlight=False)
            progress.update(task, description=backend)


def show(console: Console, record: Record, backends: list[str], wanted: list[str]) -> None:
    """Print a table of the outcomes, and the reasons of asyncdist's failures."""
    table = Table("back end", *OUTCOMES, "not run", title=f"{SOURCE} of torch {torch.__version__}")
    for backend in backends:
        counts = [record.count(backend, outcome) for outcome in OUTCOMES]
        table.add_row(backend, *map(str, counts), str(len(set(wanted) - set(record.results[backend]))))
    console.print(table)
    for result in record.results["asyncdist"].values():
        if result["outcome"] == "failed":
            console.rule(str(result["test"]))
            console.print(str(result["reason"]), markup=False, highlight=False)


def page(record: Record, ranks: int) -> str:
    """Return the text of docs/conformance.md."""
    differing = []
    for name in sorted({*record.results["asyncdist"], *record.results["gloo"]}):
        outcomes = [str(record.results[backend].get(name, {}).get("outcome", "not run")) for backend in BACKENDS]
        if "failed" in outcomes or len(set(outcomes)) > 1:
            differing.append(f"| `{name}` | {' | '.join(outcomes)} |")
    skips = collections.Counter(
        str(result["reason"]).splitlines()[0].rstrip(".")
        for result in record.results["asyncdist"].values()
        if result["outcome"] == "skipped"
    )
    processor = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    machine = f"{os.cpu_count()} cores of {processor}, {platform.system()} {platform.release().split('-')[0]}"
    counts = "\n".join(
        f"| {backend} | " + " | ".join(str(record.count(backend, outcome)) for outcome in OUTCOMES) + " |"
        for backend in BACKENDS
    )
    reasons = "\n".join(f"| {reason} | {count} |" for reason, count in skips.most_common())
    comparison = "No test failed, and every test has the same outcome on both back ends."
    if differing:
        comparison = "These tests fail, or have different outcomes:\n\n| test | asyncdist | gloo |\n|---|---|---|\n"
        comparison += "\n".join(differing)
    return PAGE.format(
        source=SOURCE, ranks=ranks, torch=torch.__version__, python=platform.python_version(), machine=machine,
        counts=counts, comparison=comparison, reasons=reasons,
    )  # fmt: skip


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def main() -> int:
    """Parse the arguments, run what is missing, print the table; return the exit status."""
    parser = argparse.ArgumentParser(description="Run torch's own tests of process groups on asyncdist and on gloo.")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this back end (may be repeated)")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("-k", dest="part", default="", help="only tests whose name contains this text")
    parser.add_argument("--output", type=Path, default=Path("out/upstream"), help="folder of outcomes and logs")
    parser.add_argument("--fresh", action="store_true", help="forget the outcomes of earlier runs")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time; run again to continue"
    )
    parser.add_argument("--page", type=Path, help="write the outcomes to this file, in the form of docs/conformance.md")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    console = Console()
    backends = options.backend or list(BACKENDS)
    folder = options.output / f"torch-{torch.__version__}-{options.ranks}-ranks"
    record = Record(folder / "outcomes.jsonl", options.fresh)
    wanted = names_of_tests(options.ranks, options.part)
    run_all(record, backends, options.ranks, wanted, folder, until)
    show(console, record, backends, wanted)
    if options.page:
        options.page.write_text(page(record, options.ranks), encoding="utf-8")
    if record.count("asyncdist", "failed"):
        return 1
    if any(set(wanted) - set(record.results[backend]) for backend in backends):
        console.print("some tests have not run: start the program again to continue")
        return NOT_FINISHED
    return 0


if __name__ == "__main__":
    sys.exit(main())
