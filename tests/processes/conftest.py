"""Fixtures that start real processes as ranks and send them commands."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncdist.testing.processes import PATIENCE, Nursery

PROGRAM = Path(__file__).parent / "program_obeys.py"
SOON = 3.0
"""Seconds within which a failure must reach every rank. Every operation timeout is at least ten times as long."""


@pytest.fixture(scope="session")
def nursery():
    with Nursery(
        ("torch", "asyncdist", "asyncdist.sync", "asyncdist_transports.shm", "asyncdist_transports.tcp")
    ) as nursery:
        yield nursery


@pytest.fixture(autouse=True)
def _cleared(nursery):
    yield
    nursery.clear()


class Told:
    """A rank that obeys: `tell` it what to do, and `hear` what came of it; ``since`` counts from when it was told last."""

    def __init__(self, process, nursery):
        self.process = process
        self._nursery = nursery
        self.told_at, self.since = 0.0, None

    def tell(self, order, *arguments):
        self.told_at, self.since = time.monotonic(), self._nursery.stopwatch()
        self.process.say((order, arguments))

    def hear(self, timeout=PATIENCE):
        """Return what it did; a failure as a namespace of its kind, peer, text and time."""
        how, answer = self.process.hear(timeout)
        return SimpleNamespace(**answer) if how == "failed" else answer

    def do(self, order, *arguments):
        """Tell it something that must go well, and return what it gave."""
        self.tell(order, *arguments)
        answer = self.hear()
        assert not isinstance(answer, SimpleNamespace), answer.text
        return answer


class Job:
    """The ranks of a test. Worlds are numbered, so that the same processes can meet again."""

    def __init__(self, nursery, folder, transport):
        self._nursery = nursery
        self.transport = transport
        self._folder = folder
        self._worlds = itertools.count()

    def stopwatch(self):
        """Count from now, for all ranks."""
        return self._nursery.stopwatch()

    def start(self, count, face="blocking", **environment):
        """Start processes that are not in a world yet."""
        environment.setdefault("ASYNCDIST_TRANSPORT", self.transport)
        ranks = [self._nursery.start(PROGRAM, face, environment=environment) for _ in range(count)]
        return [Told(rank, self._nursery) for rank in ranks]

    def meet(self, ranks, timeout=60.0):
        """Make all given ranks join one world."""
        where = f"file://{self._folder}/world{next(self._worlds)}"
        for rank, told in enumerate(ranks):
            told.tell("init", where, rank, len(ranks), timeout)
        for told in ranks:
            answer = told.hear()
            assert answer is None, answer.text

    def world(self, count, face="blocking", timeout=60.0, **environment):
        """Start processes and make them join one world."""
        ranks = self.start(count, face, **environment)
        self.meet(ranks, timeout)
        return ranks


@pytest.fixture(params=["shm", "tcp"])
def job(request, nursery, tmp_path):
    return Job(nursery, tmp_path, request.param)


@pytest.fixture
def all_do():
    """Send the same command to several ranks at once, and return the outcome of each rank."""

    def all_do(ranks, order, *arguments):
        for told in ranks:
            told.tell(order, *arguments)
        return [told.hear() for told in ranks]

    return all_do
