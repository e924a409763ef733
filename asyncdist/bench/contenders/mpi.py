"""The traffic over Open MPI: the buffer-based calls of mpi4py, in place where MPI can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncdist.bench.workloads.collectives import Traffic

Call = Callable[[], object]


def communicator() -> Any:
    """Return MPI's world, which is initialised on first use.

    Only one thread calls it, and it is told so: that is when it is fastest.
    """
    import mpi4py

    mpi4py.rc(thread_level="funneled")
    from mpi4py import MPI

    return MPI.COMM_WORLD


def prepare_mpi_call(world: Any, case: Traffic) -> Call:
    """Return what does the case's collective once over the tensors' own memory."""
    if case.name == "barrier":
        return lambda: world.Barrier()
    taken, given = case.input.numpy(), case.output.numpy()
    if case.in_place:
        return _in_place(world, case, taken)
    calls: dict[str, Call] = {
        "all_gather": lambda: world.Allgather(taken, given),
        "reduce_scatter": lambda: world.Reduce_scatter_block(taken, given),
        "all_to_all": lambda: world.Alltoall(taken, given),
        "gather": lambda: world.Gather(taken, given if case.rank == 0 else None, 0),
        "scatter": lambda: world.Scatter(taken if case.rank == 0 else None, given, 0),
    }
    return calls[case.name]


def _in_place(world: Any, case: Traffic, data: Any) -> Call:
    from mpi4py.MPI import IN_PLACE, SUM

    calls: dict[str, Call] = {
        "all_reduce": lambda: world.Allreduce(IN_PLACE, data, SUM),
        "reduce": lambda: world.Reduce(*((IN_PLACE, data) if case.rank == 0 else (data, None)), SUM, 0),
        "broadcast": lambda: world.Bcast(data, 0),
    }
    return calls[case.name]
