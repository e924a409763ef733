"""The outcomes of one version of torch, kept in a file of JSON lines."""

import json
from pathlib import Path

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
