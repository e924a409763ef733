"""What one rank process of a benchmark does, from its start to its end. Called by `__main__`."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path

from asyncdist.bench import pacing_sockets
from asyncdist.bench.launch import BY_MPI
from asyncdist.bench.plan import BenchPlan
from asyncdist.errors import AsyncdistError, UnsupportedError

MEETING = "meeting"
"""The name, in the run's folder, of the Unix socket at which rank processes report."""

_TELL_EVERY = 0.4  # seconds: who draws the progress takes a core from those who are measured


def run_rank(folder: str, number: str) -> None:
    """Report to who started us, measure what the plan says, and tell what comes out.

    ``number`` is our rank, or says that MPI knows it. We send (rank, port), get (plan, ports, token), and send
    ("done", share), ("row", Row), ("device_row", DeviceRow), ("training", Training) and at the end ("end", None). Rank 0
    tells; the others only report what went wrong: ("failed", text).
    """
    rank = _rank(number)
    pipe = Client(str(Path(folder) / MEETING), "AF_UNIX")
    try:
        with pacing_sockets.listen_on_loopback() as server:
            pipe.send((rank, server.getsockname()[1]))
            plan, ports, token = pipe.recv()
            threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
            table = pacing_sockets.connect_ranks(rank, server, ports, token)
        _run(plan, rank, table, Path(folder), pipe)
    except BaseException as error:
        details = str(error) if isinstance(error, AsyncdistError) else traceback.format_exc()
        pipe.send(("failed", f"rank {rank}: {details}"))
        raise SystemExit(1) from None
    pipe.send(("end", None))


def _rank(number: str) -> int:
    if number != BY_MPI:
        return int(number)
    from asyncdist.bench.contenders.mpi import communicator

    rank: int = communicator().Get_rank()
    return rank


def _end_with(pipe: Connection) -> None:
    """End this process when the one that started it has gone: it sends nothing more, so what comes is the end."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _run(plan: BenchPlan, rank: int, table: Sequence[socket.socket | None], folder: Path, pipe: Connection) -> None:
    import torch

    from asyncdist.bench.contenders import plain_sockets
    from asyncdist.bench.contenders.contenders import Contender, open_contenders, torch_groups
    from asyncdist.bench.measure import entered, measure
    from asyncdist.bench.pace import StartPacer
    from asyncdist.bench.result import ResultRow

    torch.set_num_threads(1)
    if plan.pin:
        _pin(rank)
    pace = StartPacer(rank, table)
    progress = _RankProgress(pipe, plan.parts) if rank == 0 else None
    tell: Callable[[float], None] = progress or (lambda share: None)

    def row(contenders: Sequence[Contender], collective: str, nbytes: int) -> ResultRow:
        entries = entered(contenders, collective, rank, plan.ranks, nbytes)
        timings = measure(entries, pace, plan, tell)
        return ResultRow(collective, entries[0][1].nbytes if nbytes else 0, plan.ranks, timings)

    if plan.device != "cpu":
        from asyncdist.bench.workloads import device

        for each in device.measure_device(plan, rank, folder, pace, tell):
            if progress is not None:
                pipe.send(("device_row", each))
                progress.next()
        return
    with open_contenders(plan, rank, folder, plain_sockets.Sockets(rank, table), pace) as contenders:
        for collective, nbytes in plan.cases:
            found = row(contenders, collective, nbytes)
            if progress is not None:
                pipe.send(("row", found))
                progress.next()
        for step in plan.steps:
            from asyncdist.bench.workloads.training import train

            trained = train(step, plan, torch_groups(contenders), rank, pace, tell)
            if progress is not None:
                pipe.send(("training", trained))
                progress.next()
        pace()  # nobody leaves while another one still measures


def _pin(rank: int) -> None:
    """Keep this process on a core of its own, as launchers of MPI do; with fewer cores than ranks they share."""
    if not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError("this system does not let a process choose its core: leave --pin out")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class _RankProgress:
    """Tells how much of the run is done, not too often."""

    def __init__(self, pipe: Connection, parts: int) -> None:
        self._pipe, self._parts = pipe, parts
        self._part, self._told = 0, 0.0

    def __call__(self, share: float) -> None:
        if time.monotonic() - self._told >= _TELL_EVERY:
            self._told = time.monotonic()
            self._pipe.send(("done", (self._part + share) / self._parts))

    def next(self) -> None:
        self._part += 1
