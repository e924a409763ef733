"""Fixtures of all tests: event loops, transports, processes, waiting, and the check that nothing is left behind.

A coroutine test runs on uvloop; marked ``each_loop`` it also runs on asyncio's own loop in debug mode. A test that takes
``transport`` runs over each transport. After each test no new thread, task, process, socket, pipe, event descriptor or
memory segment may be left.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from asyncdist.base.background_loop import background_loop, observing_loop
from asyncdist.testing.hosts import HostsUnavailableError
from benchmarks.processes import Nursery
from tests.support.resources import children, open_files
from tests.support.stopwatch import Stopwatch

PATIENCE = 5.0
"""Seconds for threads, descriptors and processes to end after a test, without time spent waiting for a processor."""
LONG = 60.0
"""Seconds: a limit that no test reaches, even on a busy machine."""
ESSENTIAL = ("trio", "asyncdist.sync", "asyncdist.store", "asyncdist_transports.shm", "asyncdist_transports.tcp")
"""The modules that most ranks need."""

# A shell lets background processes ignore SIGINT, and the processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The time of an example depends on the load of the machine. Each run draws other examples, so a few suffice.
hypothesis.settings.register_profile(
    "asyncdist", max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("asyncdist")

# -- loops and transports ---------------------------------------------------------------------------


class DebugLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop, always in debug mode: it checks callbacks and the threads that they come from.

    It does not record where futures were made, which takes as long as all the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow_callback_duration = LONG  # callbacks are slow on a busy machine

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)

    def get_debug(self) -> bool:
        return False  # futures and handles call this; the loop itself uses the value that was set


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio-debug": DebugLoop}
try:
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop
except ImportError:  # Windows
    pass


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    marker = item.get_closest_marker("asyncio")
    # pytest-asyncio skips a test that names a loop of which there is no factory.
    assert marker is None or not marker.kwargs.get("loop_factories"), f"{item.nodeid}: use the marker each_loop"
    kinds = LOOPS if item.get_closest_marker("each_loop") else list(LOOPS)[-1:]
    return {kind: LOOPS[kind] for kind in kinds}


@pytest.fixture(params=["inproc", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport: each in turn."""
    return str(request.param)


@pytest.fixture(params=sorted(LOOPS))
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """A function that makes a further event loop, for tests with several: each kind in turn."""
    return LOOPS[str(request.param)]


# -- ranks ------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def _skip_without_hosts() -> Iterator[None]:
    """Skip a test that needs hosts which this machine cannot make; see `asyncdist.testing.hosts`."""
    try:
        return (yield)
    except HostsUnavailableError as error:
        pytest.skip(error.summary)


pytest_runtest_setup = pytest_runtest_call = _skip_without_hosts


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """Run a program in a thread of each rank: ``together(size, program)``; see `asyncdist.testing.cluster`."""
    from asyncdist.testing.cluster import run_ranks

    return run_ranks


