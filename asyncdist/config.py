"""The settings of this library, from the environment. `asyncdist.environment` reads the variables of other programs.

This module imports only the errors and the standard library. A `Config` is immutable, and a world keeps the one with
which it was started. `settings` yields the table that ``asyncdist info --settings`` prints.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any

from asyncdist.errors import UsageError

log = logging.getLogger("asyncdist")


DEFAULT_LANES = 2
"""TCP connections per peer, unless a setting or a measurement says otherwise."""


def _setting(
    default: Any,
    text: str,
    *,
    variable: str = "",
    least: float = 0,
    zero: bool = False,
    shared: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return the dataclass field of a setting.

    Args:
        default: The value without the variable; its type decides how the text is parsed.
        text: The help text.
        variable: The environment variable, if it is not ``ASYNCDIST_`` and the name of the field: see `variable_of`.
        least: The smallest number that is accepted.
        zero: Whether 0 is accepted as well.
        shared: Whether all ranks need the same value, because it determines the messages that they exchange.
        choices: The only texts that are accepted; any text if empty.
    """
    metadata = {"variable": variable, "help": text, "least": least, "zero": zero, "shared": shared, "choices": choices}
    return field(default=default, metadata=metadata)


def variable_of(setting: Field[Any]) -> str:
    """Return the environment variable of a setting."""
    return str(setting.metadata["variable"] or f"ASYNCDIST_{setting.name.upper()}")


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one world. ``asyncdist info --settings`` lists each field's variable, meaning, value and default."""

    token: str | None = _setting(None, "secret that every rank and the store must hold")
    allow_unauthenticated: bool = _setting(False, "listen beyond loopback without a token (1 to allow)")
    allow_pickle: bool = _setting(False, "allow pickles in object collectives (1 to allow; every rank must be trusted)")
    interface: str | None = _setting(
        None,
        "network interface to advertise: a name prefix, =name, or ^prefix to exclude; a,b for several",
        variable="ASYNCDIST_SOCKET_IFNAME",
    )
    host: str | None = _setting(
        None,
        "name of this host: only ranks with the same name share memory and look at each other's processes (default: the "
        "machine's identity)",
    )
    transport: str = _setting("auto", "transport, if init_process_group names none; a,b for several")
    timeout: float = _setting(1800.0, "default timeout of an operation in seconds")
    lanes: int = _setting(
        0,
        "number of TCP connections per peer over which a large message is striped (0: 2, or 4 if hosts find at the start "
        "that these are faster)",
        shared=True,
        variable="ASYNCDIST_TCP_LANES",
    )
    stripe_nbytes: int = _setting(
        4 << 20,
        "smallest message, in bytes, that is striped over several connections; an all-reduce of n ranks sends an n-th of a "
        "tensor in a message",
        shared=True,
    )
    tcp_threads: str = _setting(
        "auto",
        "when threads send, receive and reduce large messages over TCP, two for each connection: always, never, or auto: "
        "where other programs compete for the cores, or hosts find at the start that this is faster",
        choices=("auto", "always", "never"),
    )
    piece_nbytes: int = _setting(
        1 << 20,
        "bytes received over a link before they are reduced, and at most 256 KiB read from shared memory at a time; should "
        "fit in the cache",
    )
    shm_area_nbytes: int = _setting(
        1 << 20,
        "bytes of the shared buffer through which a message passes; should fit in the cache",
        least=1,
        shared=True,
    )
    segment_nbytes: int = _setting(1 << 20, "bytes per segment of a pipelined broadcast", least=1, shared=True)
    eager_nbytes: int = _setting(
        64 << 10,
        "largest message, in bytes, that is buffered before its receive is posted; a larger one waits at the sender",
    )
    aside_nbytes: int = _setting(
        64 << 20, "bytes of messages from one peer that are buffered before their receives are posted"
    )
    max_message_nbytes: int = _setting(
        1 << 38, "largest frame in bytes; a frame that claims more is rejected as corrupt", least=1
    )
    device_piece_nbytes: int = _setting(
        4 << 20, "bytes of a device tensor that are staged through host memory at a time", least=1, shared=True
    )
    algorithm: str = _setting(
        "",
        "algorithms to force, such as all_reduce=ring,broadcast=tree; also between ranks that share memory",
        shared=True,
    )
    profile: str | None = _setting(
        None,
        "file with the speed of the links between hosts, which asyncdist bench --calibrate has written; the file of the "
        "lowest rank that has one counts for all",
    )
    calibrate: bool = _setting(
        True,
        "measure the links between hosts at the start, without a profile, for at most 0.1 s (0 to rely on defaults)",
        shared=True,
    )
    spin_us: float = _setting(
        300.0, "microseconds for which a blocked thread spins before it sleeps (0 if there are more ranks than cores)"
    )
    await_spin_us: float = _setting(100.0, "microseconds for which an await spins before it yields to the event loop")
    flight_recorder_size: int = _setting(
        2000, "operations that the flight recorder keeps", variable="ASYNCDIST_FLIGHT_RECORDER"
    )
    debug: bool = _setting(
        False,
        "warn of each Work that was dropped and never awaited, with the line of the call, as asyncio's debug mode does; "
        "show all frames of a KeyboardInterrupt (1 to do so)",
    )
    dump_dir: str | None = _setting(None, "folder into which the flight recorder is written when a group fails")
    dump_signal: str | None = _setting(
        None, "signal, such as USR2, on which the flight recorder is written to that folder too"
    )
    dump_format: str = _setting(
        "json",
        "format of these files: json for `asyncdist trace`, torch for torch's analyser torchfrtrace, or both",
        choices=("json", "torch", "both"),
    )
    metrics_port: int = _setting(
        -1, "port at which each rank serves Prometheus metrics, plus its local rank (0: any free port; default: none)"
    )
    metrics_host: str = _setting("127.0.0.1", "address at which that port listens")
    tls_cert: str | None = _setting(
        None, "file with this process's certificate (PEM); enables TLS on the ports that it serves"
    )
    tls_key: str | None = _setting(None, "file with the certificate's private key (PEM), if it is not in the same file")
    tls_ca: str | None = _setting(
        None,
        "file or folder with the trusted CA certificates (PEM); a server then requires a certificate of every client",
    )
    tls_check_hostname: bool = _setting(
        True, "check a store's certificate against the host name that is dialled (0 to skip the check)"
    )
    tls_check_ranks: bool = _setting(
        False, "check a rank's certificate against the address that is dialled (1 to check)"
    )
    store_max_value_nbytes: int = _setting(
        256 << 20, "largest value (and frame), in bytes, that the store accepts", least=1
    )
    store_max_key_nbytes: int = _setting(8 << 10, "longest key, in bytes, that the store accepts", least=1)
    store_max_nbytes: int = _setting(0, "total bytes of keys, values and queues in the store (0: no limit)")
    store_compact_nbytes: int = _setting(
        64 << 20, "size of the log, in bytes, at which a store with --data writes a snapshot"
    )
    store_max_connections: int = _setting(65536, "largest number of connections that the store accepts", least=1)
    store_c10d: str = _setting(
        "auto",
        "addresses from which a store accepts torch's TCPStore clients, which prove no token: off, loopback, any "
        "(auto: loopback for a daemon without token and TLS, else off)",
        choices=("auto", "off", "loopback", "any"),
    )
    store_lease: float = _setting(
        10.0, "seconds for which a store keeps the ephemeral keys of a client that lost its connection"
    )
    store_reconnect: float = _setting(
        30.0, "seconds for which a client retries a lost connection to a store (0: no retry)"
    )
    heartbeat: float = _setting(
        5.0,
        "seconds after which a silent rank is lost; longer than any call that holds the interpreter (0: no heartbeats)",
        least=0.5,
        zero=True,
        shared=True,
    )
    status: bool = _setting(True, "answer asyncdist top, which shows calls and Python stacks (0: no port for it)")
    handshake_timeout: float = _setting(20.0, "seconds within which a new connection must prove its token", least=0.1)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read every setting; log once each variable that resembles a setting and is not one, with that setting.

        ``environ`` holds the variables, by default those of the process.

        Raises:
            UsageError: A value cannot be parsed; the message names its variable.
        """
        source = _translated(environ)
        _warn_of_misspelt(source)
        values: dict[str, Any] = {}
        for setting in fields(cls):
            if text := source.get(variable_of(setting), "").strip():
                values[setting.name] = _parse(setting, text)
        return cls(**values)

    def with_(self, **changes: Any) -> Config:
        """Return a copy with some settings changed."""
        return replace(self, **changes)


_warned: set[str] = set()

_FORMER_C10D = "ASYNCDIST_ALLOW_UNAUTHENTICATED_C10D"


def _translated(source: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment with ``ASYNCDIST_STORE_C10D=any`` in place of the deprecated variable that meant it."""
    if not source.get(_FORMER_C10D, "").strip():
        return source
    if _FORMER_C10D not in _warned:
        _warned.add(_FORMER_C10D)
        log.warning("%s is deprecated: set ASYNCDIST_STORE_C10D=any instead of 1", _FORMER_C10D)
    any_host = _parse_bool(_FORMER_C10D, source[_FORMER_C10D].strip())
    translated = {name: text for name, text in source.items() if name != _FORMER_C10D}
    return {"ASYNCDIST_STORE_C10D": "any", **translated} if any_host else translated


