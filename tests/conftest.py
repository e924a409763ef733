"""What all tests share: the matrix of loops, the matrix of transports, what torch can do, and a check that nothing is left.

A coroutine test runs on uvloop; marked ``each_loop`` it also runs on asyncio's own loop in debug mode. A test that takes
``transport`` runs over each transport. After each test no new thread, task, process, socket, pipe, event descriptor or
memory segment may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from asyncdist.base.background_loop import background_loop
from asyncdist.memory.shared_arena import arena
from asyncdist.testing.cluster import run_ranks
from asyncdist.testing.stopwatch import Stopwatch

PATIENCE = 5.0
"""Seconds for what ends on another thread or loop to be gone, without those for which we stood in line."""
LONG = 60.0
"""Seconds: a limit that no test is to reach, on however busy a machine."""

# A shell lets what it starts in the background ignore Ctrl-C, and that would be passed on to all processes of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about what else runs on the machine than about the code.
hypothesis.settings.register_profile(
    "asyncdist", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("asyncdist")

# -- loops and transports ---------------------------------------------------------------------------


class DebugLoop(asyncio.SelectorEventLoop):
    """asyncio's own loop in debug mode, whatever who runs it says: callbacks, and the threads they come from, are checked.

    It notes down for no future where it was made, which takes as long as all the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slow_callback_duration = LONG  # a busy machine is no news

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)

    def get_debug(self) -> bool:
        return False  # to futures and handles; the loop itself goes by what was set


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio-debug": DebugLoop}
try:
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop
except ImportError:  # Windows
    pass


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    kinds = LOOPS if item.get_closest_marker("each_loop") else list(LOOPS)[-1:]
    return {kind: LOOPS[kind] for kind in kinds}


@pytest.fixture(params=["inproc", "shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport: each in turn."""
    return str(request.param)


@pytest.fixture(params=sorted(LOOPS))
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes a further event loop, for tests with more than one: each kind in turn."""
    return LOOPS[str(request.param)]


# -- ranks ------------------------------------------------------------------------------------------


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """Run a program in a thread of each rank: ``together(size, program)``; see `asyncdist.testing.cluster`."""
    return run_ranks


@pytest.fixture
def each() -> Callable[[Sequence[Any], Callable[[Any], Awaitable[Any]]], Awaitable[list[Any]]]:
    """Start a call on every rank's group, in the order of the ranks, and await all: ``await each(groups, call)``."""

    async def each(groups: Sequence[Any], call: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        return list(await asyncio.gather(*[call(group) for group in groups]))

    return each


# -- waits for what has no event of its own ---------------------------------------------------------


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """Return a wait until something is so: ``await eventually(lambda: ...)``."""

    async def eventually(true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return eventually


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], None]:
    """Return the same for a test that is no coroutine: ``until(lambda: ...)``."""

    def until(true: Callable[[], Any]) -> None:
        give_up = time.monotonic() + LONG
        while not true():
            assert time.monotonic() < give_up, "still not so"
            time.sleep(0.001)

    return until


# -- nothing is left behind -------------------------------------------------------------------------

_DESCRIPTORS = Path("/proc/self/fd")
_KINDS = ("socket:", "pipe:", "anon_inode:", "/memfd:")
# Threads that belong to the process rather than to anybody's world.
_OF_THE_PROCESS = ("asyncdist-runtime", "asyncdist-futures")


def _descriptors() -> Counter[str]:
    """Count the open descriptors by kind; none where there is no /proc."""
    kinds: Counter[str] = Counter()
    if _DESCRIPTORS.is_dir():
        for name in os.listdir(_DESCRIPTORS):
            try:
                target = os.readlink(_DESCRIPTORS / name)
            except FileNotFoundError:  # the one that listed the folder
                continue
            kind = next((kind for kind in _KINDS if target.startswith(kind)), None)
            if kind is not None:
                kinds[target if kind == "anon_inode:" else kind] += 1
    return kinds


def _processes() -> set[str]:
    """Return the numbers of our child processes."""
    numbers: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            numbers.update(path.read_text().split())
    return numbers


def _lasting(thread: threading.Thread) -> bool:
    """Say whether a thread belongs to the process: ours by name, and those that torch starts by itself."""
    return thread.name.startswith(_OF_THE_PROCESS) or isinstance(thread, threading._DummyThread)


def _left(threads: set[threading.Thread], descriptors: Counter[str], processes: set[str]) -> list[str]:
    """Say in words what is here that was not."""
    new = [t for t in threading.enumerate() if t not in threads and not _lasting(t)]
    opened = _descriptors() - descriptors
    started = _processes() - processes
    return [
        *(f"thread {thread.name!r}" for thread in new),
        *(f"{count} x {kind}" for kind, count in opened.items()),
        *(f"process {number}" for number in started),
    ]


@pytest.fixture(scope="session", autouse=True)
def _settled() -> None:
    """Start what lives as long as the process, and set aside what the garbage collector need not look at again."""
    background_loop()
    arena()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Fail the test that leaves something behind."""
    background_loop()
    arena()
    before = set(threading.enumerate()), _descriptors(), _processes()
    yield
    background_loop()  # a test may have closed it
    since = None
    while left := _left(*before):
        gc.collect()
        since = since or Stopwatch()
        if since.seconds() > PATIENCE:
            pytest.fail(f"left behind: {', '.join(left)}")
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest, nothing_left_over: None) -> None:
    """Have tests that are coroutines looked after, inside the check of everything else: its loop is closed by then."""
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_no_task_left_on_the_loop")


@pytest_asyncio.fixture
async def _no_task_left_on_the_loop() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"