@pytest.fixture
def each() -> Callable[[Sequence[Any], Callable[[Any], Awaitable[Any]]], Awaitable[list[Any]]]:
    """Start a call on every rank's group, in the order of the ranks, and await all: ``await each(groups, call)``."""

    async def each(groups: Sequence[Any], call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        return list(await asyncio.gather(*[call(group) for group in groups]))

    return each


@pytest.fixture(scope="session")
def shared_nursery() -> Iterator[Nursery]:
    """The process that forks the ranks; a module may override it to import more modules once."""
    with Nursery(ESSENTIAL) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def training_nursery() -> Iterator[Nursery]:
    """The same for ranks that train: the first optimizer of a process imports torch._dynamo, which takes seconds."""
    modules = ("asyncdist.sync", "asyncdist.ddp", "asyncdist.elastic.session", "asyncdist.torch_backend",
               "asyncdist_transports.shm", "asyncdist_transports.tcp", "torch.nn.parallel", "torch._dynamo")  # fmt: skip
    with Nursery(modules) as nursery:
        yield nursery


@pytest.fixture
def nursery(shared_nursery: Nursery) -> Iterator[Nursery]:
    """Starts ranks as real processes; those that still run at the end of the test are killed."""
    yield shared_nursery
    shared_nursery.clear()


@pytest.fixture(scope="session")
def bare_nursery() -> Iterator[Nursery]:
    """The same for programs that import asyncdist themselves."""
    with Nursery(("torch.distributed.checkpoint",)) as nursery:
        yield nursery


@pytest.fixture
def without_asyncdist(bare_nursery: Nursery) -> Iterator[Nursery]:
    """Starts processes that have imported torch, and of asyncdist what torch imports."""
    yield bare_nursery
    bare_nursery.clear()


@pytest.fixture
def run_python(without_asyncdist: Nursery) -> Callable[..., tuple[int, str]]:
    """Run ``python`` in a process that has imported torch; return its status, and its output and errors together.

    ``run_python("-c", code, "its argument")``, ``run_python("program.py", folder=..., environment=...)``
    """

    def run_python(*arguments: Any, folder: Any = ".", environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        program = Path(__file__).parent / "support/forked_python.py"
        process = without_asyncdist.start(program, "run", str(folder), *map(str, arguments), environment=environment)
        return process.wait(10 * LONG), process.output()

    return run_python


# -- waiting for conditions without an event --------------------------------------------------------


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Return a function that waits until a condition holds: ``await eventually(lambda: ...)``."""

    async def eventually(true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return eventually


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], None]:
    """Return a blocking function that waits until a condition holds: ``until(lambda: ...)``."""

    def until(true: Callable[[], Any]) -> None:
        give_up = time.monotonic() + LONG
        while not true():
            assert time.monotonic() < give_up, "the condition does not hold"
            time.sleep(0.001)

    return until


# -- nothing is left behind -------------------------------------------------------------------------

_KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:")
# Threads that belong to the process and not to a world.
_OF_THE_PROCESS = ("asyncdist-runtime", "asyncdist-observer", "asyncdist-futures")


def _descriptors() -> Counter[str]:
    """Count the open descriptors by kind; empty on systems without /proc."""
    kinds: Counter[str] = Counter()
    for target in open_files():
        kind = next((kind for kind in _KINDS if target.startswith(kind)), None)
        if kind is not None:
            kinds[target if kind == "anon_inode:" else kind] += 1
    return kinds


def _lasting(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to the process: asyncdist's by name, and those that torch starts."""
    return thread.name.startswith(_OF_THE_PROCESS) or isinstance(thread, threading._DummyThread)


def _left(threads: set[threading.Thread], descriptors: Counter[str], processes: set[int]) -> list[str]:
    """Describe the threads, descriptors and processes that are new."""
    new = [t for t in threading.enumerate() if t not in threads and not _lasting(t)]
    opened = _descriptors() - descriptors
    started = children() - processes
    return [
        *(f"thread {thread.name!r}" for thread in new),
        *(f"{count} x {kind}" for kind, count in opened.items()),
        *(f"process {number}" for number in started),
    ]


@pytest.fixture(scope="session", autouse=True)
def _settled() -> None:
    """Start what lives as long as the process, and freeze it for the garbage collector."""
    import torch  # not where pytest only distributes the tests to other processes

    from asyncdist.kernel.memory.shared_arena import arena

    # Ranks are tasks or threads of this process. Torch's own threads would compete with them for the cores.
    torch.set_num_threads(1)
    background_loop()
    observing_loop()
    arena()
    _freeze()


_frozen = 0
"""How many modules were imported when the collector was last spared what lives as long as the process."""


def _freeze() -> None:
    """Let the collector pass over what there is: with torch's compiler among it a collection takes a second."""
    global _frozen
    _frozen = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Fail a test that leaves something behind."""
    from asyncdist.kernel.memory.shared_arena import arena

    background_loop()
    observing_loop()
    arena()
    if len(sys.modules) > _frozen + 20:
        _freeze()
    before = set(threading.enumerate()), _descriptors(), children()
    yield
    background_loop()  # a test may have closed it
    since = None
    for look in itertools.count(1):
        if not (left := _left(*before)):
            break
        since = since or Stopwatch()
        if since.seconds() > PATIENCE:
            pytest.fail(f"left behind: {', '.join(left)}")
        # Most threads end by themselves in a moment; the collector takes longer than all of these looks.
        if look % 16 == 8:
            gc.collect()
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest, nothing_left_over: None) -> None:
    """Check coroutine tests for tasks, before the loop is closed and the other checks run."""
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_no_task_left_on_the_loop")


@pytest_asyncio.fixture
async def _no_task_left_on_the_loop() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"