def _warn_of_misspelt(source: Mapping[str, str]) -> None:
    known = [variable_of(f) for f in fields(Config)]
    for variable in {name for name in source if name.startswith("ASYNCDIST_")}.difference(known, _warned):
        # Only close matches: Kubernetes defines variables with this prefix for a service named asyncdist.
        for meant in difflib.get_close_matches(variable, known, n=1, cutoff=0.9):
            _warned.add(variable)
            log.warning("%s is not a setting; did you mean %s? `asyncdist info --settings` lists all", variable, meant)


def invalid(variable: str, text: str, problem: str) -> UsageError:
    """Return the error for a variable whose text has a problem."""
    return UsageError(f"{variable}={text!r} {problem}; correct it, or unset it")


_MOST = (1 << 63) - 1
"""The largest whole number that ranks can send to each other."""


def _parse(setting: Field[Any], text: str) -> object:
    variable, least, choices = variable_of(setting), setting.metadata["least"], setting.metadata["choices"]
    # Python decodes other bytes to surrogates, which cannot be sent.
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise invalid(variable, text, "has bytes that are not UTF-8")
    if choices and text.lower() not in choices:
        raise invalid(variable, text, f"is not one of {', '.join(choices)}")
    if isinstance(setting.default, bool):
        return _parse_bool(variable, text)
    if not isinstance(setting.default, (int, float)):
        return text.lower() if choices else text
    parse, kind, note = (
        (float, "number", "")
        if isinstance(setting.default, float)
        else (whole_number, "whole number", " (K, M, G allowed)")
    )
    try:
        value = parse(text)
    except ValueError:
        value = math.nan
    if isinstance(value, int) and value > _MOST:
        raise invalid(variable, text, "is too large: at most 2^63 - 1")
    if value >= least or (value == 0 and setting.metadata["zero"]):
        return value
    also = ", and not 0" if setting.metadata["zero"] else ""
    raise invalid(variable, text, f"is not a {kind} from {least} up{also}{note}")


def _parse_bool(variable: str, text: str) -> bool:
    try:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
    except KeyError:
        raise invalid(variable, text, "is not 0 or 1") from None


def whole_number(text: str) -> int:
    """Parse a whole number from 0 up; the suffixes K, M, G are powers of 1024. Raises ValueError for other text."""
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    value = int(text[:-1] if unit > 1 else text) * unit
    if value < 0:
        raise ValueError(text)
    return value


def settings(config: Config) -> Iterator[tuple[str, str, object, object]]:
    """Yield (variable, meaning, value, default) of every setting; the token's value is hidden."""
    for f in fields(config):
        value = getattr(config, f.name)
        shown = "(set)" if f.name == "token" and value else value
        yield variable_of(f), f.metadata["help"], shown, f.default


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must be equal on every rank, by variable."""
    return {variable_of(f): getattr(config, f.name) for f in fields(config) if f.metadata["shared"]}
