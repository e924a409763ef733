"""A world: the ranks of one job after the rendezvous, their connections, and the group of all ranks.

`open_world` performs every step from an init method to a usable group. A process may hold several independent worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgpack

from asyncdist.algorithms.selection import forced_by
from asyncdist.base.backoff import Backoff
from asyncdist.base.deadline import Deadline, Timeout, seconds
from asyncdist.base.version import VERSION
from asyncdist.collectives.arguments import checked_text, list_of, whole_number_of
from asyncdist.config import Config, Launch, shared_settings
from asyncdist.engine.endpoint import LAST_WORDS, Endpoint
from asyncdist.errors import NotInitializedError, RendezvousError, UsageError
from asyncdist.groups import task_factory
from asyncdist.groups.dropped_works import DebugGroup
from asyncdist.groups.group import Group
from asyncdist.rendezvous import RendezvousSession, meet
from asyncdist.tracing import dump_signal
from asyncdist.transport import registry

_FIRST_PAUSE, _LONGEST_PAUSE = 1e-3, 8e-3
"""Seconds between two checks whether every failure notice has been sent."""


class World:
    """The ranks of one job, or of one part of it.

    Attributes:
        group: The group of all ranks of the world.
        groups: The open groups that this rank has made and is a member of.
    """

    def __init__(
        self,
        meeting: RendezvousSession,
        mesh: Endpoint,
        name: str,
        timeout: float,
        user_loop: asyncio.AbstractEventLoop | None = None,
        group_class: type[Group] = Group,
    ) -> None:
        self.meeting = meeting
        self.mesh = mesh
        self.name = name
        self.timeout = timeout
        self.groups: list[Group] = []
        self._left = False
        self._group_class = group_class
        self._made: dict[tuple[Any, ...], itertools.count[int]] = {}
        group = self.new_group(range(mesh.world_size), name or "world")
        assert group is not None
        self.group = group
        self._user_loop = user_loop
        self._task_factory = None if user_loop is None else task_factory.install(user_loop)

    def new_group(self, ranks: Sequence[int] | None, name: str | None = None, timeout: Timeout = None) -> Group | None:
        """Make a group of some of the world's ranks, without communication.

        The members match equal calls by their order: all of them make groups of the same name and ranks equally often.

        Args:
            ranks: Global ranks of the members, in group order; None means all ranks.
            name: Name in error messages and traces.
            timeout: Default limit of the group's operations, in seconds or as a timedelta; None takes the world's.

        Returns:
            The group, or None on a rank that is not a member.

        Raises:
            NotInitializedError: This rank has left the world.
            UsageError: ``ranks`` is empty, repeats a rank, or names a rank outside the world.
        """
        if self._left:
            raise NotInitializedError(
                "this rank has left the world that the group would belong to: make a new world first"
            )
        members = tuple(range(self.mesh.world_size))
        if ranks is not None:
            members = tuple(whole_number_of("a rank", rank) for rank in list_of("ranks", ranks, "global ranks"))
        checked_text("the name of a group", name, "'losses'")
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
        group = self._group_class(self.mesh, members, shown, limit, nonce=nonce, world=self)
        self.groups.append(group)
        return group

    def leave(self) -> None:
        """Destroy every group and close the connections to the peers. Idempotent.

        Call it on the world's own event loop or on a thread without a loop. A thread without a loop waits until the
        peers have received pending failure notices; on the loop, `close` does that.
        """
        self._left = True
        loop, factory, self._task_factory = self._user_loop, self._task_factory, None
        if loop is not None and factory is not None:
            task_factory.remove(loop, factory)
        for group in list(self.groups):
            group.close()
        self.mesh.close()

    def forget(self, group: Group) -> None:
        """Drop the reference to a destroyed group, so that its memory can be freed."""
        # A group that was made directly is not listed, and another thread may have removed this one.
        with contextlib.suppress(ValueError):
            self.groups.remove(group)

    async def close(self) -> None:
        """Disconnect from the peers and then from the store. Idempotent; runs on the loop that opened the world."""
        try:
            flushed = self.mesh.notices_flushed()
            async for _ in Backoff(_FIRST_PAUSE, _LONGEST_PAUSE, Deadline.after(LAST_WORDS)):
                if flushed.is_completed():
                    break
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
    reports_dropped_works: bool = False,
) -> Coroutine[Any, Any, World]:
    """Return a coroutine that joins the other ranks and exchanges addresses with them.

    Args:
        backend: Names of the transports; None takes the configured ones.
        init_method: URL of the rendezvous; None means ``env://``.
        timeout: Limit of the rendezvous and default limit of every operation, in seconds or as a timedelta.
        world_size: Number of ranks; -1 takes it from ``init_method``.
        rank: Rank of this process; -1 takes it from ``init_method``.
        store: Store to join through instead of ``init_method``.
        name: Name of the group of all ranks.
        config: Settings; None reads them from the environment.
        home: Event loop that drives pending operations; None takes the loop of the runtime.
        reports_dropped_works: Report works that the program drops without waiting, with ``ASYNCDIST_DEBUG=1`` and if the
            calling thread's event loop is in debug mode. Only for callers that pass all works to the user's program.

    Returns:
        A coroutine whose result is the world.

    Raises:
        RendezvousError: A rank is missing or runs with another version or other settings.
        AuthenticationError: A rank does not hold the token of the job.
        TransportUnavailableError: A transport in ``backend`` does not work on this machine.
        UsageError: The arguments contradict each other.
    """
    checked_text("backend", backend, "'shm,tcp' or 'auto'")
    checked_text("init_method", init_method, "'tcp://host:port'")
    checked_text("group_name", name, "'world'")
    rank, world_size = whole_number_of("rank", rank), whole_number_of("world_size", world_size)
    if store is not None and not (
        callable(getattr(store, "get", None)) and callable(getattr(store, "compare_set", None))
    ):
        raise UsageError(f"store is a store such as asyncdist.TCPStore, not {store!r}: pass an address as init_method=")
    config = config or Config.from_environment()
    # Python installs signal handlers on the main thread only. The caller may run on it; the loop may not.
    dump_signal.install_signal_handler(config)
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
    user_loop = home or asyncio._get_running_loop()
    debug = reports_dropped_works and (config.debug or (user_loop is not None and user_loop.get_debug()))
    make_world = functools.partial(
        World, name=name, timeout=limit, user_loop=user_loop, group_class=DebugGroup if debug else Group
    )
    return _open(meeting, backend, make_world, config, home)


async def _open(
    meet_others: Callable[[], Awaitable[RendezvousSession]],
    backend: str | None,
    make_world: Callable[[RendezvousSession, Endpoint], World],
    config: Config,
    home: asyncio.AbstractEventLoop | None,
) -> World:
    # This raises for an impossible setting before the rendezvous.
    forced_by(config)
    kinds = registry.selected(backend) if backend else registry.set_by(config)
    meeting = await meet_others()
    try:
        config = config.with_(token=meeting.token)
        mesh = Endpoint(
            meeting.rank, meeting.world_size, meeting.world_id, config, kinds, home, backend or config.transport
        )
        dump_signal.offer(mesh.recorder, config)
        try:
            own = {
                "addresses": mesh.listen(meeting.listen_host),
                "version": VERSION,
                "settings": shared_settings(config),
            }
            ranks = [msgpack.unpackb(payload) for payload in await meeting.exchange(msgpack.packb(own), more=True)]
            _compare(ranks, meeting.rank)
            probes = mesh.probe_peers([rank["addresses"] for rank in ranks], meeting.remaining())
            reached = await meeting.before_exchange(probes)
            mesh.finalize([msgpack.unpackb(each) for each in await meeting.exchange(msgpack.packb(reached))])
            return make_world(meeting, mesh)
        except BaseException:
            mesh.close()
            raise
    except BaseException:
        await meeting.close()
        raise


def _compare(ranks: Sequence[dict[str, Any]], rank: int) -> None:
    """Raise RendezvousError if the version or settings of a rank differ from this rank's: schedules would not match."""
    own = ranks[rank]
    for peer, other in enumerate(ranks):
        if other["version"] != own["version"]:
            raise RendezvousError(
                f"rank {peer} runs asyncdist {other['version']}, but rank {rank} asyncdist {own['version']}; "
                "install the same version for every rank"
            )
        for variable, value in other["settings"].items():
            if value != own["settings"][variable]:
                raise RendezvousError(
                    f"rank {peer} runs with {variable}={value!r}, but rank {rank} with {own['settings'][variable]!r}; "
                    "start every rank with the same ASYNCDIST_ settings"
                )
