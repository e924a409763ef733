"""The lines of JSON that the programs of this folder print, and that `run.py` reads."""

import contextlib
import json
import os
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO
from unittest.util import strclass


@contextlib.contextmanager
def lines_on_stdout() -> Iterator[TextIO]:
    """Yield this program's stdout. What torch and the tests print goes to stderr."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        yield output


def short_name(test: unittest.TestCase) -> str:
    """Return the name of a test in a file: its class and its method."""
    return ".".join(test.id().split(".")[-2:])


class OutcomeWriter(unittest.TestResult):
    """Writes one line to ``output`` at the start of each test and one at its end.

    A line has the name of the test, its outcome (started, passed, failed, skipped), its seconds, and the reason of a
    failure or a skip. With ``groups`` it also has how many groups of the back end the test's ranks have created.
    """

    def __init__(
        self, output: TextIO, name: Callable[[Any], str] = short_name, groups: Callable[[], int] | None = None
    ) -> None:
        super().__init__()
        self._output = output
        self._name = name
        self._groups = groups
        self._groups_before = 0
        self._started = 0.0
        self._outcome = "passed", ""
        self._fixtures: dict[str, tuple[str, str]] = {}
        self._ended: set[unittest.TestCase] = set()

    def run_all(self, cases: Sequence[unittest.TestCase]) -> None:
        """Run the tests. The outcome of a fixture that fails or skips is that of all tests of its class or module."""
        unittest.TestSuite(cases).run(self)
        for case in cases:
            if case not in self._ended:
                of = f"({strclass(type(case))})", f"({type(case).__module__})"
                outcomes = [outcome for fixture, outcome in self._fixtures.items() if fixture.endswith(of)]
                self.startTest(case)
                self._outcome = outcomes[0] if outcomes else ("failed", "the test has not run")
                self.stopTest(case)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started = time.monotonic()
        self._groups_before = self._groups() if self._groups else 0
        self._outcome = "passed", ""
        self._write(test, "started", "")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._ended.add(test)
        self._write(test, *self._outcome)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        if self._outcome[0] != "failed":
            self._set_outcome(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._set_outcome(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._set_outcome(test, "failed", self.errors[-1][1])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._set_outcome(test, "failed", (self.failures + self.errors)[-1][1])

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self._set_outcome(test, "failed", "the test was expected to fail, and passed")

    def _set_outcome(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        # unittest reports a fixture of a class or a module as an object that is not a test.
        if isinstance(test, unittest.TestCase):
            self._outcome = outcome, reason
        else:
            self._fixtures[test.id()] = outcome, reason

    def _write(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        seconds = round(time.monotonic() - self._started, 1)
        line = {"test": self._name(test), "outcome": outcome, "seconds": seconds, "reason": reason}
        if self._groups:
            line["groups"] = self._groups() - self._groups_before
        print(json.dumps(line), file=self._output, flush=True)
