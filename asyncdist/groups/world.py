"""A world: the ranks of one job after the rendezvous, their connections, and the group of all ranks.

`open_world` performs every step from an init method to a usable group. A process may hold several independent worlds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.base.descriptors import naming_exhaustion
from asyncdist.base.interrupts import shorten_interrupts
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import AsyncdistError, NotInitializedError, UsageError
from asyncdist.errors import ranks as ranks_as_text
from asyncdist.groups import task_factory
from asyncdist.groups.calibration import measurement, profile
from asyncdist.groups.dropped_works import DebugGroup
from asyncdist.groups.group import Group
from asyncdist.groups.introductions import introduce, share_reached
from asyncdist.groups.subgroups import NonMember
from asyncdist.kernel.algorithms.selection import forced_by
from asyncdist.kernel.collectives.arguments import checked_text, whole_number_of
from asyncdist.kernel.engine.control_messages import last_words
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.tracing import dump_signal
from asyncdist.kernel.tracing.metrics import serve_configured_metrics
from asyncdist.kernel.tracing.stacks import watch_tasks
from asyncdist.kernel.transport import registry
from asyncdist.kernel.transport.base import Transport
from asyncdist.rendezvous import Listed, RendezvousSession, meet
from asyncdist.rendezvous.pages import ADDRESSES, HOSTS, STATUS_PORTS, Pages
from asyncdist.status.port import StatusPort

log = logging.getLogger("asyncdist")


class World(ProcessBound):
    """The ranks of one job, or of one part of it.

    Attributes:
        group: The group of all ranks of the world.
        groups: The open groups that this rank has made and is a member of.
    """

    _elsewhere = "each process makes its own with init_process_group() and new_group(): send the ranks instead"

    def __init__(
        self,
        meeting: RendezvousSession,
        endpoint: Endpoint,
        name: str,
        timeout: float,
        user_loop: asyncio.AbstractEventLoop | None = None,
        group_class: type[Group] = Group,
        status_port: StatusPort | None = None,
    ) -> None:
        self.meeting = meeting
        self.status_port = status_port
        self.endpoint = endpoint
        self.name = name
        self.timeout = timeout
        self.groups: list[Group] = []
        self._left = False
        self._group_class = group_class
        self._made: dict[tuple[Any, ...], itertools.count[int]] = {}
        self.group = self.group_of_members(range(endpoint.world_size), name or "world")
        self._user_loop = user_loop
        self._task_factory = None if user_loop is None else task_factory.install(user_loop)
        if user_loop is not None:
            watch_tasks(user_loop)

    def describe(self) -> dict[str, Any]:
        """Return what ``asyncdist top`` shows of the default group. Any thread may call it."""
        group = self.group
        return {"name": self.name, "generation": group.generation, "members": list(group.member_ids)}

    def status_record(self) -> bytes:
        """Return the record with which ``asyncdist top`` finds this rank; empty without a status port."""
        if self.status_port is None:
            return b""
        return self.meeting.status_record([(self.endpoint.rank, *self.status_port.address)]).encode()

    def new_group(self, ranks: Sequence[int] | None, name: str | None = None, timeout: Timeout = None) -> Group | None:
        """Make a group of some of the world's ranks, in the order of ``ranks``; None on the other ranks.

        See `Group.new_group`.
        """
        made = self.group.new_group(ranks, timeout, name, sort_ranks=False)
        return None if isinstance(made, NonMember) else made

    def subgroup(self, parent: Group, ranks: Sequence[int], timeout: Timeout, name: str | None) -> Group | None:
        """Make the group of some ranks of another group, in this order; None on the other ranks.

        Its name is unique on each rank and equal on all members: dumps and traces tell groups apart by their names.

        Raises:
            NotInitializedError: This rank has left the world.
            UsageError: ``ranks`` is empty, repeats a rank, or names a rank outside the group.
        """
        checked_text("the name of a group", name, "'losses'")
        size = parent.size()
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise UsageError(f"ranks={list(ranks)} is not a group: it needs distinct ranks from 0 to {size - 1}")
        chosen = tuple(parent.member_ids[rank] for rank in ranks)
        members = tuple(parent.ranks[rank] for rank in ranks)
        listed = list(members)
        part = f"rank{'s' * (len(listed) > 1)} {ranks_as_text(listed) if listed == sorted(listed) else listed}"
        if parent is not self.group or parent.generation:
            part += f" of {parent.name!r}"
        elif len(members) == size and name:
            part = ""
        shown = f"group of {part}" if not name else f"{name} ({part})" if part else name
        # Each generation counts afresh: the members of the last one may have come to different places in the program.
        return self._make(members, chosen, shown, timeout, parent.channel.number)

    def group_of_members(self, member_ids: Sequence[int], name: str, timeout: Timeout = None) -> Group:
        """Make a group of members of the world by their ids, without communication; see `Group.new_group`.

        Its global ranks are its group ranks: it is meant to replace another group, or to stand alone.

        Args:
            member_ids: The ids of the members, in group order; this rank's is among them.
            name: Name in error messages and traces. Members match their calls by it.
            timeout: Default limit of the group's operations.
        """
        chosen, members = tuple(member_ids), tuple(range(len(member_ids)))
        # The group of the whole world keeps one tuple: each has 40 bytes for a rank.
        group = self._make(members, members if chosen == members else chosen, name, timeout)
        assert group is not None, "this rank is not a member"
        return group

    def _make(
        self, members: tuple[int, ...], chosen: tuple[int, ...], name: str, timeout: Timeout, parent: int = 0
    ) -> Group | None:
        """Make the group of the ids ``chosen``, whose global ranks are ``members``; None on the other ranks.

        ``parent`` is the number of the channel of the group that it is a part of; 0 without one.
        """
        self.refuse_left()
        count = next(self._made.setdefault((parent, name, chosen), itertools.count()))
        if self.endpoint.rank not in chosen:
            return None
        shown = f"{name} ({count + 1})" if count else name
        limit, nonce = seconds(timeout, self.timeout), (parent, count)
        group = self._group_class(self.endpoint, members, shown, limit, member_ids=chosen, nonce=nonce, world=self)
        self.groups.append(group)
        return group

    def refuse_left(self) -> None:
        """Raise NotInitializedError if this rank has left the world."""
        if self._left:
            raise NotInitializedError(
                "this rank has left the world that the group would belong to: make a new world first"
            )

    def succeed(self, group: Group, successor: Group) -> None:
        """Put the successor of a group in its place."""
        if successor not in self.groups:
            self.groups.append(successor)
        if self.group is group:
            self.group = successor

    def leave(self) -> None:
        """Destroy every group and close the connections to the peers. Idempotent.

        Call it on the world's own event loop or on a thread without a loop. A thread without a loop waits until the
        peers have received pending failure notices; on the loop, `close` does that.
        """
        self._left = True
        if self.status_port is not None:
            self.status_port.close()
        loop, factory, self._task_factory = self._user_loop, self._task_factory, None
        if loop is not None and factory is not None:
            task_factory.remove(loop, factory)
        for group in list(self.groups):
            group.close()
        self.endpoint.close()

    def forget(self, group: Group) -> None:
        """Drop the reference to a destroyed group, so that its memory can be freed."""
        # A group that was made directly is not listed, and another thread may have removed this one.
        with contextlib.suppress(ValueError):
            self.groups.remove(group)

    async def close(self) -> None:
        """Disconnect from the peers and then from the store. Idempotent; runs on the loop that opened the world."""
        try:
            flushed = self.endpoint.notices_flushed()
            async for _ in last_words():
                if flushed.is_completed():
                    break
        finally:
            self.leave()
            if not self.endpoint.of_parent:
                await self.meeting.close()


def open_world(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    name: str = "",
    *,
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
        RendezvousError: A rank is missing, runs with another version or other settings, or has no free descriptor.
        AuthenticationError: A rank does not hold the token of the job.
        TransportUnavailableError: A transport in ``backend`` does not work on this machine.
        AddressError: The port of ``ASYNCDIST_METRICS_PORT`` is in use.
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
    shorten_interrupts()
    # This raises for an impossible setting before the rendezvous.
    forced_by(config)
    backend = registry.requested(backend, config)
    # A caller that imports the transports reuses its memory. The loop's thread would take 1 MiB more from the system.
    kinds = registry.selected(backend) if backend else registry.set_by(config)
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
    return _open(meeting, backend, kinds, make_world, config, home)


async def _open(
    meet_others: Callable[[], Awaitable[RendezvousSession]],
    backend: str | None,
    kinds: Sequence[type[Transport]],
    make_world: Callable[..., World],
    config: Config,
    home: asyncio.AbstractEventLoop | None,
) -> World:
    from_file = None if config.profile is None else profile.read_profile(config.profile)
    with naming_exhaustion():
        async with contextlib.AsyncExitStack() as undoing:
            meeting = await meet_others()
            undoing.push_async_callback(meeting.close)
            local_rank = Launch.from_environment().local_rank
            serve_configured_metrics(config, meeting.rank if local_rank is None else local_rank)
            config = config.with_(token=meeting.token)
            endpoint = Endpoint(
                meeting.rank, meeting.world_size, meeting.world_id, config, kinds, home, backend or config.transport
            )
            undoing.callback(endpoint.close)
            port: StatusPort | None = None
            if config.status:
                port = StatusPort(meeting.listen_host, config)
                undoing.callback(port.close)
            known = await introduce(meeting, endpoint, config, status=port and port.address, profile=from_file)
            pages = known.pages
            addresses, hosts = pages.column(ADDRESSES), pages.column(HOSTS)
            endpoint.know(addresses, hosts, known.machine, known.offered, pages)
            if len(known.hosts) <= 1:
                endpoint.model = replace(endpoint.model, cores=os.cpu_count() or 1)
            probes = endpoint.transport_selector.probe_peers(meeting.remaining())
            measures = known.profile is None and config.calibrate and len(known.hosts) > 1
            reached = await meeting.before_exchange(probes)
            endpoint.finalize(await share_reached(meeting, reached, more=measures))
            if measures:
                await _calibrate(endpoint, config, meeting, known.hosts)
            elif known.profile is not None:
                _use(endpoint, config, known.profile, profile.MODEL_FROM_PROFILE)
            world = make_world(meeting, endpoint, status_port=port)
            undoing.callback(world.leave)
            await _answer_status(world, pages)
            undoing.pop_all()
            return world


async def _calibrate(endpoint: Endpoint, config: Config, meeting: RendezvousSession, hosts: Sequence[int]) -> None:
    """Measure the links between hosts on their first ranks, and give every rank the same model."""
    found: profile.Values | None = None
    if meeting.rank in hosts:
        measuring = measurement.measure_links(endpoint, hosts, lanes=config.lanes == 0)
        found = await meeting.before_exchange(measuring)
    results, _ = await meeting.combine([found] if found else [], Listed())
    values = profile.combined(results)
    _use(endpoint, config, values, f"a measurement between {len(hosts)} hosts at the start")


def _use(endpoint: Endpoint, config: Config, values: profile.Values, source: str) -> None:
    """Let the groups of a rank use measured values, where no setting says otherwise."""
    endpoint.model = profile.model_of(endpoint.model, values, source)
    if config.lanes == 0:
        # The number of lanes must be equal on all ranks, which the use of threads need not.
        measured = profile.lanes_of(values)
        threads = measured.pop("tcp_threads", "auto")
        endpoint.config = endpoint.config.with_(
            tcp_threads=threads if config.tcp_threads == "auto" else config.tcp_threads, **measured
        )


async def _answer_status(world: World, pages: Pages) -> None:
    """Begin to answer ``asyncdist top``, and let rank 0 publish where: the ports that it knows."""
    addresses = pages.column(STATUS_PORTS)
    if world.status_port is not None:
        world.status_port.serve(world.endpoint, addresses, world.describe, pages.load)
    if world.endpoint.rank == 0:
        ports = [(rank, *each) for rank, each in enumerate(addresses) if each is not None]
        await world.meeting.publish_status(ports)


async def discard_world(opening: asyncio.Task[World | None]) -> None:
    """Cancel a task that opens a world; log why it failed, and close the world if the task was faster."""
    opening.cancel()
    try:
        world = await opening
    except asyncio.CancelledError:
        return
    except (AsyncdistError, TimeoutError) as error:
        log.info("a world was not opened: %s", error)
        return
    if world is not None:
        await world.close()
