"""Teams of ranks that run programs of torch.distributed over asyncdist and over gloo and compare the results.

A program is a function in one of the programs_*.py. A team over gloo and a team over each asyncdist transport run it, and
the ranks must return the same results. Ranks are forked from a process that has imported torch. A team lives through
many tests; a team that fails a program is replaced, so that one failure fails one test only.
"""

import contextlib
import itertools
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from benchmarks.processes import Nursery, RankEndedError
from tests.support.daemon import started

HERE = Path(__file__).parent
PRELOAD = (
    "torch", "asyncdist", "asyncdist.sync", "asyncdist_transports.shm", "asyncdist_transports.tcp",
    "torch.distributed.algorithms.join", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.nn.functional", "torch.distributed.optim", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)  # fmt: skip
LIGHT_PRELOAD = (
    "asyncdist.torch_backend.rendezvous.rendezvous_handler", "asyncdist_transports.shm", "asyncdist_transports.tcp",
    "torch.distributed.fsdp", "torch._dynamo",
)  # fmt: skip
PATIENCE = 40.0
"""Default time limit of a program in seconds; the timeout of a collective is three quarters of it."""
GRACE = 3.0
"""Seconds that the other ranks have to report after one rank has failed."""
CLOSE = 2e-5
"""Relative tolerance of results whose sums depend on the order of summation."""


BROAD = {"checkpoint", "ddp", "functional", "mesh", "pipeline", "sharded"}
"""Programs above the collectives: `make test` runs each of them with one pair of transport and ranks."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave pairs of transport and ranks to the exhaustive tests."""
    seen = {}
    for item in items:
        given = dict(item.callspec.params) if item.path.parent == HERE and hasattr(item, "callspec") else {}
        pair = given.pop("transport", None), given.pop("world", None)
        if None in pair:
            continue
        essential = [("shm", 2), ("tcp", 4)]
        module = given.get("module", item.path.stem.removeprefix("test_"))
        if module in BROAD:
            # The programs of a module take turns.
            cases = seen.setdefault(module, {})
            number = cases.setdefault((item.originalname, str(given)), len(cases))
            essential = [("shm", 2)] if number % 2 else [("tcp", 2)]
        if pair not in essential:
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture
def daemon():
    """A store daemon in a process of its own."""
    with started("--port", "0") as daemon:
        yield daemon
        assert daemon.stop() == (0, "")


@pytest.fixture
def statuses():
    """The exit statuses that a test expects of ranks other than 0, by rank."""
    return {}


@pytest.fixture
def ended(statuses):
    """Wait until ranks have ended with a status, 0 by default: ``ended(*ranks)``."""

    def ended(*ranks, status=0):
        for rank in ranks:
            statuses[rank] = status
            assert rank.wait() == status, rank.output()

    return ended


@pytest.fixture
def start_world(nursery, tmp_path, statuses):
    """Fork ranks that run a function of a program and meet: ``start_world(program, function, world, *arguments)``.

    After the test they end with status 0, unless the test has killed them or expects another one.
    """
    meetings, started = itertools.count(), []

    def start_world(program, function, world, *arguments, ranks=None, **environment):
        meeting = f"file://{tmp_path}/meeting-{next(meetings)}"
        started.append(
            [
                nursery.start(HERE / program, function, rank, world, meeting, *arguments, environment=environment)
                for rank in range(ranks or world)
            ]
        )
        return started[-1]

    yield start_world
    for rank in itertools.chain(*started):
        assert rank.wait() in (statuses.get(rank, 0), -signal.SIGKILL), rank.output()


@pytest.fixture
def shut_down(ended):
    """Shut down agents of program_at_daemon.py in order."""

    def shut_down(*agents):
        for agent in agents:
            agent.say("shut down")
            assert agent.hear() is True
            ended(agent)

    return shut_down


@pytest.fixture(scope="session")
def shared_nursery():
    """A nursery with few imports: with all imports of a team, the interpreter of a rank takes a second to shut down."""
    with Nursery(LIGHT_PRELOAD) as nursery:
        yield nursery


class ProgramFailedError(AssertionError):
    """A program raised, ended or hung on some rank."""


class Team:
    """Ranks of one backend and transport that share a process group and run programs until one program fails."""

    def __init__(self, nursery, backend, transport, world, folder):
        self.label = f"{backend}-{transport or 'own'}-{world}"
        self._nursery = nursery
        self._backend = backend
        self._environment = {
            "ASYNCDIST_TRANSPORT": transport,
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        self._world = world
        self._folder = folder
        self._meetings = itertools.count()
        self._ranks = []
        self._results = {}
        self.start()

    def start(self):
        """Fork the ranks. They complete the rendezvous when each has received its first program."""
        meeting = f"file://{self._folder}/{self.label}-{next(self._meetings)}"
        self._ranks = [
            self._nursery.start(
                HERE / "program_team.py", "serve", self._backend, rank, self._world, meeting, PATIENCE * 0.75,
                environment=self._environment,
            )
            for rank in range(self._world)
        ]  # fmt: skip

    def replace(self):
        """Kill the ranks and fork new ones."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
        for rank in self._ranks:
            rank.wait()
            rank.close()
        self.start()

    def run(self, module, name, *arguments, patience=PATIENCE):
        """Return the results of a program by rank; raise ProgramFailedError if a rank returns no result.

        A program runs once per team; later calls return the cached result or raise the cached error.
        """
        key = module, name, arguments
        if key not in self._results:
            for rank in self._ranks:
                # A rank that has died since the last program is reported by _answers().
                with contextlib.suppress(BrokenPipeError):
                    rank.say((*key, patience))
            answers = self._answers(patience)
            if any(answer is None or answer[0] != "done" for answer in answers):
                self._results[key] = ProgramFailedError(self._report(name, answers))
                self.replace()
            else:
                self._results[key] = [pickle.loads(answer[1]) for answer in answers]
        result = self._results[key]
        if isinstance(result, ProgramFailedError):
            raise result
        return result

    def _answers(self, patience):
        """Return the answer of every rank, None for a silent one. After a failure the others have GRACE seconds."""
        answers, silent = [None] * self._world, set(range(self._world))
        until = time.monotonic() + patience + GRACE
        while silent and time.monotonic() < until:
            for rank in sorted(silent):
                try:
                    answers[rank] = self._ranks[rank].hear(0.25)
                except TimeoutError:
                    continue
                except RankEndedError as error:
                    answers[rank] = ("ended", str(error))
                silent.discard(rank)
                if answers[rank][0] != "done":
                    until = min(until, time.monotonic() + GRACE)
        return answers

    def _report(self, name, answers):
        """Return what each rank did and printed."""
        lines = [f"{name} over {self.label}:"]
        for rank, answer in enumerate(answers):
            how, what = answer or ("said nothing", "")
            lines.append(f"-- rank {rank}: {how}")
            if how != "done":
                lines += [str(what), self._ranks[rank].output()[-6000:]]
        return "\n".join(lines)


@pytest.fixture(scope="session")
def teams(tmp_path_factory):
    """All teams by (transport, world); gloo's transport is "gloo"."""
    folder, backends = tmp_path_factory.mktemp("teams"), {"gloo": "gloo", "shm": "asyncdist", "tcp": "asyncdist"}
    with Nursery(PRELOAD) as nursery:
        yield {
            (name, world): Team(nursery, backend, "" if name == "gloo" else name, world, folder)
            for world in (2, 4)
            for name, backend in backends.items()
        }


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def world(request):
    """The number of ranks."""
    return request.param


@pytest.fixture
def same_over_gloo(teams, transport, world):
    """Run a program over an asyncdist transport and over gloo, and compare each rank's results by `assert_alike`."""

    def same_over_gloo(module, name, *arguments, close=False, patience=PATIENCE):
        expected = teams["gloo", world].run(module, name, *arguments, patience=patience)
        ours = teams[transport, world].run(module, name, *arguments, patience=patience)
        assert None not in expected, f"{name} returns nothing to compare"
        assert_alike(ours, expected, close)

    return same_over_gloo


@pytest.fixture
def as_expected(teams, transport, world):
    """Run a program over an asyncdist transport that returns pairs of actual and expected results."""

    def as_expected(module, name):
        for pairs in teams[transport, world].run(module, name):
            assert pairs, f"{name} returns nothing to compare"
            for actual, expected in pairs:
                assert_alike(actual, expected)

    return as_expected


@pytest.fixture(params=["shm", "tcp"])
def transport(request):
    """The asyncdist transport of the ranks."""
    return request.param


@pytest.fixture(scope="session")
def check_alike():
    """Return `assert_alike`."""
    return assert_alike


def assert_alike(actual, expected, close=False):
    """Compare two trees of results. ``close`` is the relative tolerance of floating-point numbers; True means `CLOSE`."""
    leaves, structure = tree_flatten(actual)
    expected_leaves, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
        assert type(leaf) is type(expected_leaf), (leaf, expected_leaf)
        if not isinstance(expected_leaf, float | torch.Tensor):
            assert leaf == expected_leaf
            continue
        floating = isinstance(expected_leaf, float) or expected_leaf.is_floating_point() or expected_leaf.is_complex()
        tolerance = (CLOSE if close is True else close) if floating else 0.0
        torch.testing.assert_close(leaf, expected_leaf, rtol=tolerance, atol=tolerance / 10)
