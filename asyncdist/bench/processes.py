"""Start the rank processes of a run, hear what they find, and see that none is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from asyncdist.bench import rank as rank_process
from asyncdist.bench.machine import machine
from asyncdist.bench.plan import Plan
from asyncdist.bench.result import Report, Row
from asyncdist.errors import BenchmarkError

_LAST_WORDS = 1.0  # seconds that ranks get to say why they failed, once one has

Sockets = list[list[socket.socket | None]]


def run(plan: Plan, progress: Callable[[float, Row | None], None] = lambda done, row: None) -> Report:
    """Measure what the plan says in processes of our own and return the report.

    ``progress`` hears what share is done, and each row as it comes. Raises BenchmarkError when a rank fails or a result
    is wrong.
    """
    report = Report(plan, machine())
    with tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder, _started(plan, folder) as (ranks, pipes):
        for kind, value in _messages(ranks, pipes):
            if kind == "done":
                progress(value, None)
            elif kind == "row":
                report.rows.append(value)
                progress(len(report.rows) / plan.parts, value)
            elif kind == "training":
                report.parameters, report.training = value
    return report


@contextlib.contextmanager
def _started(plan: Plan, folder: str) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    spawn = multiprocessing.get_context("spawn")
    sockets = connected(plan.ranks)
    pipes: list[Connection] = []
    ranks: list[BaseProcess] = []
    try:
        for rank in range(plan.ranks):
            ours, theirs = spawn.Pipe(duplex=False)
            pipes.append(ours)
            ranks.append(
                spawn.Process(target=rank_process.main, args=(plan, rank, sockets[rank], folder, theirs), daemon=True)
            )
            ranks[rank].start()
            theirs.close()
        _close(sockets)
        yield ranks, pipes
        for process in ranks:
            process.join()
    finally:
        _close(sockets)
        for process in ranks:
            process.terminate()
            process.join(5)
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def connected(ranks: int) -> Sockets:
    """Return a loopback TCP socket between every two ranks, as a table by rank and peer; None on its diagonal."""
    table: Sockets = [[None] * ranks for _ in range(ranks)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for rank in range(ranks):
            for peer in range(rank):
                dialled = socket.create_connection(server.getsockname())
                accepted, _ = server.accept()
                for sock in (dialled, accepted):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock.setblocking(False)
                table[rank][peer], table[peer][rank] = dialled, accepted
    return table


def _close(sockets: Sockets) -> None:
    for sock in (sock for row in sockets for sock in row if sock is not None):
        sock.close()


def _messages(ranks: list[BaseProcess], pipes: list[Connection]) -> Iterator[tuple[str, Any]]:
    """Yield what the ranks say until all have ended; BenchmarkError once one has failed."""
    speaking = dict(zip(pipes, range(len(ranks)), strict=True))
    failures: list[str] = []
    while speaking:
        heard = wait(list(speaking), _LAST_WORDS if failures else None)
        if failures and not heard:
            break
        for pipe in heard:
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except EOFError:
                rank = speaking.pop(pipe)
                ranks[rank].join()
                failures.append(f"rank {rank} ended with exit code {ranks[rank].exitcode}")
                continue
            if kind == "failed":
                failures.append(value)
            if kind in ("end", "failed"):
                speaking.pop(pipe)
            else:
                yield kind, value
    if failures:
        raise BenchmarkError(f"the benchmark failed; {_cause(failures)}")


def _cause(failures: list[str]) -> str:
    """Return the failure to look at first: not one of a rank that only saw another one go."""
    causes = [text for text in failures if "PeerLostError" not in text and "has ended" not in text]
    return (causes or failures)[0]
