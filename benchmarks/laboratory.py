"""The processes of a benchmark: forked by a nursery, on this machine or on hosts of a test bed, and stores of jobs.

A process runs one function of the benchmark's program file, and talks with the benchmark over a pipe. Times are those of
the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import runpy
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from asyncdist.testing.hosts import LINK, Hosts, enter
from benchmarks.processes import Nursery, RankProcess

LIMIT = 300.0
"""Seconds in which a process answers an order."""
HOST = "127.0.0.1"

Progress = Callable[[str], None]


class Laboratory:
    """Starts the processes of a run; a context manager that ends them.

    Args:
        program: The file with the functions of the processes.
        preload: What the process imports that forks the others.
        progress: Called with what is measured next.
    """

    def __init__(self, program: Path, preload: Sequence[str], progress: Progress) -> None:
        self.progress = progress
        self.token = secrets.token_hex(16)
        self.hosts: Hosts | None = None
        self._program, self._worlds = program, 0
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncdist-bench-")))
        self._nursery = self._stack.enter_context(Nursery(preload))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def world(self) -> str:
        """Return a new place where ranks meet."""
        self._worlds += 1
        return f"file://{self.folder}/world{self._worlds}"

    def start(self, function: str, *args: Any, host: int | None = None, **environment: str) -> RankProcess:
        """Start a process that calls ``function(test, *args)`` of the program, on this machine or on a host."""
        return self._start(self._program, function, args, host, environment)

    def end(self, processes: Sequence[RankProcess]) -> None:
        """Let processes end, wait for them, and end all others."""
        for each in processes:
            each.say("end")
        for each in processes:
            each.wait()
        self.clear()

    def clear(self) -> None:
        """End all processes."""
        self._nursery.clear()

    @contextlib.contextmanager
    def on_hosts(self, count: int) -> Iterator[Hosts]:
        """Make hosts, on which processes are started during the block.

        Raises:
            HostsUnavailableError: This machine cannot make them.
        """
        with Hosts(count) as self.hosts:
            try:
                yield self.hosts
            finally:
                self.clear()
                self.hosts = None

    @contextlib.contextmanager
    def store(self, host: int | None = None) -> Iterator[str]:
        """Serve the store of a job; yield its URL. All processes end with the block."""
        address = HOST if host is None or self.hosts is None else self.hosts.addresses[host]
        server = self._start(Path(__file__), "serve_store", (address,), host, {})
        try:
            yield f"asyncdist://{address}:{server.hear()}/job"
        finally:
            self.clear()

    def _start(
        self, program: Path, function: str, args: Sequence[Any], host: int | None, environment: dict[str, str]
    ) -> RankProcess:
        environment = {"ASYNCDIST_TOKEN": self.token, "GLOO_SOCKET_IFNAME": "lo", **environment}
        if host is None:
            return self._nursery.start(program, function, *args, environment=environment)
        assert self.hosts is not None
        environment |= {"ASYNCDIST_HOST": f"host{host}", "GLOO_SOCKET_IFNAME": LINK}
        arguments = self.hosts.namespaces[host], str(program), function, *args
        return self._nursery.start(Path(__file__), "run_on_host", *arguments, environment=environment)


def ask(process: RankProcess, *order: Any, limit: float = LIMIT) -> Any:
    """Send an order, and return the answer."""
    # If the process has ended, the error of `hear` has its last words.
    with contextlib.suppress(BrokenPipeError):
        process.say(order)
    return process.hear(limit)


def hear_all(processes: Sequence[RankProcess], limit: float = LIMIT) -> list[Any]:
    """Return what each process sends next."""
    return [each.hear(limit) for each in processes]


# -- in the processes --------------------------------------------------------------------------------


def run_on_host(test: Connection, namespace: str, program: str, function: str, *args: Any) -> None:
    enter(namespace)
    runpy.run_path(program)[function](test, *args)


def serve_store(test: Connection, address: str) -> None:
    """Serve the store of a job, and send its port."""
    from asyncdist.base.background_loop import background_loop
    from asyncdist.config import Config
    from asyncdist.store import StoreServer

    server = background_loop().run(StoreServer.start(address, 0, token=Config.from_environment().token))
    test.send(server.port)
    test.recv()


def obey(test: Connection, orders: object) -> None:
    """Call the methods of an object that the benchmark names, and send what they return, until it sends None."""
    for name, *arguments in iter(test.recv, None):
        test.send(getattr(orders, name)(*arguments))
