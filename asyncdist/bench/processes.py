"""Start the rank processes of a run, hear what they find, and see that none is left.

Called by `asyncdist.cli.bench`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from asyncdist.bench import launch
from asyncdist.bench.machine import machine
from asyncdist.bench.plan import BenchPlan
from asyncdist.bench.rank import MEETING
from asyncdist.bench.result import Report, ResultRow
from asyncdist.errors import BenchmarkError, UnsupportedError

_LOOK_EVERY = 0.2  # seconds between looks whether who has not reported yet still lives
_LAST_WORDS = 1.0  # seconds that ranks get to say why they failed, once one has
_GOODBYE = 30.0  # seconds that ranks get to end by themselves
_TERMINATION = 5.0  # seconds that they get to end when told to

Program = subprocess.Popen[bytes]


def run(plan: BenchPlan, progress: Callable[[float, ResultRow | None], None] = lambda done, row: None) -> Report:
    """Measure what the plan says in processes of our own and return the report.

    ``progress`` hears what share is done, and each row as it comes. Raises BenchmarkError when a rank fails or a result
    is wrong, UnsupportedError when MPI is to compete and is not there.
    """
    report = Report(plan, machine())
    if "mpi" in plan.against:
        if (missing := launch.mpi_missing()) is not None:
            raise UnsupportedError(missing)
        report.machine["mpi"] = launch.mpi_version()
    with tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as name, _started(plan, Path(name)) as pipes:
        for kind, value in _messages(pipes, Path(name) / _WORDS):
            if kind == "done":
                progress(value, None)
            elif kind == "row":
                report.rows.append(value)
                progress(len(report.rows) / plan.parts, value)
            elif kind == "device_row":
                report.device_rows.append(value)
                progress(len(report.device_rows) / plan.parts, None)
            elif kind == "training":
                report.training.append(value)
                progress((len(report.rows) + len(report.training)) / plan.parts, None)
    return report


# -- from start to end ------------------------------------------------------------------------------

_WORDS = "stderr"  # the file, in the run's folder, of what the processes say on standard error


@contextlib.contextmanager
def _started(plan: BenchPlan, folder: Path) -> Iterator[list[Connection]]:
    """Start the ranks; yield their pipes, by rank, when all have the plan. None of them outlives the block."""
    programs: list[Program] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, programs)
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        _listen(server, folder / MEETING, plan.ranks)
        words = stack.enter_context((folder / _WORDS).open("wb"))
        for command in launch.commands(plan, folder):
            # In sessions of their own: an interrupt from the keyboard is for us, and we end them.
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": words}
            programs.append(subprocess.Popen(command, start_new_session=True, **quiet))  # type: ignore[call-overload]
        pipes = _met(plan, server, programs, folder / _WORDS, stack)
        yield pipes
        for program in programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_GOODBYE)


def _listen(server: socket.socket, path: Path, ranks: int) -> None:
    """Let ranks dial a Unix socket: it lies in a folder that only we may enter."""
    try:
        server.bind(str(path))
    except OSError as cause:
        raise BenchmarkError(
            f"{path} cannot be a socket ({cause}): set TMPDIR to a folder with a short name"
        ) from cause
    server.listen(ranks)


def _met(
    plan: BenchPlan, server: socket.socket, programs: Sequence[Program], words: Path, stack: contextlib.ExitStack
) -> list[Connection]:
    """Wait until every rank has reported, tell them the plan and each other's ports, and return their pipes."""
    pipes: dict[int, Connection] = {}
    ports: dict[int, int] = {}
    server.settimeout(_LOOK_EVERY)
    while len(pipes) < plan.ranks:
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            if any(program.poll() is not None for program in programs):
                raise BenchmarkError(f"the ranks of the benchmark did not start{_said(words)}") from None
            continue
        accepted.setblocking(True)
        pipe = stack.enter_context(Connection(accepted.detach()))
        with contextlib.suppress(EOFError):  # it has ended already, which the next look shows
            rank, port = pipe.recv()
            pipes[rank], ports[rank] = pipe, port
    token = secrets.token_bytes(16)
    in_order = range(plan.ranks)
    for pipe in pipes.values():
        pipe.send((plan, [ports[rank] for rank in in_order], token))
    return [pipes[rank] for rank in in_order]


def _end(programs: Sequence[Program]) -> None:
    """End whatever of them still runs, at once: their results are known or nobody wants them."""
    running = [program for program in programs if program.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for program in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, number)
        for program in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_TERMINATION)


# -- what they say ----------------------------------------------------------------------------------


def _messages(pipes: Sequence[Connection], words: Path) -> Iterator[tuple[str, Any]]:
    """Yield what the ranks say until all have ended; BenchmarkError once one has failed."""
    speaking = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures: list[str] = []
    silent: list[int] = []
    while speaking:
        heard = wait(list(speaking), _LAST_WORDS if failures or silent else None)
        if not heard:
            break
        for pipe in heard:
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                silent.append(speaking.pop(pipe))
                continue
            if kind == "failed":
                failures.append(value)
            if kind in ("end", "failed"):
                speaking.pop(pipe)
            else:
                yield kind, value
    if failures or silent:
        raise BenchmarkError(f"the benchmark failed; {_cause(failures, silent, words)}")


def _cause(failures: Sequence[str], silent: Sequence[int], words: Path) -> str:
    """Return the failure to look at first: not one of a rank that only saw another one go."""
    causes = [text for text in failures if "PeerLostError" not in text and "has ended" not in text]
    if causes or not silent:
        return (causes or failures)[0]
    return f"rank {silent[0]} ended without a word{_said(words)}"


def _said(words: Path) -> str:
    """Return the end of what the processes said on standard error, to be put after a sentence without its stop."""
    said = words.read_text(errors="replace").strip().splitlines()[-12:]
    return ":\n" + "\n".join(said) if said else ", and said nothing on standard error"
