"""The variables that other programs define in the environment: launchers, systemd, NCCL and torch.

`asyncdist.config` reads the settings of this library. No other module reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncdist.config import invalid


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher (torchrun, srun, mpirun, or a user) defines in the environment.

    A field is None if the launcher does not define it: srun and mpirun define the rank, but not the address of rank 0.
    torchrun's variables take precedence. ``agent_store`` says that torchrun's agent serves its own TCPStore at the address
    of rank 0.
    """

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    run_id: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read the variables of torchrun, mpirun or srun from ``environ``; None is the process's environment."""
        source = os.environ if environ is None else environ
        return cls(
            rank=_launcher_number(source, "RANK"),
            world_size=_launcher_number(source, "WORLD_SIZE"),
            local_rank=_launcher_number(source, "LOCAL_RANK"),
            local_world_size=_launcher_number(source, "LOCAL_WORLD_SIZE"),
            master_addr=source.get("MASTER_ADDR") or None,
            master_port=_number(source, "MASTER_PORT"),
            agent_store=source.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"),
            run_id=source.get("TORCHELASTIC_RUN_ID", ""),
        )

    @property
    def on_one_host(self) -> bool:
        """Whether the launcher says that all ranks run on this host."""
        return self.world_size is not None and self.local_world_size == self.world_size


@dataclass(frozen=True, slots=True)
class Service:
    """The environment of a systemd service: the sockets that systemd opened, and its socket for notifications."""

    listen_pid: int | None = None
    listen_fds: int = 0
    notify_socket: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Service:
        """Read systemd's variables from ``environ``; None is the process's environment."""
        source = os.environ if environ is None else environ
        return cls(
            _number(source, "LISTEN_PID"), _number(source, "LISTEN_FDS") or 0, source.get("NOTIFY_SOCKET", "").strip()
        )


@dataclass(frozen=True, slots=True)
class NcclSettings:
    """The variables of NCCL that this package reads: whether NCCL's calls block until they are complete."""

    blocking: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> NcclSettings:
        """Read NCCL's variables from ``environ``; None is the process's environment."""
        source = os.environ if environ is None else environ
        return cls(source.get("NCCL_COMM_BLOCKING", "").strip() != "0")


@dataclass(frozen=True, slots=True)
class TorchHooks:
    """The variables by which a program asks for torch's own observers of collectives.

    Attributes:
        flight_recorder: torch's flight recorder, by a size of its buffer other than 0. Without a size torch records too,
            unless a back end records itself.
        nan_check: The check of inputs for NaN.
    """

    flight_recorder: bool = False
    nan_check: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> TorchHooks:
        """Read torch's variables from ``environ``; None is the process's environment."""
        source = os.environ if environ is None else environ
        sizes = (_number(source, name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
        size = next((size for size in sizes if size is not None), 0)
        return cls(size > 0, source.get("TORCH_DIST_NAN_CHECK", "") == "1")

    @property
    def observe(self) -> bool:
        """Whether any of them observes operations."""
        return self.flight_recorder or self.nan_check


# The variable that identifies each launcher, and its names for torchrun's variables. Inner launchers come first: in a
# Slurm allocation MPICH's mpirun starts its proxies with srun, and the ranks inherit the proxies' variables.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": {  # Open MPI
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "PMI_RANK": {  # MPICH, Intel MPI; srun --mpi=pmi2 sets the first two
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
    "SLURM_STEP_ID": {  # srun; a batch script has no step
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
    },
}


def _launcher_number(source: Mapping[str, str], variable: str) -> int | None:
    """Return a number under torchrun's name; if there is none, under the name of the first launcher that defines it."""
    other_names = [names[variable] for mark, names in _LAUNCHERS.items() if source.get(mark) and variable in names]
    numbers = (_number(source, name) for name in (variable, *other_names))
    return next((number for number in numbers if number is not None), None)


def _number(source: Mapping[str, str], variable: str) -> int | None:
    text = source.get(variable, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise invalid(variable, text, "is not a whole number") from None
