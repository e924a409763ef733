"""The contender "mpi": Open MPI through the buffer-based calls of mpi4py, in place where MPI allows it.

Used by `contenders` and `launch`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from asyncdist.base.callables import Callback
from asyncdist.cli.machine import installed

if TYPE_CHECKING:
    from asyncdist.cli.bench.traffic import Traffic


def mpi_missing() -> str | None:
    """Return what to install before Open MPI can be measured; None if nothing is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install mpi4py"
    if shutil.which("mpirun") is None:
        return "mpirun was not found: install Open MPI (Debian and Ubuntu: apt-get install openmpi-bin)"
    if not _mpirun_version().startswith("mpirun (Open MPI)"):
        return "the first mpirun in PATH is not Open MPI's: put Open MPI's before it"
    return None


def mpi_version() -> str:
    """Return the versions of Open MPI and mpi4py as a short text."""
    return f"Open MPI {_mpirun_version().split()[-1]}, mpi4py {installed('mpi4py')}"


def _mpirun_version() -> str:
    """Return the first line of ``mpirun --version``."""
    run = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return (run.stdout.splitlines() or [""])[0].strip()


def communicator() -> Any:
    """Return ``MPI.COMM_WORLD``. The first call initializes MPI for calls from one thread, which are the fastest."""
    import mpi4py

    mpi4py.rc(thread_level="funneled")
    from mpi4py import MPI

    return MPI.COMM_WORLD


def prepare_mpi_call(world: Any, case: Traffic) -> Callback:
    """Return a function that executes the collective once in the tensors' own memory."""
    from mpi4py.MPI import IN_PLACE, SUM

    source, target, is_root = case.input.numpy(), case.output.numpy(), case.rank == 0
    calls: dict[str, Callback] = {
        "all_reduce": lambda: world.Allreduce(IN_PLACE, source, SUM),
        "reduce": lambda: world.Reduce(*((IN_PLACE, source) if is_root else (source, None)), SUM, 0),
        "broadcast": lambda: world.Bcast(source, 0),
        "all_gather": lambda: world.Allgather(source, target),
        "reduce_scatter": lambda: world.Reduce_scatter_block(source, target),
        "all_to_all": lambda: world.Alltoall(source, target),
        "gather": lambda: world.Gather(source, target if is_root else None, 0),
        "scatter": lambda: world.Scatter(source if is_root else None, target, 0),
        "barrier": lambda: world.Barrier(),
    }
    return calls[case.name]
