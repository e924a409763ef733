"""The introductions of the ranks of a world at the start, combined along the tree of `RendezvousSession.combine`.

The first rank of each block of ranks makes a *page* of the addresses of the block, and notes for each machine what only the
ranks of that machine need. A rank reads the notes of its machine, and all pages; in a world of more than `MOST_EAGER`
ranks only those of its `neighbours`, and each of the others when it first dials one of its ranks (`pages`). Version and
settings are compared by their digests.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncdist.base.release import VERSION
from asyncdist.config import Config, shared_settings
from asyncdist.errors import RendezvousError, StoreError
from asyncdist.groups.calibration.measurement import first_of_hosts
from asyncdist.kernel.algorithms.sharing import Sharing
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.net.network import machine_name
from asyncdist.net.process_identity import process_identity
from asyncdist.rendezvous import RendezvousSession, Summary, session
from asyncdist.rendezvous.pages import HOSTS, PAGES, Pages, neighbours, packed, page_name, unpacked

MOST_EAGER = 1024
"""The ranks of a world up to which each of them reads all pages at the start."""
_MOST_SECONDS = 10.0
"""Seconds within which a rank whose settings differ tells them."""
_MOST_DIFFERENT = 8
"""The number of digests of settings, and of hosts, that a summary names."""


@dataclass(frozen=True, slots=True)
class Introductions:
    """What a rank knows of the others.

    Attributes:
        pages: What each rank has published for all.
        machine: The values that the ranks of this machine have published for each other, by rank: their process, and
            their addresses by transport.
        offered: The names of the transports that reach other machines, and whether all ranks have them.
        profile: The values of the first rank that has read a profile.
        hosts: The first ranks of some hosts: more than one if there are several hosts. In a small world those of all hosts.
    """

    pages: Pages
    machine: Mapping[int, tuple[Mapping[str, Any] | None, Mapping[str, Any]]]
    offered: Mapping[str, bool]
    profile: Any
    hosts: Sequence[int]


async def introduce(
    meeting: RendezvousSession, endpoint: Endpoint, config: Config, *, status: Any, profile: Any
) -> Introductions:
    """Introduce this rank to the others, with the address of its status port and the profile that it has read.

    Raises RendezvousError, also if version or settings of another rank differ: schedules would not match.
    """
    rank, machine = meeting.rank, machine_name()
    everywhere, here = endpoint.listen(meeting.listen_host)
    process, agreed = process_identity(config.host), compared(config)
    host = _digest(f"rank {rank}" if process is None else process["host"])
    digest = _digest(agreed)
    own = {
        "digests": [[digest, rank]], "offered": dict.fromkeys(everywhere, True), "hosts": [[host, rank]],
        "profile": profile, "entry": [everywhere, status, host], "machine": machine, "here": [rank, process, here],
    }  # fmt: skip
    size = meeting.world_size
    is_large = size > max(MOST_EAGER, session.BLOCK)
    names = [page_name(block) for block in neighbours(rank, size)] if is_large else [PAGES]
    found, notes = await meeting.combine(own, _Introduced(is_large), notes=[machine, *names], more=True)
    others = [first for other, first in found["digests"] if other != digest]
    if others:
        raise await difference(meeting, agreed, others[0])
    near = {peer: (_shared(process), here) for note in notes[machine] for peer, process, here in unpacked(note)}
    held = dict(msgpack.unpackb(page) for name in names for page in notes[name])
    pages = Pages(meeting, held)
    hosts = [first for _, first in found["hosts"]]
    if len(hosts) == _MOST_DIFFERENT and not is_large:
        hosts = first_of_hosts(pages.column(HOSTS))
    return Introductions(pages, near, found["offered"], found["profile"], hosts)


async def share_reached(
    meeting: RendezvousSession, reached: Mapping[str, Iterable[int]], *, more: bool
) -> dict[str, Sharing]:
    """Tell the others which ranks this one has reached, by transport; return what all have reached."""
    own = {name: Sharing.of(meeting.rank, peers).packed() for name, peers in reached.items()}
    found, _ = await meeting.combine(own, _Reached(), more=more)
    return {name: Sharing.unpacked(data) for name, data in found.items()}


class _Introduced(Summary):
    """Combines introductions. In a large world each page has a name of its own."""

    def __init__(self, is_large: bool) -> None:
        self._is_large = is_large

    def merge(self, parts: Sequence[Any]) -> dict[str, Any]:
        def several(name: str) -> Iterable[Any]:
            return itertools.chain.from_iterable(part[name] for part in parts)

        def first_of(name: str) -> list[tuple[Any, int]]:
            first: dict[Any, int] = {}
            for value, rank in several(name):
                first.setdefault(value, rank)
            return list(first.items())[:_MOST_DIFFERENT]

        return {
            "digests": first_of("digests"),
            "offered": {name: all(part["offered"].get(name) for part in parts) for name in several("offered")},
            "hosts": first_of("hosts"),
            "profile": next((part["profile"] for part in parts if part["profile"] is not None), None),
        }

    def notes(self, first: int, payloads: Sequence[Any]) -> dict[str, bytes]:
        machines: dict[str, list[Any]] = {}
        for each in payloads:
            machines.setdefault(each["machine"], []).append(each["here"])
        block = first // session.BLOCK
        page = msgpack.packb([block, packed([msgpack.packb(each["entry"]) for each in payloads])])
        name = page_name(block) if self._is_large else PAGES
        return {name: page} | {machine: packed(ranks) for machine, ranks in machines.items()}


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


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(msgpack.packb(data), digest_size=8).digest()


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
