"""A world: ranks that have found each other, the mesh between them, and the group of all.

`open_world` is the whole way from an init method to a working group. Worlds are independent of each other; a process
may hold several.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

import msgpack

from asyncdist.algorithms.selection import forced_by
from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.version import VERSION
from asyncdist.config import Config, Launch, shared_settings
from asyncdist.engine.endpoint import LAST_WORDS, Endpoint
from asyncdist.errors import NotInitializedError, RendezvousError, UsageError
from asyncdist.groups.group import Group
from asyncdist.rendezvous import RendezvousSession, meet
from asyncdist.tracing import dump_signal
from asyncdist.transport import registry

_PAUSE = 1e-3
"""Seconds between two checks whether every failure notice has been sent."""


class World:
    """The ranks of one job, or of one part of it. ``group`` is the group of all."""

    def __init__(self, meeting: RendezvousSession, mesh: Endpoint, name: str, timeout: float) -> None:
        self.meeting = meeting
        self.mesh = mesh
        self.name = name
        self.timeout = timeout
        self.groups: list[Group] = []
        self._left = False
        self._made: dict[tuple[Any, ...], itertools.count[int]] = {}
        everyone = self.new_group(range(mesh.world_size), name or "world")
        assert everyone is not None
        self.group = everyone

    def new_group(self, ranks: Sequence[int] | None, name: str | None = None, timeout: Timeout = None) -> Group | None:
        """Make a group of some of the world's ranks; None on ranks that are not in it. Involves no communication.

        Members make their groups with the same ranks equally often; that is how they agree on which is which.
        """
        if self._left:
            raise NotInitializedError(
                "this rank has left the world that the group would stand on: make a new world first"
            )
        members = tuple(range(self.mesh.world_size) if ranks is None else ranks)
        outside = [rank for rank in members if not 0 <= rank < self.mesh.world_size]
        if not members or outside or len(set(members)) != len(members):
            raise UsageError(
                f"ranks={list(members)} is not a group: it needs distinct ranks from 0 to {self.mesh.world_size - 1}"
            )
        nonce = next(self._made.setdefault((name, members), itertools.count()))
        if self.mesh.rank not in members:
            return None
        shown = name or f"group of ranks {list(members)}" + (f" ({nonce + 1})" if nonce else "")
        limit = seconds(timeout, self.timeout)
        group = Group(self.mesh, members, shown, limit, nonce=nonce)
        group.world = self
        self.groups.append(group)
        return group

    def leave(self) -> None:
        """Destroy every group and say goodbye to the peers. Idempotent; not on a loop other than the home one.

        Peers who are still to be told of a failure are waited for, but not on that loop: see `close`.
        """
        self._left = True
        for group in list(self.groups):
            group.close()
        self.mesh.close()

    def forget(self, group: Group) -> None:
        """Keep a destroyed group no longer: who makes and destroys groups all the time would fill the memory."""
        with contextlib.suppress(ValueError):  # made by hand, or forgotten by another thread
            self.groups.remove(group)

    async def close(self) -> None:
        """Leave the peers, and then the store, on the loop where the world was opened. Idempotent."""
        try:
            told, until = self.mesh.notices_flushed(), monotonic() + LAST_WORDS
            while not told.is_completed() and monotonic() < until:  # noqa: ASYNC110 - no event reports it, and it is rare
                await asyncio.sleep(_PAUSE)
        finally:
            self.leave()
        if not self.mesh.of_parent:
            await self.meeting.close()


def open_world(
    *,
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    name: str = "",
    config: Config | None = None,
    home: asyncio.AbstractEventLoop | None = None,
) -> Coroutine[Any, Any, World]:
    """Meet the other ranks, and return the world once all are there and know each other's addresses. To be awaited.

    ``timeout`` limits this and is the default of every operation. ``home`` is the loop that drives pending operations;
    None takes the runtime's. Raises RendezvousError, AuthenticationError, TransportUnavailableError, UsageError.
    """
    config = config or Config.from_environment()
    dump_signal.install_signal_handler(
        config
    )  # on the caller's thread, which may be the main one; the loop's is not always
    limit = seconds(timeout, config.timeout)
    meeting = functools.partial(
        meet,
        init_method,
        rank=rank,
        world_size=world_size,
        store=store,
        timeout=limit,
        name=name,
        config=config,
        launch=Launch.from_environment(),
    )
    return _open(meeting, backend, name, limit, config, home)


async def _open(
    meet_others: Callable[[], Awaitable[RendezvousSession]],
    backend: str | None,
    name: str,
    limit: float,
    config: Config,
    home: asyncio.AbstractEventLoop | None,
) -> World:
    forced_by(config)  # raises for an impossible setting before the rendezvous
    kinds = registry.selected(backend) if backend else registry.set_by(config)
    meeting = await meet_others()
    try:
        config = config.with_(token=meeting.token)
        mesh = Endpoint(meeting.rank, meeting.world_size, meeting.world_id, config, kinds, home)
        mesh.backend = backend or config.transport
        dump_signal.offer(mesh.recorder, config)
        try:
            runs = {"version": VERSION, "settings": shared_settings(config)}
            ours = {"addresses": mesh.listen(meeting.listen_host), **runs}
            everyone = [msgpack.unpackb(payload) for payload in await meeting.exchange(msgpack.packb(ours), more=True)]
            _compare(everyone, meeting.rank)
            settling = mesh.probe_peers([one["addresses"] for one in everyone], meeting.remaining())
            reached = await meeting.before_exchange(settling)
            mesh.finalize([msgpack.unpackb(each) for each in await meeting.exchange(msgpack.packb(reached))])
            return World(meeting, mesh, name, limit)
        except BaseException:
            mesh.close()
            raise
    except BaseException:
        await meeting.close()
        raise


def _compare(everyone: Sequence[dict[str, Any]], rank: int) -> None:
    """Raise if the version or the settings of a rank differ from this rank's: their schedules would not match."""
    ours = everyone[rank]
    for peer, theirs in enumerate(everyone):
        if theirs["version"] != ours["version"]:
            raise RendezvousError(
                f"rank {peer} runs asyncdist {theirs['version']}, but rank {rank} asyncdist {ours['version']}; "
                "install the same version for every rank"
            )
        for variable, value in theirs["settings"].items():
            if value != ours["settings"][variable]:
                raise RendezvousError(
                    f"rank {peer} runs with {variable}={value!r}, but rank {rank} with {ours['settings'][variable]!r}; "
                    "start every rank with the same ASYNCDIST_ settings"
                )
