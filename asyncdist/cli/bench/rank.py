"""The main function of a rank process, which measures a plan. `launch` starts it. It imports torch late."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

from asyncdist.cli.bench.pacing import StartPacer, connect_ranks
from asyncdist.cli.bench.plan import BenchPlan
from asyncdist.errors import AsyncdistError

CONTROL_SOCKET = "control.sock"
"""The name, in the run's folder, of the Unix socket at which rank processes connect."""
BY_MPI = "mpi"
"""The argument in place of the rank if MPI assigns the ranks."""


def run_rank(folder: str, number: str, address: str) -> None:
    """Connect to the process that started this one, measure its plan, and report.

    The rank sends (rank, address) and receives (plan, addresses, token). Rank 0 then sends ("row", ResultRow) for each
    case. The last message of every rank is ("end", None) or ("failed", text).

    Args:
        folder: The run's folder.
        number: The rank, or `BY_MPI`.
        address: Where the rank listens for the others.
    """
    rank = _rank(number)
    pipe = Client(str(Path(folder) / CONTROL_SOCKET), "AF_UNIX")
    try:
        with socket.create_server((address, 0), backlog=64) as server:
            pipe.send((rank, server.getsockname()))
            plan, addresses, token = pipe.recv()
            threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
            table = connect_ranks(rank, server, addresses, token)
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

    from asyncdist.cli.bench.contenders.contenders import open_contenders
    from asyncdist.cli.bench.contenders.plain_sockets import Sockets
    from asyncdist.cli.bench.measure import measure_case

    torch.set_num_threads(1)
    pace = StartPacer(rank, table, sleeps=plan.shares_cores)
    with open_contenders(plan, rank, folder, Sockets(rank, table, plan.ranks_per_host), pace) as contenders:
        for collective, nbytes in plan.cases:
            row = measure_case(contenders, collective, nbytes, rank, plan, pace)
            if rank == 0:
                pipe.send(("row", row))
        pace()  # no rank exits while another rank measures
