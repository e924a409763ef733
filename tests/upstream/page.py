"""The outcomes of one version of torch, kept in a file of JSON lines, and the text of docs/conformance.md from them."""

import collections
import json
import os
import platform
import re
from pathlib import Path

from asyncdist.cli.machine import processor

BACKENDS = ("asyncdist", "gloo")
OUTCOMES = ("passed", "failed", "skipped")

Result = dict[str, str | float | int]
"""What `outcome_writer.py` writes at the end of a test, with the ``source`` of the test."""
Results = dict[str, Result]


class Record:
    """The outcomes by suite, back end and test.

    Attributes:
        results: The results of a test by its name, by suite and back end.
        path: The file. It need not exist yet.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self.path = path
        self.results: dict[tuple[str, str], Results] = {}
        if path.exists() and not fresh:
            for line in path.read_text(encoding="utf-8").splitlines():
                suite, backend, result = json.loads(line)
                self.of(suite, backend)[result["test"]] = result
        elif fresh:
            path.unlink(missing_ok=True)

    def of(self, suite: str, backend: str) -> Results:
        """Return the results of a suite on a back end; changes are not written."""
        return self.results.setdefault((suite, backend), {})

    def add(self, suite: str, backend: str, result: Result) -> None:
        """Keep a result, and append it to the file."""
        self.of(suite, backend)[str(result["test"])] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps([suite, backend, result]), file=file)

    def suites(self) -> list[str]:
        """Return the names of the suites of which a test has run, in the order in which they ran."""
        return list(dict.fromkeys(suite for (suite, _), results in self.results.items() if results))

    def count(self, suite: str, backend: str, outcome: str) -> int:
        """Return how many tests have this outcome."""
        return sum(result["outcome"] == outcome for result in self.of(suite, backend).values())


PAGE = """\
# Conformance with torch's own tests

`make test-upstream` runs tests of torch on the back end `asyncdist` and on gloo. They have two sources:

- The wheel of torch contains the tests that torch runs on each of its own back ends: the class `DistributedTest` in
  torch/testing/_internal/distributed/distributed_test.py. They run with four ranks.
- torch's repository contains files of tests in test/distributed. The program fetches those of the installed version;
  `tests/upstream/run.py --source DIR` takes them from a checkout instead.

[Libraries above torch](ecosystem.md) have a page of their own.

An interrupted run continues where it stopped. `tests/upstream/run.py --page docs/conformance.md` wrote this page with
Python {python} on {machine}. Each entry is: passed, failed, skipped.

| torch | tests | file | asyncdist | gloo | groups |
|---|---|---|---|---|--:|
{counts}

*file* is the start of git's name of the file's content, which `git ls-tree -r` prints. *groups* is the number of groups
of asyncdist that the ranks have created. `test_c10d_pybackend.py` creates none: it tests torch's side of back ends in
Python with a back end of its own.

{comparison}

## How the back end is replaced

`DistributedTest` selects its tests by the name of the back end. The program lets it select gloo's tests on both back
ends, also those of timeouts and of `monitored_barrier`, which match gloo's words. It then replaces the name, so that
the default group and its subgroups belong to asyncdist. A test that asks for a group of gloo by name gets one.
Tests that torch runs only with eight ranks or more, or only with MPI, run too. A test passes if every rank ends without
an error.

The files name gloo themselves. In their processes torch creates a group of asyncdist wherever one of gloo is asked for.
Some files run the same tests on each back end of a list, which also says what a back end can do (coalescing,
`gather_single`, sends whose handle was dropped). For asyncdist the program says so too, and more tests run than on gloo.
The ranks are forked instead of spawned.

## Skipped tests

With torch {newest}, torch skips tests on asyncdist for these reasons:

