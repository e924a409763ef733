"""Fixtures that start real processes as ranks and send them commands."""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncdist.errors import UsageError
from asyncdist.kernel.tracing import desync_report

PROGRAM = Path(__file__).parent / "program_obeys.py"
ANSWERS_WITHIN = 30.0
"""Seconds for a command. TCP keep-alive takes 40 s to find a dead peer, and operations time out after 60 s."""


class Told:
    """A rank that executes commands: `tell` sends one, and `hear` returns its outcome."""

    def __init__(self, process):
        self.process = process
        self.told_at = 0.0

    def tell(self, order, *arguments):
        self.told_at = time.monotonic()
        self.process.say((order, arguments))

    def hear(self, timeout=ANSWERS_WITHIN):
        """Return the result of a command, or a namespace with the kind, peer, text and time of its error."""
        how, answer = self.process.hear(timeout)
        return SimpleNamespace(**answer) if how == "failed" else answer

    def do(self, order, *arguments):
        """Execute a command that must succeed, and return its result."""
        self.tell(order, *arguments)
        answer = self.hear()
        assert not isinstance(answer, SimpleNamespace), answer.text
        return answer


def all_do(ranks, order, *arguments):
    """Send the same command to several ranks at once, and return the outcome of each rank."""
    for told in ranks:
        told.tell(order, *arguments)
    return [told.hear() for told in ranks]


def two_are_in_it(ranks, dumps):
    """Let three ranks dump their flight recorders; return whether ranks 0 and 1 wait for rank 2, as the dumps say."""
    for told in ranks:
        # A signal that arrives while a rank writes its dump writes no other one.
        os.kill(told.process.pid, signal.SIGUSR2)
    # No rank may have written yet, or called anything.
    with contextlib.suppress(UsageError, IndexError):
        (records,) = desync_report.read(dumps)
        standing = desync_report.standings(records)[0]
        return len(records) == 3 and set(standing.waiting) == {0, 1} and set(standing.behind) == {2}


class Job:
    """The ranks of a test. The same processes may join several worlds, one after the other."""

    def __init__(self, nursery, folder, transport):
        self._nursery = nursery
        self.transport = transport
        self._folder = folder
        self._worlds = itertools.count()

    def start(self, count, face="blocking", **environment):
        """Start processes that are not in a world yet."""
        environment.setdefault("ASYNCDIST_TRANSPORT", self.transport)
        ranks = [self._nursery.start(PROGRAM, face, environment=environment) for _ in range(count)]
        return [Told(rank) for rank in ranks]

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

    def met(self, *args, **options):
        """Do the same, and open connections by a barrier."""
        ranks = self.world(*args, **options)
        all_do(ranks, "barrier", "world")
        return ranks


_ESSENTIAL = [("shm", "blocking"), ("tcp", "awaiting")]
_EXHAUSTIVE = [("shm", "awaiting"), ("tcp", "blocking"), ("shm", "in_trio"), ("tcp", "in_trio")]
_IN_TURN = {"test_launchers.py", "test_metrics_port.py", "test_signals.py", "test_stopped.py", "test_stuck.py"}
"""Modules of which `make test` runs each test with one of these pairs only, as it does with each case of other tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = {}
    for item in items:
        own = item.path.parent == PROGRAM.parent and item.path.name != "test_torch_trace.py"
        if own and "combination" in item.fixturenames and not item.get_closest_marker("exhaustive"):
            case = dict(item.callspec.params)
            pair = case.pop("combination")
            cases = seen.setdefault(item.path, {})
            number = cases.setdefault((item.originalname, str(case)), len(cases))
            if (case or item.path.name in _IN_TURN) and pair != _ESSENTIAL[number % 2]:
                item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(
    params=[*_ESSENTIAL, *(pytest.param(pair, marks=pytest.mark.exhaustive) for pair in _EXHAUSTIVE)], ids="-".join
)
def combination(request):
    """A transport and an API. The essential tests use each of them once."""
    return request.param


@pytest.fixture
def face(combination):
    """The API that the ranks use."""
    return combination[1]


@pytest.fixture
def job(combination, nursery, tmp_path):
    return Job(nursery, tmp_path, combination[0])


@pytest.fixture(name="all_do")
def _all_do():
    """Return `all_do`."""
    return all_do
