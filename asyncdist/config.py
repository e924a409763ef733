"""Every setting that comes from the environment, read in this file and nowhere else.

`settings()` returns the table that ``asyncdist info`` prints. A `Config` is immutable; `Config.from_environment`
makes one, and a world keeps the one it was started with.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

log = logging.getLogger("asyncdist")


def _setting(
    default: Any, variable: str, text: str, *, least: float = 0, shared: bool = False, choices: tuple[str, ...] = ()
) -> Any:
    """Return a field for a setting; ``least`` is the smallest number with which anything works.

    One that is ``shared`` says what is sent to whom, so all ranks must have it alike. One with ``choices`` takes no
    other text.
    """
    metadata = {"variable": variable, "help": text, "least": least, "shared": shared, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one world. Each field's variable and meaning: see ``asyncdist info``."""

    token: str | None = _setting(None, "ASYNCDIST_TOKEN", "secret that every rank and the store must hold")
    allow_unauthenticated: bool = _setting(
        False, "ASYNCDIST_ALLOW_UNAUTHENTICATED", "listen beyond loopback without a token (1 to allow)"
    )
    allow_pickle: bool = _setting(
        False, "ASYNCDIST_ALLOW_PICKLE", "let object collectives carry pickles (1 to allow; trust every rank)"
    )
    interface: str | None = _setting(
        None,
        "ASYNCDIST_SOCKET_IFNAME",
        "interface to advertise: a name prefix, =exact, or ^prefix to exclude; a,b for several",
    )
    host: str | None = _setting(
        None,
        "ASYNCDIST_HOST",
        "name of this host: ranks of another name share no memory with us (default: the machine)",
    )
    transport: str = _setting(
        "auto", "ASYNCDIST_TRANSPORT", "transport when init_process_group names none; a,b for several"
    )
    timeout: float = _setting(
        1800.0, "ASYNCDIST_TIMEOUT", "seconds after which an operation fails, unless told otherwise"
    )
    lanes: int = _setting(
        1, "ASYNCDIST_TCP_LANES", "TCP connections that a large tensor is striped over", least=1, shared=True
    )
    stripe_nbytes: int = _setting(
        1 << 20, "ASYNCDIST_STRIPE_NBYTES", "bytes from which a tensor is striped over the lanes", shared=True
    )
    piece_nbytes: int = _setting(
        256 << 10, "ASYNCDIST_PIECE_NBYTES", "bytes received before they are reduced (kept in cache)"
    )
    shm_area_nbytes: int = _setting(
        1 << 20,
        "ASYNCDIST_SHM_AREA_NBYTES",
        "bytes of shared memory that a message goes through (kept in cache)",
        least=1,
        shared=True,
    )
    segment_nbytes: int = _setting(
        1 << 20, "ASYNCDIST_SEGMENT_NBYTES", "bytes of one step of a pipelined broadcast", least=1, shared=True
    )
    eager_nbytes: int = _setting(
        64 << 10,
        "ASYNCDIST_EAGER_NBYTES",
        "an early message up to this size is put aside; a larger one waits on the wire",
    )
    aside_nbytes: int = _setting(
        64 << 20, "ASYNCDIST_ASIDE_NBYTES", "early messages of one peer are put aside up to this size together"
    )
    max_message_nbytes: int = _setting(
        1 << 38, "ASYNCDIST_MAX_MESSAGE_NBYTES", "a frame that claims more is refused as damage", least=1
    )
    device_piece_nbytes: int = _setting(
        4 << 20,
        "ASYNCDIST_DEVICE_PIECE_NBYTES",
        "bytes of a device's tensor that go through the host at once",
        least=1,
        shared=True,
    )
    algorithm: str = _setting(
        "",
        "ASYNCDIST_ALGORITHM",
        "schedules to force, as all_reduce=ring,broadcast=tree; also between ranks that share memory",
        shared=True,
    )
    spin_us: float = _setting(
        300.0,
        "ASYNCDIST_SPIN_US",
        "microseconds that a blocked thread tries on before it sleeps (0 where ranks > cores)",
    )
    await_spin_us: float = _setting(
        100.0, "ASYNCDIST_AWAIT_SPIN_US", "microseconds that an await tries on before it lets the loop run"
    )
    flight_recorder_size: int = _setting(2000, "ASYNCDIST_FLIGHT_RECORDER", "operations that the flight recorder keeps")
    dump_dir: str | None = _setting(
        None, "ASYNCDIST_DUMP_DIR", "folder that gets the flight recorder when a group fails"
    )
    dump_signal: str | None = _setting(
        None, "ASYNCDIST_DUMP_SIGNAL", "signal, as USR2, on which the flight recorder is written there as well"
    )
    tls_cert: str | None = _setting(
        None, "ASYNCDIST_TLS_CERT", "file of our certificate (PEM): what is served here is TLS then"
    )
    tls_key: str | None = _setting(None, "ASYNCDIST_TLS_KEY", "file of its key (PEM), if that is not in the same file")
    tls_ca: str | None = _setting(
        None,
        "ASYNCDIST_TLS_CA",
        "file or folder of the certificates that we believe; a server wants one from clients then",
    )
    tls_check_hostname: bool = _setting(
        True,
        "ASYNCDIST_TLS_CHECK_HOSTNAME",
        "believe a store only if its certificate is for the name dialled (0 for not)",
    )
    tls_check_ranks: bool = _setting(
        False,
        "ASYNCDIST_TLS_CHECK_RANKS",
        "believe a rank only if its certificate is for the address dialled (1 to check)",
    )
    store_max_value_nbytes: int = _setting(
        256 << 20, "ASYNCDIST_STORE_MAX_VALUE_NBYTES", "largest value (and frame) that the store takes", least=1
    )
    store_max_key_nbytes: int = _setting(
        8 << 10, "ASYNCDIST_STORE_MAX_KEY_NBYTES", "longest key that the store takes", least=1
    )
    store_max_nbytes: int = _setting(
        0,
        "ASYNCDIST_STORE_MAX_NBYTES",
        "bytes that keys, values and queues may take in the store together (0: no limit)",
    )
    store_compact_nbytes: int = _setting(
        64 << 20, "ASYNCDIST_STORE_COMPACT_NBYTES", "bytes of log from which a store with --data writes a snapshot"
    )
    store_max_connections: int = _setting(
        65536, "ASYNCDIST_STORE_MAX_CONNECTIONS", "connections that the store takes", least=1
    )
    store_c10d: str = _setting(
        "auto",
        "ASYNCDIST_STORE_C10D",
        "whence a store takes torch's TCPStore clients, which prove no token: off, loopback, any "
        "(auto: loopback for a daemon without token and TLS, else off)",
        choices=("auto", "off", "loopback", "any"),
    )
    store_lease: float = _setting(
        10.0,
        "ASYNCDIST_STORE_LEASE",
        "seconds for which a store keeps the ephemeral keys of a client whose connection broke",
    )
    store_reconnect: float = _setting(
        30.0, "ASYNCDIST_STORE_RECONNECT", "seconds for which a broken connection to a store is tried again (0 for not)"
    )
    handshake_timeout: float = _setting(
        20.0, "ASYNCDIST_HANDSHAKE_TIMEOUT", "seconds within which a new connection must prove its token", least=0.1
    )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read every setting; a value that cannot be read raises ValueError naming its variable.

        A variable that resembles one of ours and is none is logged, once, with the one that may be meant.
        """
        source = _translated(os.environ if environ is None else environ)
        _tell_of_misspelt(source)
        given: dict[str, Any] = {
            f.name: _parse(f.default, f.metadata["variable"], source, f.metadata["least"], f.metadata["choices"])
            for f in fields(cls)
            if _is_set(f, source)
        }
        return cls(**given)

    def with_(self, **changes: Any) -> Config:
        """Return a copy with some settings changed."""
        return replace(self, **changes)


_told: set[str] = set()

_FORMER_C10D = "ASYNCDIST_ALLOW_UNAUTHENTICATED_C10D"


def _translated(source: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with ``ASYNCDIST_STORE_C10D=any`` in place of the deprecated variable that meant it."""
    if not source.get(_FORMER_C10D, "").strip():
        return source
    if _FORMER_C10D not in _told:
        _told.add(_FORMER_C10D)
        log.warning("%s is deprecated: set ASYNCDIST_STORE_C10D=any instead of 1", _FORMER_C10D)
    any_host = _parse(False, _FORMER_C10D, source, 0)
    translated = {name: text for name, text in source.items() if name != _FORMER_C10D}
    return {"ASYNCDIST_STORE_C10D": "any", **translated} if any_host else translated


