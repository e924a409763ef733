"""Parse init_method and the launcher's variables: the meeting point, the rank and the world size. It performs no I/O.

`rendezvous.meet` calls it.

    init_method                       where the ranks meet
    None, env://                      MASTER_ADDR:MASTER_PORT; or torchrun's own store, if its agent serves one there
    tcp://host:port                   rank 0's store; port 0 on rank 0 picks a free one; IPv6 in brackets
    asyncdist://host:port/job         a store daemon (``asyncdist store``); ``job`` keeps jobs on one daemon apart
    file:///path                      a file, or a folder, that every rank can access
    (store=)                          any store that every rank has

Each URL may carry ``?rank=&world_size=``; arguments override it, and it overrides the launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from asyncdist.environment import Launch
from asyncdist.errors import UsageError

Kind = Literal["direct", "agent", "daemon", "file", "store"]
_SPELLINGS = "env://, tcp://host:port, asyncdist://host:port/job, file:///path, or pass store="


@dataclass(frozen=True, slots=True)
class InitMethod:
    """The meeting point, the rank and the world size.

    The kinds direct, agent and daemon have a ``host`` and a ``port``. ``path`` is the path of the file, or the job's name
    at the daemon.
    """

    kind: Kind
    rank: int
    world_size: int
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def read(
        cls, init_method: str | None, *, rank: int | None, world_size: int | None, has_store: bool, launch: Launch
    ) -> InitMethod:
        """Combine the arguments, the URL and the launcher's variables; a rank or size of -1 counts as not given.

        Raises UsageError, which names the missing value and the variable that sets it.
        """
        if has_store and init_method is not None:
            raise UsageError("init_method and store exclude each other: pass one of them")
        url = init_method or "env://"
        parts = _split(url)
        query = dict(parse_qsl(parts.query))
        world_size = _first(world_size, _whole(query, "world_size", url), launch.world_size)
        rank = _first(rank, _whole(query, "rank", url), launch.rank)
        if world_size is None:
            raise UsageError(_missing("world_size", "WORLD_SIZE", url))
        if rank is None:
            raise UsageError(_missing("rank", "RANK", url))
        if world_size < 1:
            raise UsageError(f"world_size is {world_size}; a world has at least one rank")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is outside a world of {world_size}: ranks go from 0 to {world_size - 1}")
        if has_store:
            return cls("store", rank, world_size)
        if parts.scheme == "file":
            return cls("file", rank, world_size, path=_path(parts, url))
        if parts.scheme == "asyncdist":
            host, port, job = daemon_address(url)
            return cls("daemon", rank, world_size, host=host, port=port, path=job)
        host, port = _master(launch) if parts.scheme == "env" else _address(parts, url)
        kind: Kind = "agent" if parts.scheme == "env" and launch.agent_store else "direct"
        if port == 0 and (rank != 0 or (parts.scheme == "env" and world_size > 1)):
            where = "MASTER_PORT is 0" if parts.scheme == "env" else f"the port in init_method {url!r} is 0"
            raise UsageError(
                f"{where}, so rank 0 would pick a port that no other rank knows: give every rank the same port, "
                "one that is free on rank 0's host"
            )
        return cls(kind, rank, world_size, host=host, port=port)


def daemon_address(url: str) -> tuple[str, int, str]:
    """Return host, port and job of an ``asyncdist://host:port/job`` URL. Raises UsageError for other texts."""
    parts = _split(url)
    if parts.scheme != "asyncdist":
        raise UsageError(f"{url!r} names no job at a store daemon: use asyncdist://host:port/job")
    return *_address(parts, url), unquote(parts.path.strip("/"))


def url_of(host: str, port: int) -> str:
    """Return the ``tcp://`` URL of an address, IPv6 in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None and value != -1), None)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UsageError(f"init_method {url!r} cannot be read ({error}); use {_SPELLINGS}") from None
    if parts.scheme not in ("env", "tcp", "asyncdist", "file"):
        raise UsageError(f"init_method {url!r} has an unknown scheme; use {_SPELLINGS}")
    return parts


def _whole(query: dict[str, str], name: str, url: str) -> int | None:
    if name not in query:
        return None
    try:
        return int(query[name])
    except ValueError:
        raise UsageError(f"{name}={query[name]!r} in init_method {url!r} is not a whole number") from None


def _missing(argument: str, variable: str, url: str) -> str:
    return (
        f"{argument} is not known: {variable} is not set (torchrun and most launchers set it); "
        f"start the program with torchrun, set {variable}, or pass {argument}= (init_method is {url!r})"
    )


def _master(launch: Launch) -> tuple[str, int]:
    if launch.master_addr is None or launch.master_port is None:
        values = {"MASTER_ADDR": launch.master_addr, "MASTER_PORT": launch.master_port}
        absent = [variable for variable, value in values.items() if value is None]
        raise UsageError(
            f"{' and '.join(absent)} not set: torchrun sets both; without it set MASTER_ADDR to rank 0's host and "
            "MASTER_PORT to a free port there, the same on every rank, or pass init_method='tcp://host:port'"
        )
    if not 0 <= launch.master_port <= 65535:
        raise UsageError(f"MASTER_PORT is {launch.master_port}; ports go from 0 to 65535")
    return launch.master_addr.strip("[]"), launch.master_port


def _address(parts: SplitResult, url: str) -> tuple[str, int]:
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"the port in init_method {url!r} is not a number from 0 to 65535") from None
    if not parts.hostname or port is None:
        raise UsageError(
            f"init_method {url!r} lacks its {'port' if parts.hostname else 'host'}; use {parts.scheme}://host:port"
        )
    return parts.hostname, port


def _path(parts: SplitResult, url: str) -> str:
    path = unquote(parts.netloc + parts.path)
    if not path:
        raise UsageError(f"init_method {url!r} lacks its path; use file:///path/that/every/rank/sees")
    return path
