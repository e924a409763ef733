"""The introductions of the ranks of a world at the start, combined along the tree of `RendezvousSession.combine`.

The first rank of each block of ranks makes a *page* of the addresses of the block, and notes for each machine what only the
ranks of that machine need. A rank reads the pages and the notes of its machine. Version and settings are compared by their
digests.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncdist.base.release import VERSION
from asyncdist.config import Config, shared_settings
from asyncdist.errors import RendezvousError, StoreError
from asyncdist.kernel.algorithms.sharing import Sharing
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.net.network import machine_name
from asyncdist.net.process_identity import process_identity
from asyncdist.rendezvous import BLOCK, RendezvousSession, Summary

_PAGES = "pages of all ranks"
"""The name of the note with the pages. No machine is named so."""
_MOST_SECONDS = 10.0
"""Seconds within which a rank whose settings differ tells them."""
_MOST_DIFFERENT = 8
"""The number of digests of settings, and of hosts, that a summary names."""


ADDRESSES, STATUS_PORTS, HOSTS = range(3)
"""The values that each rank publishes for all: its addresses by transport, its status port, and its host."""


class Column(Sequence[Any]):
    """One of the values that each rank has published for all, by rank.

    Args:
        size: The number of ranks.
        entries_of: Returns the packed values of the ranks of a page.
        number: Which of the values: `ADDRESSES`, `STATUS_PORTS` or `HOSTS`.
    """

    def __init__(self, size: int, entries_of: Callable[[int], list[bytes]], number: int) -> None:
        self._size, self._entries_of, self._number = size, entries_of, number

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self._size:
            raise IndexError(rank)
        return msgpack.unpackb(self._entries_of(rank // BLOCK)[rank % BLOCK])[self._number]


@dataclass(frozen=True, slots=True)
class Introductions:
    """What a rank knows of the others.

    Attributes:
        column: Returns one of the values that each rank has published for all, by rank.
        machine: The values that the ranks of this machine have published for each other, by rank: their process, and
            their addresses by transport.
        offered: The names of the transports that reach other machines.
        profile: The values of the first rank that has read a profile.
        hosts: Some of the hosts: more than one if the ranks are on several.
    """

    column: Callable[[int], Column]
    machine: Mapping[int, tuple[Mapping[str, Any] | None, Mapping[str, Any]]]
    offered: frozenset[str]
    profile: Any
    hosts: Sequence[str]


async def introduce(
    meeting: RendezvousSession, endpoint: Endpoint, config: Config, *, status: Any, profile: Any
) -> Introductions:
    """Introduce this rank to the others, with the address of its status port and the profile that it has read.

    Raises RendezvousError, also if version or settings of another rank differ: schedules would not match.
    """
    rank, machine = meeting.rank, machine_name()
    everywhere, here = endpoint.listen(meeting.listen_host)
    process, agreed = process_identity(config.host), compared(config)
    host = f"rank {rank}" if process is None else process["host"]
    digest = hashlib.blake2b(msgpack.packb(agreed), digest_size=8).digest()
    own = {
        "digests": [[digest, rank]], "offered": list(everywhere), "hosts": [host], "profile": profile,
        "entry": [everywhere, status, host], "machine": machine, "here": [rank, process, here],
    }  # fmt: skip
    found, notes = await meeting.combine(own, _Introduced(), notes=[machine, _PAGES], more=True)
    others = [first for other, first in found["digests"] if other != digest]
    if others:
        raise await difference(meeting, agreed, others[0])
    neighbours = {peer: (_shared(process), here) for note in notes[machine] for peer, process, here in _unpacked(note)}
    pages = [page for _, page in sorted(map(msgpack.unpackb, notes[_PAGES]))]
    # Most readers go through the ranks in order, so the page that was read last is kept.
    entries_of = functools.lru_cache(maxsize=1)(lambda number: _unpacked(pages[number]))
    column = functools.partial(Column, meeting.world_size, entries_of)
    return Introductions(column, neighbours, frozenset(found["offered"]), found["profile"], found["hosts"])


async def share_reached(
    meeting: RendezvousSession, reached: Mapping[str, Iterable[int]], *, more: bool
) -> dict[str, Sharing]:
    """Tell the others which ranks this one has reached, by transport; return what all have reached."""
    own = {name: Sharing.of(meeting.rank, peers).packed() for name, peers in reached.items()}
    found, _ = await meeting.combine(own, _Reached(), more=more)
    return {name: Sharing.unpacked(data) for name, data in found.items()}


class _Introduced(Summary):
    """Combines introductions."""

    def merge(self, parts: Sequence[Any]) -> dict[str, Any]:
        def several(name: str) -> Iterable[Any]:
            return itertools.chain.from_iterable(part[name] for part in parts)

        digests: dict[bytes, int] = {}
        for digest, rank in several("digests"):
            digests.setdefault(digest, rank)
        return {
            "digests": list(digests.items())[:_MOST_DIFFERENT],
            "offered": list(dict.fromkeys(several("offered"))),
            "hosts": list(dict.fromkeys(several("hosts")))[:_MOST_DIFFERENT],
            "profile": next((part["profile"] for part in parts if part["profile"] is not None), None),
        }

    def notes(self, first: int, payloads: Sequence[Any]) -> dict[str, bytes]:
        machines: dict[str, list[Any]] = {}
        for each in payloads:
            machines.setdefault(each["machine"], []).append(each["here"])
        page = _packed([msgpack.packb(each["entry"]) for each in payloads])
        return {_PAGES: msgpack.packb([first, page])} | {name: _packed(ranks) for name, ranks in machines.items()}


class _Reached(Summary):
    """Combines which ranks have reached which, by transport."""

    def merge(self, parts: Sequence[Any]) -> dict[str, Any]:
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: self._joined(parts, name).packed() for name in names}

    @staticmethod
    def _joined(parts: Iterable[Mapping[str, Any]], name: str) -> Sharing:
        return Sharing.joined(Sharing.unpacked(part[name]) for part in parts if name in part)


def compared(config: Config) -> dict[str, Any]:
    """Return what must be equal on every rank."""
    return {"version": VERSION, "settings": shared_settings(config)}


def _shared(process: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the identity of a process, with one copy of the texts that all processes of a machine have."""
    if process is not None:
        process.update(host=sys.intern(process["host"]), pids=sys.intern(process["pids"]))
    return process


async def difference(meeting: RendezvousSession, own: Mapping[str, Any], peer: int) -> RendezvousError:
    """Say what differs from another rank, which finds a difference too."""
    rank = meeting.rank
    try:
        await meeting.store.set(f"compared/{rank}", msgpack.packb(own))
        other = msgpack.unpackb(await meeting.store.get(f"compared/{peer}", timeout=_MOST_SECONDS))
    except StoreError:
        return RendezvousError(
            f"rank {peer} runs with another version or other settings than rank {rank}, and has ended before it told them; "
            "read its log first"
        )
    if other["version"] != own["version"]:
        return RendezvousError(
            f"rank {peer} runs asyncdist {other['version']}, but rank {rank} asyncdist {own['version']}; "
            "install the same version for every rank"
        )
    variable = next(name for name, value in other["settings"].items() if value != own["settings"][name])
    return RendezvousError(
        f"rank {peer} runs with {variable}={other['settings'][variable]!r}, but rank {rank} with "
        f"{own['settings'][variable]!r}; start every rank with the same ASYNCDIST_ settings"
    )


def _packed(data: Any) -> bytes:
    return zlib.compress(msgpack.packb(data), 1)


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(zlib.decompress(data))
