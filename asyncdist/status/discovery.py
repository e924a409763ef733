"""Finds the worlds of a job, and the status ports of their ranks, in the store at which the ranks meet.

Rank 0 publishes a record of its world there (`asyncdist.rendezvous.record_store`), and the members of an elastic job one
each (`asyncdist.elastic.job`). A record may be that of a world that has ended: the caller tries its ports.
"""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from asyncdist.base.backoff import Backoff
from asyncdist.base.daemon_threads import run_in_daemon_thread
from asyncdist.base.deadline import Deadline
from asyncdist.base.error_text import first_line
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import AddressError, RendezvousError, StoreError, UsageError
from asyncdist.net import Security
from asyncdist.rendezvous import InitMethod, TimeLimit
from asyncdist.rendezvous.record_store import AddressRecord, read_record_file
from asyncdist.rendezvous.sources import connect_natively, torch_client
from asyncdist.store import AsyncStore

_PARTS = ("asyncdist/", "world-of/", "/member/")
"""One of them is in each key that may hold a record."""
_READ = 1.0
"""Seconds to read a key that may have been deleted."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 0.5


@dataclass
class PublishedWorld:
    """A world as its records describe it. ``ports`` are host and port of each rank's status port, by rank."""

    world_id: str
    world_size: int
    token: str | None
    ports: dict[int, tuple[str, int]] = field(default_factory=dict)


def status_security(
    world_id: str, token: str | None, contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None
) -> Security:
    """Return the settings of the connections to the status ports of a world.

    The proof of the token is bound to the world: with one token for several jobs, a viewer that has found one of them
    cannot ask another.
    """
    return Security(token, f"status port of world {world_id}", *(contexts or (None, None)))


def meeting_point(job: str) -> InitMethod:
    """Return the meeting point that the argument of ``asyncdist top`` names. Raises UsageError."""
    url = job if "://" in job else f"tcp://{job}"
    return InitMethod.read(url, rank=0, world_size=1, has_store=False, launch=Launch.from_environment())


async def find_worlds(method: InitMethod, config: Config, timeout: float) -> list[PublishedWorld]:
    """Return the worlds of a job, those with the most ports first; empty if the store has none.

    Raises:
        StoreConnectionError: No store answers within ``timeout`` seconds.
        AuthenticationError: The store does not accept the token.
        RendezvousError: The server there is neither an asyncdist store nor one of torch's.
    """
    worlds: dict[str, PublishedWorld] = {}
    for value in await _values(method, config, timeout):
        record = AddressRecord.decode(value)
        if record is not None and record.status:
            token = record.token if record.token is not None else config.token
            world = worlds.setdefault(record.world_id, PublishedWorld(record.world_id, record.world_size, token))
            world.ports.update({rank: (host, port) for rank, host, port in record.status})
    # Of worlds of equal size the one published last comes first.
    return sorted(worlds.values(), key=lambda world: len(world.ports))[::-1]


async def wait_for_worlds(method: InitMethod, config: Config, timeout: float) -> list[PublishedWorld]:
    """Return the worlds of a job as soon as there is one. Raises RendezvousError after ``timeout`` seconds."""
    deadline = Deadline.after(timeout)
    async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, deadline):
        worlds = await find_worlds(method, config, max(deadline.remaining(), _READ))
        if worlds:
            return worlds
    raise RendezvousError(
        f"no rank has published a status port at {described(method)} within {timeout:g} s: check that the job has begun, "
        "that its name is right, and that its ranks run with this version and without ASYNCDIST_STATUS=0 (processes that "
        "only call objects of asyncdist.rpc, or exchange asyncdist.weights, are no ranks)"
    )


def described(method: InitMethod) -> str:
    if method.kind == "file":
        return f"file://{method.path}"
    return f"{method.host}:{method.port}" + (f", job {method.path!r}" if method.path else "")


async def _values(method: InitMethod, config: Config, timeout: float) -> list[bytes]:
    values = []
    if method.kind == "file":
        refusal = None
        for path in _files(Path(method.path)):
            try:
                values.append(read_record_file(path))
            except AddressError as error:  # a folder may hold records of other users
                refusal = error
            except OSError:
                pass
        if refusal is not None and not values:
            raise refusal
        return values
    limit = TimeLimit(timeout, Deadline.after(timeout))
    store = await connect_natively(method, config, limit)
    if store is None:
        return await run_in_daemon_thread(functools.partial(_torch_values, method, timeout))
    try:
        for key in await _keys(store, _prefixes(method)):
            # The key may have been deleted.
            with contextlib.suppress(StoreError):
                values.append(await store.get(key, timeout=_READ))
    finally:
        await store.close()
    return values


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return sorted(path.glob("asyncdist*.json"))
    return [each for each in sorted(path.parent.glob(f"{path.name}*")) if each.name[len(path.name) :][:1] in ("", ".")]


def _prefixes(method: InitMethod) -> tuple[str, ...]:
    job = quote(method.path, safe="")
    return (f"asyncdist/{job}/", f"{job}/", f"elastic/{job}/member/") if job else ("",)


async def _keys(store: AsyncStore, prefixes: Sequence[str]) -> list[str]:
    keys = dict.fromkeys([key for prefix in prefixes for key in await store.list_keys(prefix)])
    return [key for key in keys if any(part in key for part in _PARTS)]


def _torch_values(method: InitMethod, timeout: float) -> list[bytes]:
    """Return the values of torch's store, which has no authentication: it holds the token that rank 0 has generated."""
    if method.path:
        raise UsageError(
            f"{method.host}:{method.port} serves torch's own TCPStore, which knows no jobs: leave out /{method.path}"
        )
    try:
        store: Any = torch_client(method.host, method.port, timeout)
        keys = [key.removeprefix("/") for key in store.list_keys()]
        return [bytes(store.get(key)) for key in keys if any(part in key for part in _PARTS)]
    except RuntimeError as error:  # torch's stores raise RuntimeError and subclasses
        raise RendezvousError(
            f"cannot read torch's store at {method.host}:{method.port}: {first_line(error)}; check that the job runs"
        ) from error
