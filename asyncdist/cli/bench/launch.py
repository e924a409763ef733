"""Start the rank processes of a run, alone or by Open MPI's ``mpirun``, and collect their results. No torch here.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self, cast

from asyncdist.cli.bench.contenders.mpi import mpi_missing, mpi_version
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.rank import BY_MPI, CONTROL_SOCKET
from asyncdist.cli.bench.result import Report, ResultRow
from asyncdist.cli.machine import measured_machine
from asyncdist.errors import BenchmarkError, UnsupportedError
from asyncdist.testing.hosts import LINK, Hosts

_POLL_INTERVAL = 0.2  # seconds between checks that all processes run, until each rank has connected
_FAILURE_TIMEOUT = 1.0  # seconds in which the other ranks can report a failure after the first one
_EXIT_TIMEOUT = 30.0  # seconds in which ranks must exit after their last message
_TERMINATION = 5.0  # seconds between SIGTERM and SIGKILL
_LAST_NBYTES = 1 << 16  # of standard error, read for the last words
_LOOPBACK = "127.0.0.1"
_COMPUTE = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
BUSY = [sys.executable, "-I", "-S", "-c", _COMPUTE]
"""The command of a process that computes until it is ended, or until this process ends."""

Note = Callable[[ResultRow], object]
"""Is called with each new row."""


class Programs:
    """Processes in sessions of their own, with one file for their standard error; a context manager that ends them."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `__exit__` closes it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = [program for program in self.running if program.poll() is None]
            for program in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, number)
            for program in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(_TERMINATION)
        self._stderr.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a command in a session of its own, so that Ctrl-C does not reach it."""
        program = subprocess.Popen(
            command, env=environment, start_new_session=True, stderr=self._stderr,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.running.append(program)

    def last_words(self) -> str:
        """Return the last lines on standard error as the end of a sentence."""
        # The processes share the offset of the file: reading at it would move the place where they write.
        number = self._stderr.fileno()
        start = max(0, os.fstat(number).st_size - _LAST_NBYTES)
        lines = os.pread(number, _LAST_NBYTES, start).decode(errors="replace").strip().splitlines()[-12:]
        return ":\n" + "\n".join(lines) if lines else ", and wrote nothing to standard error"


def sweep(plan: BenchPlan, note: Note = lambda row: None) -> Report:
    """Run a plan; between hosts, first its largest size between 2, 4, … hosts, whose reports are the ``fewer_hosts``."""
    fewer_hosts = [run(each, note) for each in between_fewer_hosts(plan)]
    report = run(plan, note)
    report.fewer_hosts = fewer_hosts
    return report


def between_fewer_hosts(plan: BenchPlan) -> list[BenchPlan]:
    """Return the plans of the largest size between fewer hosts: for the share of the link against hosts."""
    sized = tuple(name for name in plan.collectives if name != "barrier")
    fewer = [1 << power for power in range(1, 16) if 1 << power < plan.hosts] if sized else []
    return [
        replace(plan, hosts=hosts, ranks=hosts * plan.ranks_per_host, sizes=(max(plan.sizes),), collectives=sized)
        for hosts in fewer
    ]


def run(plan: BenchPlan, note: Note = lambda row: None) -> Report:
    """Execute a plan in new processes and return the report.

    Raises:
        BenchmarkError: A rank fails, or a result is wrong.
        UnsupportedError: The plan needs Open MPI, which is not installed.
        HostsUnavailableError: This machine cannot make the hosts of the plan.
    """
    report = Report(plan, measured_machine())
    if "mpi" in plan.against:
        if (missing := mpi_missing()) is not None:
            raise UnsupportedError(missing)
        report.machine["mpi"] = mpi_version()
    with (
        tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder,
        Hosts(plan.hosts) if plan.hosts > 1 else contextlib.nullcontext() as hosts,
        Programs() as programs,
    ):
        if hosts is not None and plan.link:
            hosts.shape(plan.link)
        for row in _rows(_start(plan, Path(folder), programs, hosts), programs):
            report.rows.append(row)
            note(row)
        for program in programs.running[: len(programs.running) - plan.busy]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_EXIT_TIMEOUT)
    return report


def commands(plan: BenchPlan, folder: Path, hosts: Hosts | None) -> list[list[str]]:
    """Return the commands that start the ranks: one for each rank, or a single ``mpirun`` if they need MPI."""
    program = [sys.executable, "-P", "-m", "asyncdist.cli.bench", str(folder)]
    if plan.through:  # torch.distributed has no argument for a transport
        program = ["env", f"ASYNCDIST_TRANSPORT={plan.transports[0]}", *program]
    if "mpi" in plan.against:
        # Ranks may outnumber the cores, and contenders with threads must not be bound to one core.
        starter = ["mpirun", "-n", str(plan.ranks), "--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            starter.append("--allow-run-as-root")
        return [[*starter, *program, BY_MPI, _LOOPBACK]]
    if hosts is None:
        return [[*program, str(rank), _LOOPBACK] for rank in range(plan.ranks)]
    places = [rank // plan.ranks_per_host for rank in range(plan.ranks)]
    return [hosts.command(at, *program, str(rank), hosts.addresses[at]) for rank, at in enumerate(places)]


def _start(plan: BenchPlan, folder: Path, programs: Programs, hosts: Hosts | None) -> list[Connection]:
    """Start the ranks, send them the plan and the addresses of all ranks, and return their pipes by rank."""
    pipes: dict[int, Connection] = {}
    addresses: dict[int, tuple[str, int]] = {}
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(str(folder / CONTROL_SOCKET))  # only this user may enter the folder
        except OSError as cause:
            raise BenchmarkError(
                f"{folder / CONTROL_SOCKET} cannot be a socket ({cause}): set TMPDIR to a folder with a short name"
            ) from cause
        server.listen(plan.ranks)
        server.settimeout(_POLL_INTERVAL)
        for rank, command in enumerate(commands(plan, folder, hosts)):
            environment = None
            if hosts is not None:
                # gloo would look up the name of the machine, whose address is not on these hosts.
                environment = hosts.environment(rank // plan.ranks_per_host) | {"GLOO_SOCKET_IFNAME": LINK}
            programs.start(command, environment)
        while len(pipes) < plan.ranks:
            try:
                accepted, _ = server.accept()
            except TimeoutError:
                if any(program.poll() is not None for program in programs.running):
                    raise BenchmarkError(f"the ranks of the benchmark did not start{programs.last_words()}") from None
                continue
            accepted.setblocking(True)
            pipe = Connection(accepted.detach())
            # If the rank has exited, a later poll reports it.
            with contextlib.suppress(EOFError):
                rank, address = pipe.recv()
                pipes[rank], addresses[rank] = pipe, address
    for _ in range(plan.busy):
        programs.start(BUSY)
    token = secrets.token_bytes(16)
    for pipe in pipes.values():
        pipe.send((plan, [addresses[rank] for rank in range(plan.ranks)], token))
    return [pipes[rank] for rank in range(plan.ranks)]


def _rows(pipes: Sequence[Connection], programs: Programs) -> Iterator[Any]:
    """Yield the rows that rank 0 sends until all ranks have ended; raise BenchmarkError if one fails."""
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures: list[str] = []
    silent: list[int] = []
    with contextlib.ExitStack() as stack:
        for pipe in pipes:
            stack.enter_context(pipe)
        while open_pipes and (ready := wait(list(open_pipes), _FAILURE_TIMEOUT if failures or silent else None)):
            for pipe in cast(list[Connection], ready):
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    silent.append(open_pipes.pop(pipe))
                    continue
                if kind == "row":
                    yield value
                    continue
                open_pipes.pop(pipe)
                if kind == "failed":
                    failures.append(value)
    if failures or silent:
        raise BenchmarkError(f"the benchmark failed; {_cause(failures, silent, programs)}")


def _cause(failures: Sequence[str], silent: Sequence[int], programs: Programs) -> str:
    """Return the failure that caused the others, rather than that of a rank that only lost another rank."""
    causes = [text for text in failures if "PeerLostError" not in text and "has ended" not in text]
    if causes or not silent:
        return (causes or failures)[0]
    return f"rank {silent[0]} ended without a message{programs.last_words()}"
