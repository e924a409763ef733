"""What one rank process of a benchmark does, from its start to its end."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from asyncdist.bench.plan import Plan
from asyncdist.errors import AsyncdistError, UnsupportedError

_TELL_EVERY = 0.4  # seconds: who draws the progress takes a core from those who are measured


def main(plan: Plan, rank: int, sockets: Sequence[socket.socket | None], folder: str, pipe: Connection) -> None:
    """Measure what the plan says and send ("done", share), ("row", Row), ("training", …) and at the end ("end", None).

    Rank 0 tells; the others only report what went wrong: ("failed", text).
    """
    _silence_stdout()
    try:
        _run(plan, rank, sockets, Path(folder), pipe)
    except BaseException as error:
        details = str(error) if isinstance(error, AsyncdistError) else traceback.format_exc()
        pipe.send(("failed", f"rank {rank}: {details}"))
        raise SystemExit(1) from None
    pipe.send(("end", None))


def _silence_stdout() -> None:
    """Keep what libraries print in their C++ parts out of our table."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _run(plan: Plan, rank: int, sockets: Sequence[socket.socket | None], folder: Path, pipe: Connection) -> None:
    import torch

    from asyncdist.bench import raw
    from asyncdist.bench.contenders import open_contenders
    from asyncdist.bench.measure import measure
    from asyncdist.bench.pace import Pace
    from asyncdist.bench.result import Row
    from asyncdist.bench.traffic import traffic

    torch.set_num_threads(1)
    if plan.pin:
        _pin(rank)
    pace = Pace(rank, sockets)
    tell = _Progress(pipe, plan.parts) if rank == 0 else None
    with open_contenders(plan, rank, folder, raw.Sockets(rank, sockets)) as contenders:
        for collective, nbytes in plan.cases:
            case = traffic(collective, rank, plan.ranks, nbytes)
            timings = measure(case, contenders, pace, plan, tell or (lambda share: None))
            if tell is not None:
                pipe.send(("row", Row(collective, case.nbytes if nbytes else 0, plan.ranks, timings)))
                tell.next()
        if plan.training:
            from asyncdist.bench.training import train

            trained = train(plan, rank, pace, tell or (lambda share: None))
            if tell is not None:
                pipe.send(("training", trained))
        pace()  # nobody leaves while another one still measures


def _pin(rank: int) -> None:
    """Keep this process on a core of its own, as launchers of MPI do; with fewer cores than ranks they share."""
    if not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError("this system does not let a process choose its core: leave --pin out")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


class _Progress:
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