def _tell_of_misspelt(source: Mapping[str, str]) -> None:
    known = [f.metadata["variable"] for f in fields(Config)]
    for variable in {name for name in source if name.startswith("ASYNCDIST_")}.difference(known, _told):
        # Only what resembles one: others may use the prefix too, as Kubernetes does for a service of that name.
        for meant in difflib.get_close_matches(variable, known, n=1, cutoff=0.9):
            _told.add(variable)
            log.warning("%s is no setting; is %s meant? `asyncdist info` lists them all", variable, meant)


def _is_set(setting: Any, source: Mapping[str, str]) -> bool:
    return bool(source.get(setting.metadata["variable"], "").strip())


def _parse(
    default: object, variable: str, source: Mapping[str, str], least: float, choices: tuple[str, ...] = ()
) -> object:
    text = source[variable].strip()
    if choices and text.lower() not in choices:
        raise ValueError(f"{variable}={text!r} is not one of {', '.join(choices)}")
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if isinstance(default, int):
            return _at_least(least, whole_number(text))
        if isinstance(default, float):
            return _at_least(least, float(text))
    except (KeyError, ValueError):
        numbers = {int: f"a whole number from {least} up (K, M, G allowed)", float: f"a number from {least} up"}
        kind = numbers.get(type(default), "0 or 1")
        raise ValueError(f"{variable}={text!r} is not {kind}") from None
    return text.lower() if choices else text


