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
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """Read the variables of torchrun, mpirun or srun."""
        return cls(
            rank=_launcher_number(environ, "RANK"),
            world_size=_launcher_number(environ, "WORLD_SIZE"),
            local_rank=_launcher_number(environ, "LOCAL_RANK"),
            local_world_size=_launcher_number(environ, "LOCAL_WORLD_SIZE"),
            master_addr=environ.get("MASTER_ADDR") or None,
            master_port=_number(environ, "MASTER_PORT"),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1"),
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
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
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Service:
        """Read systemd's variables."""
        return cls(
            _number(environ, "LISTEN_PID"),
            _number(environ, "LISTEN_FDS") or 0,
            environ.get("NOTIFY_SOCKET", "").strip(),
        )


@dataclass(frozen=True, slots=True)
class NcclSettings:
    """The variables of NCCL that this package reads: whether NCCL's calls block until they are complete."""

    blocking: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> NcclSettings:
        """Read NCCL's variables."""
        return cls(environ.get("NCCL_COMM_BLOCKING", "").strip() != "0")


@dataclass(frozen=True, slots=True)
class TorchHooks:
    """The variables by which a program asks for torch's own observers of collectives.

    Attributes:
        flight_recorder: torch's flight recorder, by a size of its buffer other than 0, or by a request to dump it. Without
            both torch records too, unless a back end records itself.
        dumps: Whether torch's flight recorder is written into a file when an operation fails.
        nan_check: The check of inputs for NaN.
    """

    flight_recorder: bool = False
    dumps: bool = True
    nan_check: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> TorchHooks:
        """Read torch's variables."""
        sizes = (_number(environ, name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
        wishes = (environ.get(name, "").lower() for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"))
        dumps = next((wish not in ("0", "n", "no", "f", "false") for wish in wishes if wish), None)
        size = next((size for size in sizes if size is not None), int(bool(dumps)))
        return cls(size > 0, dumps is not False, environ.get("TORCH_DIST_NAN_CHECK", "") == "1")

    @property
    def observe(self) -> bool:
        """Whether any of them observes operations."""
        return self.flight_recorder or self.nan_check


_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = "OMPI_COMM_WORLD_"
# The variable that identifies each launcher, and its names for torchrun's variables. Inner launchers come first: in a
# Slurm allocation MPICH's mpirun starts its proxies with srun, and the ranks inherit the proxies' variables.
_LAUNCHERS = {
    f"{_OPEN_MPI}RANK": [f"{_OPEN_MPI}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    # MPICH, Intel MPI; srun --mpi=pmi2 sets the first two.
    "PMI_RANK": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    # srun; a batch script has no step.
    "SLURM_STEP_ID": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
}


def _launcher_number(source: Mapping[str, str], variable: str) -> int | None:
    """Return a number under torchrun's name; if there is none, under the name of the first launcher that defines it."""
    place = _VARIABLES.index(variable)
    other_names = [name for mark, names in _LAUNCHERS.items() if source.get(mark) for name in names[place : place + 1]]
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
