"""How rank processes are started: each by itself, or all by Open MPI's ``mpirun``. No torch here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from asyncdist.bench.machine import installed
from asyncdist.bench.plan import BenchPlan

BY_MPI = "mpi"
"""What a rank process is told in place of its rank when it has to ask MPI."""


def commands(plan: BenchPlan, folder: Path) -> list[list[str]]:
    """Return what to execute: one command a rank, or one for all where they have to speak MPI."""
    program = [sys.executable, "-P", "-m", "asyncdist.bench", str(folder)]
    if plan.through:  # torch.distributed has no word for a transport
        program = ["env", f"ASYNCDIST_TRANSPORT={plan.transports[0]}", *program]
    if "mpi" not in plan.against:
        return [[*program, str(rank)] for rank in range(plan.ranks)]
    # More ranks than cores are no mistake here, and contenders that use threads must not be squeezed onto one core.
    starter = ["mpirun", "-n", str(plan.ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        starter.append("--allow-run-as-root")
    return [[*starter, *program, BY_MPI]]


def mpi_missing() -> str | None:
    """Return what to install before MPI can compete, None if nothing is missing."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'asyncdist[mpi]'"
    if shutil.which("mpirun") is None:
        return "there is no mpirun: install Open MPI (Debian and Ubuntu: apt-get install openmpi-bin)"
    if not _said_by_mpirun().startswith("mpirun (Open MPI)"):
        return "the mpirun found first is not Open MPI's: put Open MPI's into PATH before it"
    return None


def mpi_version() -> str:
    """Return the versions of Open MPI and mpi4py as a short text."""
    return f"Open MPI {_said_by_mpirun().split()[-1]}, mpi4py {installed('mpi4py')}"


def _said_by_mpirun() -> str:
    """Return the first line of ``mpirun --version``."""
    run = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return (run.stdout.splitlines() or [""])[0].strip()