def _at_least(least: float, value: float) -> float:
    if not value >= least:  # nor is what is no number
        raise ValueError(value)
    return value


def whole_number(text: str) -> int:
    """Read ``64K`` as 65536 (K, M, G are powers of 1024); ValueError if it is no whole number from 0 up."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    value = int(text[:-1] if unit > 1 else text) * unit
    if value < 0:
        raise ValueError(text)
    return value


def settings(config: Config) -> Iterator[tuple[str, str, object, object]]:
    """Yield (variable, meaning, value, default) of every setting, the token's value hidden."""
    for f in fields(config):
        value = getattr(config, f.name)
        shown = "(set)" if f.name == "token" and value else value
        yield f.metadata["variable"], f.metadata["help"], shown, f.default


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal on every rank, by variable."""
    return {f.metadata["variable"]: getattr(config, f.name) for f in fields(config) if f.metadata["shared"]}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher (torchrun, srun, mpirun, or a person) has put into the environment.

    ``None`` where it said nothing: srun and mpirun say who a process is, and not where rank 0 is. What stands under
    torchrun's names comes first. ``agent_store`` is true when torchrun's agent serves its own TCPStore at the master's
    address.
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
        source = os.environ if environ is None else environ
        return cls(
            rank=_said(source, "RANK"),
            world_size=_said(source, "WORLD_SIZE"),
            local_rank=_said(source, "LOCAL_RANK"),
            local_world_size=_said(source, "LOCAL_WORLD_SIZE"),
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
    """What systemd has put into the environment of a service: sockets it opened, and where it wants to hear of us."""

    listen_pid: int | None = None
    listen_fds: int = 0
    notify_socket: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Service:
        source = os.environ if environ is None else environ
        return cls(
            _number(source, "LISTEN_PID"), _number(source, "LISTEN_FDS") or 0, source.get("NOTIFY_SOCKET", "").strip()
        )


@dataclass(frozen=True, slots=True)
class NcclSettings:
    """What NCCL itself reads in the environment, as far as it matters to us: whether its calls wait until they are done."""

    blocking: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> NcclSettings:
        source = os.environ if environ is None else environ
        return cls(source.get("NCCL_COMM_BLOCKING", "").strip() != "0")


# By what a launcher sets for the processes that it starts, the names that it has for torchrun's. One that starts another
# comes after it: inside a Slurm allocation MPICH's mpirun has srun start its proxies, and the ranks inherit the proxy's.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": {  # Open MPI
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "PMI_RANK": {  # MPICH, Intel MPI; of srun --mpi=pmi2 the first two
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


def _said(source: Mapping[str, str], variable: str) -> int | None:
    """Return a number under torchrun's name, or else under that of the first launcher that says it."""
    theirs = [names[variable] for mark, names in _LAUNCHERS.items() if source.get(mark) and variable in names]
    numbers = (_number(source, name) for name in (variable, *theirs))
    return next((number for number in numbers if number is not None), None)


def _number(source: Mapping[str, str], variable: str) -> int | None:
    text = source.get(variable, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}={text!r} is not a whole number") from None
