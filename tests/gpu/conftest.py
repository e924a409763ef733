"""Fixtures of the GPU tests: they are skipped without a GPU, and run ranks as processes on one GPU."""

from pathlib import Path

import pytest

from asyncdist.kernel.transport.device_streams import cuda_missing
from benchmarks.processes import Nursery

PATIENCE = 120.0
"""Seconds for one program: the first one also starts CUDA."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = cuda_missing()
    if reason is not None:
        pytest.skip(f"no test on a GPU: {reason}")


@pytest.fixture(scope="session")
def nursery():
    # This process must not use CUDA, because the processes that it forks do.
    with Nursery() as nursery:
        yield nursery


class Pair:
    """Runs a function of `programs.py` in a process per rank, all on one GPU."""

    def __init__(self, nursery, folder):
        self._nursery, self._folder = nursery, folder
        self._worlds = 0

    def start(self, function, *args, ranks=2, environments=({}, {})):
        """Start ``function(test, where, *args)`` on each rank; ``where`` is for ``init_process_group``.

        ``environments`` has further variables of each rank.
        """
        self._worlds += 1
        meeting = (self._folder / f"world-{self._worlds}").as_uri()
        return [
            self._nursery.start(
                Path(__file__).with_name("programs.py"),
                function,
                {"rank": rank, "world_size": ranks, "init_method": meeting, "timeout": 60.0},
                *args,
                environment=environments[rank],
            )
            for rank in range(ranks)
        ]

    def run(self, function, *args, **how):
        """Return the ranks' results, by rank."""
        started = self.start(function, *args, **how)
        said = [rank.hear(PATIENCE) for rank in started]
        assert [rank.wait(PATIENCE) for rank in started] == [0] * len(started), [rank.output() for rank in started]
        return said


@pytest.fixture
def pair(nursery, tmp_path):
    yield Pair(nursery, tmp_path)
    nursery.clear()