| reason | tests |
|---|--:|
{reasons}
"""

EXPLANATIONS: list[tuple[str, str, str]] = [
    ("DistributedTest", "^test_all_to_all", "torch runs these tests with MPI only: gloo takes tensors of one size"),
    (
        "test_c10d_collectives.py", "noncontiguous_all_to_all_error",
        "the test expects an error; asyncdist also takes tensors that are not contiguous",
    ),
    (
        "test_c10d_collectives.py", "gather_into_tensor_deprecated",
        "the file is newer than torch 2.15, which does not yet give the expected warning",
    ),
    ("test_c10d_collectives.py", "coalescing|gather", "gloo cannot do this"),
    ("test_c10d_p2p.py", "async_work_lifetime", "gloo cannot do this"),
    (
        "test_c10d_process_group.py", "wait_unregisters_work",
        "torch's list of pending operations for compiled graphs, which a private context manager switches on, does not "
        "contain asyncdist's",
    ),
    (
        "_composable/test_replicate.py", "wrong_device_id_type",
        "a rank ended while the other one still connected: gloo passed this test in three further runs",
    ),
]  # fmt: skip
"""Suite, regular expression for the test, and why the outcome differs from gloo's."""


def page(records: dict[str, Record]) -> str:
    """Return the text of the page, from the outcomes by version of torch."""
    rows = [_row(version, record, suite) for version, record in records.items() for suite in record.suites()]
    differing = [line for version, record in records.items() for line in _differing(version, record)]
    comparison = "No test failed, and every test has the same outcome on both back ends."
    if differing:
        header = "| torch | tests | asyncdist | gloo | why |\n|---|---|---|---|---|\n"
        comparison = f"These tests fail, or have different outcomes:\n\n{header}" + "\n".join(differing)
    newest = list(records)[-1]
    reasons = "\n".join(f"| {reason} | {count} |" for reason, count in _skips(records[newest]).most_common())
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    return PAGE.format(
        python=platform.python_version(), machine=f"{os.cpu_count()} cores of {processor()}, {system}",
        counts="\n".join(rows), comparison=comparison, newest=newest, reasons=reasons,
    )  # fmt: skip


def _row(version: str, record: Record, suite: str) -> str:
    counts = [", ".join(str(record.count(suite, backend, outcome)) for outcome in OUTCOMES) for backend in BACKENDS]
    results = list(record.of(suite, "asyncdist").values())
    is_file = suite.endswith(".py")
    source = f"`{results[0]['source']}`" if is_file and results else ""
    groups = sum(int(result["groups"]) for result in results) if is_file else ""
    return f"| {version} | {suite} | {source} | {' | '.join(counts)} | {groups} |"


def _differing(version: str, record: Record) -> list[str]:
    groups = collections.defaultdict(list)
    for suite in record.suites():
        asyncdist, gloo = (record.of(suite, backend) for backend in BACKENDS)
        for name in sorted({*asyncdist, *gloo}):
            outcomes = tuple(str(results.get(name, {}).get("outcome", "not run")) for results in (asyncdist, gloo))
            if "failed" in outcomes or len(set(outcomes)) > 1:
                groups[suite, outcomes, _explanation(suite, name)].append(name)
    return [
        f"| {version} | {suite}: {', '.join(f'`{name}`' for name in names)} | {' | '.join(outcomes)} | {why} |"
        for (suite, outcomes, why), names in groups.items()
    ]


def _explanation(suite: str, name: str) -> str:
    return next((why for of, tests, why in EXPLANATIONS if of == suite and re.search(tests, name)), "")


def _skips(record: Record) -> collections.Counter[str]:
    reasons: collections.Counter[str] = collections.Counter()
    for (_, backend), results in record.results.items():
        if backend == "asyncdist":
            reasons.update(_reason(result) for result in results.values() if result["outcome"] == "skipped")
    return reasons


def _reason(result: Result) -> str:
    reason = str(result["reason"]).splitlines()[0].rstrip(".")
    return "an issue of torch" if re.fullmatch(r"https?://\S+", reason) else reason
