"""Run torch's own tests of process groups on asyncdist and on gloo, and compare the outcomes.

``make test-upstream`` starts this program; ``python tests/upstream/run.py --help`` lists its options. The tests are
`DistributedTest` of the installed torch (`distributed_suite.py`), and files of its sources (`file_suite.py`), which are
fetched. Outcomes are kept in a file, so that an interrupted run continues with the tests that are still missing;
``--fresh`` starts again. The exit status is 0 if every test has run and none failed on asyncdist, 1 if one failed on
asyncdist, and 3 if some have not run.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from page import BACKENDS, OUTCOMES, Record, Result, page
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from upstream_files import FILES, SourceError, UpstreamFiles, blob_of, ref_of

HERE = Path(__file__).parent
WHEEL = "DistributedTest"
NOT_FINISHED = 3


@dataclass(frozen=True)
class Suite:
    """Tests that one program runs.

    Attributes:
        name: Of the test case, or of the file.
        program: The program, which takes the name of a back end, ``argument``, and names of tests.
        source: Names what the tests are. An outcome of another source counts as missing.
    """

    name: str
    program: Path
    argument: str
    source: str

    def names_of_tests(self, part: str) -> list[str]:
        """Return the names of all tests that contain ``part``."""
        command = [sys.executable, str(self.program), "--list", self.argument]
        # What torch prints while it is imported is of no interest, unless the program fails.
        listed = subprocess.run(command, capture_output=True, text=True)
        if listed.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{listed.stderr}")
        return [name for name in listed.stdout.split() if part in name]

    def run(self, backend: str, names: list[str], log: Path, until: float) -> Iterator[Result]:
        """Run tests and yield each outcome. A program that ends within a test fails this test; the others still run."""
        left = list(names)
        while left and time.monotonic() < until:
            running = None
            command = [sys.executable, str(self.program), backend, self.argument, *left]
            with (
                log.open("a") as output,
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True) as program,
            ):
                assert program.stdout is not None
                try:
                    for line in program.stdout:
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
                    program.terminate()
            if running is None and left:
                running = left[0]
            if running is not None:
                left.remove(running)
                yield {"test": running, "outcome": "failed", "seconds": 0.0, "reason": f"the program ended; see {log}"}


def all_suites(wanted: list[str], ranks: int, files: UpstreamFiles, console: Console) -> tuple[list[Suite], bool]:
    """Return the suites that are ``wanted``, by name or all, and whether none is missing."""
    suites = []
    if not wanted or WHEEL in wanted:
        suites.append(Suite(WHEEL, HERE / "distributed_suite.py", str(ranks), f"{ranks} ranks"))
    for name in wanted or FILES:
        if name == WHEEL:
            continue
        try:
            path = files.obtain(name)
        except SourceError as error:
            console.print(f"[red]{name} cannot run[/red]: {error}", highlight=False, soft_wrap=True)
            return suites, False
        if path is None:
            console.print(f"{name}: {files.ref} of torch does not have this file", highlight=False)
        else:
            suites.append(Suite(name, HERE / "file_suite.py", str(path.absolute()), blob_of(path)[:10]))
    return suites, True


def run_all(
    record: Record, backends: list[str], suites: list[Suite], part: str, folder: Path, until: float
) -> dict[tuple[str, str], int]:
    """Run the tests that have no outcome yet, with a progress bar per suite and back end; return how many are left."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    missing = {}
    with Progress(*columns) as progress:
        for suite in suites:
            names = suite.names_of_tests(part)
            for backend in backends:
                results = record.of(suite.name, backend)
                left = [name for name in names if results.get(name, {}).get("source") != suite.source]
                task = progress.add_task(f"{backend} {suite.name}", total=len(names), completed=len(names) - len(left))
                missing[suite.name, backend] = len(left)
                for result in suite.run(backend, left, folder / f"{backend}.log", until):
                    record.add(suite.name, backend, result | {"source": suite.source})
                    missing[suite.name, backend] -= 1
                    progress.update(task, advance=1)
                    if result["outcome"] == "failed":
                        progress.console.print(f"{backend}: [red]failed[/red] {result['test']}", highlight=False)
    return missing


def show(console: Console, record: Record, missing: dict[tuple[str, str], int]) -> None:
    """Print a table of the outcomes, and the reasons of asyncdist's failures."""
    table = Table("tests", "back end", *OUTCOMES, "not run", title=f"torch {torch.__version__}")
    for (suite, backend), left in missing.items():
        table.add_row(suite, backend, *(str(record.count(suite, backend, outcome)) for outcome in OUTCOMES), str(left))
    console.print(table)
    for suite, backend in missing:
        for result in record.of(suite, backend).values():
            if (backend, result["outcome"]) == ("asyncdist", "failed"):
                console.rule(f"{suite} {result['test']}")
                console.print(str(result["reason"]), markup=False, highlight=False)


def main() -> int:
    """Parse the arguments, run what is missing, print the table; return the exit status."""
    parser = argparse.ArgumentParser(description="Run torch's own tests of process groups on asyncdist and on gloo.")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="only this back end (may be repeated)")
    parser.add_argument(
        "--suite", choices=(WHEEL, *FILES), action="append", default=[], help="only this one (may be repeated)"
    )
    parser.add_argument("--ranks", type=int, default=4, help=f"number of ranks of {WHEEL} (default: 4)")
    parser.add_argument("-k", dest="part", default="", help="only tests whose name contains this text")
    parser.add_argument("--source", type=Path, help="a checkout of pytorch with the files; without it they are fetched")
    parser.add_argument("--output", type=Path, default=Path("out/upstream"), help="folder of outcomes, logs and files")
    parser.add_argument("--fresh", action="store_true", help="forget the outcomes of earlier runs")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time; run again to continue"
    )
    parser.add_argument(
        "--page",
        type=Path,
        help="write the outcomes of all versions in the folder to this file, as docs/conformance.md",
    )
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    console = Console()
    files = UpstreamFiles(
        ref_of(torch.__version__, torch.version.git_version), options.output / "sources", options.source
    )
    folder = options.output / f"torch-{torch.__version__}"
    record = Record(folder / "outcomes.jsonl", options.fresh)
    suites, complete = all_suites(options.suite, options.ranks, files, console)
    folder.mkdir(parents=True, exist_ok=True)
    missing = run_all(record, options.backend or list(BACKENDS), suites, options.part, folder, until)
    show(console, record, missing)
    if options.page:
        records = {path.name.removeprefix("torch-"): path for path in options.output.glob("torch-*")}
        options.page.write_text(
            page({version: Record(path / "outcomes.jsonl") for version, path in sorted(records.items())}),
            encoding="utf-8",
        )
    if any(record.count(suite.name, "asyncdist", "failed") for suite in suites):
        return 1
    if not complete or any(missing.values()):
        console.print("some tests have not run: start the program again to continue")
        return NOT_FINISHED
    return 0


if __name__ == "__main__":
    sys.exit(main())
