"""The main function of a rank process, which measures a plan. `launch` starts it. It imports torch late."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

from asyncdist.cli.bench import pacing_sockets
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.errors import AsyncdistError

CONTROL_SOCKET = "control.sock"
"""The name, in the run's folder, of the Unix socket at which rank processes connect."""
BY_MPI = "mpi"
"""The argument in place of the rank if MPI assigns the ranks."""

_REPORT_INTERVAL = 0.4  # seconds; each report makes the parent draw, which takes a core from the ranks


def run_rank(folder: str, number: str, address: str) -> None:
    """Connect to the process that started this one, measure its plan, and report.

    The rank sends (rank, address) and receives (plan, addresses, token). Rank 0 then sends ("done", share) and ("row",
    ResultRow). The last message of every rank is ("end", None) or ("failed", text).

    Args:
        folder: The run's folder.
        number: The rank, or `BY_MPI`.
        address: Where the rank listens for the others.
    """
    rank = _rank(number)
    pipe = Client(str(Path(folder) / CONTROL_SOCKET), "AF_UNIX")
    try:
        with pacing_sockets.listen_at(address) as server:
            pipe.send((rank, server.getsockname()))
            plan, addresses, token = pipe.recv()
            threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
            table = pacing_sockets.connect_ranks(rank, server, addresses, token)
        _measure(plan, rank, table, Path(folder), pipe)
    except BaseException as error:
        details = str(error) if isinstance(error, AsyncdistError) else traceback.format_exc()
        pipe.send(("failed", f"rank {rank}: {details}"))
        raise SystemExit(1) from None
    pipe.send(("end", None))


def _rank(number: str) -> int:
    if number != BY_MPI:
        return int(number)
    from asyncdist.cli.bench.contenders.mpi import communicator

    rank: int = communicator().Get_rank()
    return rank


def _exit_with_parent(pipe: Connection) -> None:
    """Exit when the parent process has ended. It sends nothing more, so only the end of the pipe arrives."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _measure(plan: BenchPlan, rank: int, table: Sequence[socket.socket | None], folder: Path, pipe: Connection) -> None:
    import torch

    from asyncdist.cli.bench.contenders import contenders, devices, plain_sockets
    from asyncdist.cli.bench.measure import measure_case
    from asyncdist.cli.bench.pace import StartPacer

    torch.set_num_threads(1)
    pace = StartPacer(rank, table, sleeps=plan.shares_cores)
    reporter = _Reporter(pipe if rank == 0 else None, plan.parts)
    if plan.device == "cpu":
        sockets = plain_sockets.Sockets(rank, table, plan.ranks_per_host)
        opening = contenders.open_contenders(plan, rank, folder, sockets, pace)
    else:
        opening = devices.open_device_contenders(plan, rank, folder, pace)
    with opening as field:
        for collective, nbytes in plan.cases:
            reporter.row(measure_case(field, collective, nbytes, rank, plan, pace, reporter.progress))
        for step in plan.steps:
            from asyncdist.cli.bench.workloads.training import train

            reporter.row(train(step, plan, field.torch_groups, rank, pace, reporter.progress))
        pace()  # no rank exits while another rank measures


class _Reporter:
    """Sends rows, and at intervals the completed share of the run. Without a pipe it sends nothing."""

    def __init__(self, pipe: Connection | None, parts: int) -> None:
        self._pipe, self._parts = pipe, parts
        self._part, self._last = 0, 0.0

    def progress(self, share: float) -> None:
        """Report the completed share (0 to 1) of the current part."""
        if self._pipe is not None and time.monotonic() - self._last >= _REPORT_INTERVAL:
            self._last = time.monotonic()
            self._pipe.send(("done", (self._part + share) / self._parts))

    def row(self, row: object) -> None:
        """Report the result of a part."""
        if self._pipe is not None:
            self._pipe.send(("row", row))
        self._part += 1
