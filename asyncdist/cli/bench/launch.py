"""Start the rank processes of a run, alone or by Open MPI's ``mpirun``, and collect their results. No torch here.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from asyncdist.cli.bench.contenders.mpi import mpi_missing, mpi_version
from asyncdist.cli.bench.hosts.placement import LOOPBACK, Placement
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.cli.bench.programs import Programs, busy_process, python
from asyncdist.cli.bench.rank import BY_MPI, CONTROL_SOCKET
from asyncdist.cli.bench.result import Report, ResultRow
from asyncdist.cli.machine import machine
from asyncdist.errors import BenchmarkError, UnsupportedError

_POLL_INTERVAL = 0.2  # seconds between checks that all processes run, until each rank has connected
_FAILURE_TIMEOUT = 1.0  # seconds in which the other ranks can report a failure after the first one
_EXIT_TIMEOUT = 30.0  # seconds in which ranks must exit after their last message


def run(plan: BenchPlan, progress: Callable[[float, ResultRow | None], None] = lambda done, row: None) -> Report:
    """Execute a plan in new processes and return the report.

    Args:
        plan: What to measure.
        progress: Called with the completed share of the run (0 to 1), and with each new row or None.

    Raises:
        BenchmarkError: A rank fails, or a result is wrong.
        UnsupportedError: The plan needs Open MPI, which is not installed.
    """
    report = Report(plan, machine())
    if "mpi" in plan.against:
        if (missing := mpi_missing()) is not None:
            raise UnsupportedError(missing)
        report.machine["mpi"] = mpi_version()
    with (
        tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder,
        Placement(plan) as placement,
        Programs() as programs,
    ):
        for kind, value in _messages(_start(plan, Path(folder), programs, placement), programs):
            if kind == "row":
                report.rows.append(value)
                progress(len(report.rows) / plan.parts, value)
            else:
                progress(value, None)
        for program in programs.running[: len(programs.running) - plan.busy]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_EXIT_TIMEOUT)
    return report


def commands(plan: BenchPlan, folder: Path, placement: Placement) -> list[list[str]]:
    """Return the commands that start the ranks: one for each rank, or a single ``mpirun`` if they need MPI."""
    program = python("asyncdist.cli.bench", str(folder))
    if plan.through:  # torch.distributed has no argument for a transport
        program = ["env", f"ASYNCDIST_TRANSPORT={plan.transports[0]}", *program]
    if "mpi" not in plan.against:
        return [placement.command(rank, [*program, str(rank), placement.address(rank)]) for rank in range(plan.ranks)]
    # Ranks may outnumber the cores, and contenders with threads must not be bound to one core.
    starter = ["mpirun", "-n", str(plan.ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        starter.append("--allow-run-as-root")
    return [[*starter, *program, BY_MPI, LOOPBACK]]


def _start(plan: BenchPlan, folder: Path, programs: Programs, placement: Placement) -> list[Connection]:
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
        for rank, command in enumerate(commands(plan, folder, placement)):
            programs.start(command, env=placement.environment(rank))
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
        programs.start(busy_process())
    token = secrets.token_bytes(16)
    for pipe in pipes.values():
        pipe.send((plan, [addresses[rank] for rank in range(plan.ranks)], token))
    return [pipes[rank] for rank in range(plan.ranks)]


def _messages(pipes: Sequence[Connection], programs: Programs) -> Iterator[tuple[str, Any]]:
    """Yield the messages of the ranks until all have ended; raise BenchmarkError if one fails."""
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
                if kind == "failed":
                    failures.append(value)
                if kind in ("end", "failed"):
                    open_pipes.pop(pipe)
                else:
                    yield kind, value
    if failures or silent:
        raise BenchmarkError(f"the benchmark failed; {_cause(failures, silent, programs)}")


def _cause(failures: Sequence[str], silent: Sequence[int], programs: Programs) -> str:
    """Return the failure that caused the others, rather than that of a rank that only lost another rank."""
    causes = [text for text in failures if "PeerLostError" not in text and "has ended" not in text]
    if causes or not silent:
        return (causes or failures)[0]
    return f"rank {silent[0]} ended without a message{programs.last_words()}"
