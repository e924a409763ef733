"""A world in a simulated cluster: its start, its first calls, and the loss of a rank, by the code of real ranks.

This runs the real code of the rendezvous, the introductions, the store's state, the schedules, the choice of who is told
of a failure, and the agreement. Only sockets, processes and time are simulated.
"""

from __future__ import annotations

import asyncio
import functools
import math
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.groups import introductions
from asyncdist.kernel.algorithms import recursive_doubling
from asyncdist.kernel.algorithms.schedule import Recv, Schedule, Send
from asyncdist.kernel.engine.control_messages import ENDED, encode_abort, ranks_to_notify
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.rendezvous.join import Found, WorldSpec, join_world
from asyncdist.rendezvous.pages import Pages
from asyncdist.rendezvous.record_store import AddressRecord
from asyncdist.rendezvous.session import RendezvousSession, TimeLimit
from benchmarks.scale.cluster import Cluster, Costs
from benchmarks.scale.simulated_members import SimulatedMembers
from benchmarks.scale.simulated_store import SimulatedServer, SimulatedStore
from benchmarks.scale.virtual_time import run

_HEADER_NBYTES = 32
"""The bytes of a message between ranks without its body."""
_LONG = 1e6
"""Seconds that no simulated start takes."""
_host: ContextVar[int] = ContextVar("_host")
"""The host on which the current task runs."""


@dataclass(slots=True)
class Outcome:
    """What a simulated world took, in virtual seconds and bytes; NaN for what was not simulated.

    Attributes:
        start: From the first process until the last rank has met the others.
        sent: The bytes that the store has sent until then.
        most_read: The most of them that one rank has read.
        first: The first barrier, for which connections are opened.
        later: A later one.
        known: From the end of a rank until all others know of it.
        regroup: From then until all have the new group.
    """

    start: float = math.nan
    sent: float = math.nan
    most_read: float = math.nan
    first: float = math.nan
    later: float = math.nan
    known: float = math.nan
    regroup: float = math.nan


@dataclass(frozen=True, slots=True)
class Shape:
    """The world and its hosts; with ``memory`` the ranks of a host share memory."""

    size: int
    per_host: int = 8
    processors: int = 64
    memory: bool = True


def simulate(shape: Shape, costs: Costs) -> Outcome:
    """Simulate a world, and the loss of one of its ranks."""

    async def live() -> Outcome:
        return await _World(shape, costs).live()

    return run(live())


def used_by_start(shape: Shape, costs: Costs) -> float:
    """Return the processor time that a rank uses for its start, on average."""

    async def start() -> float:
        world = _World(shape, costs)
        await world.meet()
        return world.used / shape.size

    return run(start())


class _World:
    def __init__(self, shape: Shape, costs: Costs) -> None:
        self._shape, self._costs = shape, costs
        self._connected: set[tuple[int, int]] = set()
        self._cluster = Cluster(shape.size, shape.per_host, shape.processors, costs)
        self._server, self._stores = SimulatedServer(self._cluster), list[SimulatedStore]()
        self._pages: dict[int, Pages] = {}

    @property
    def used(self) -> float:
        """The processor time of all ranks together."""
        return sum(process.used for process in self._cluster.processes)

    async def live(self) -> Outcome:
        """Return what the world took."""
        outcome = Outcome()
        outcome.start = await self._timed(self.meet())
        outcome.sent, outcome.most_read = self._server.sent, max(store.nbytes for store in self._stores)
        outcome.first = await self._timed(self._barrier(is_first=True))
        outcome.later = await self._timed(self._barrier())
        if self._shape.size > 2:
            outcome.known = await self._timed(self._lose(self._shape.size // 2))
            outcome.regroup = await self._timed(self._regroup(self._shape.size // 2))
        return outcome

    async def _timed(self, coroutine: Coroutine[Any, Any, None]) -> float:
        begun = self._cluster.now()
        await coroutine
        return self._cluster.now() - begun

    # -- the start -------------------------------------------------------------------------------

    async def meet(self) -> None:
        """Return when all ranks have met."""
        with ExitStack() as stack:
            # All hosts are this machine, which has one name.
            stack.enter_context(patch.object(introductions, "machine_name", lambda: _machine(_host.get())))
            stack.enter_context(patch.object(introductions, "process_identity", _identity))
            await asyncio.gather(*(self._join(rank) for rank in range(self._shape.size)))

    async def _join(self, rank: int) -> None:
        number = rank // self._shape.per_host
        _host.set(number)
        process, config = self._cluster.processes[rank], Config()
        await process.worked(self._costs.start)
        limit = TimeLimit(_LONG, Deadline.after(_LONG))
        world = WorldSpec("simulated", rank, self._shape.size, config, limit)
        store = await SimulatedStore.connect(self._server, process)
        self._stores.append(store)
        session = await (self._host(world, store) if rank == 0 else self._find(world, store))
        mates = range(number * self._shape.per_host, min((number + 1) * self._shape.per_host, self._shape.size))
        endpoint = cast(Endpoint, _Listening(rank, self._shape.memory))
        status = _address(), _port(rank + 1)
        known = await introductions.introduce(session, endpoint, config, status=status, profile=None)
        self._pages[rank] = known.pages
        reached = {}
        if self._shape.memory:
            await process.worked(self._costs.neighbour * (len(mates) - 1))
            reached["shm"] = mates
        await introductions.share_reached(session, reached, more=False)

    async def _host(self, world: WorldSpec, store: SimulatedStore) -> RendezvousSession:
        record = AddressRecord(store.host, 1, None, "simulated", world.world_size)
        await store.multi_set([record.key("size"), record.key("joined", 0)], [str(world.world_size), b"0"])
        await store.set(world.key, record.encode())
        return world.open_session(record, cast(Any, store), None, "the simulated store")

    async def _find(self, world: WorldSpec, store: SimulatedStore) -> RendezvousSession:
        async def locate(patience: float) -> Found:
            record = AddressRecord.decode(await store.get(world.key))
            assert record is not None
            return cast(Any, store), record, None

        return await join_world(AsyncExitStack(), world, locate, "the simulated store")

    # -- messages between ranks --------------------------------------------------------------------

    def send(self, sender: int, receiver: int, nbytes: int, then: Any, *args: Any) -> None:
        """Send a message; the first one between two ranks opens their connection, with an exchange before it.

        A rank that does not know the address of the other reads it first.
        """
        one, other, costs = self._cluster.processes[sender], self._cluster.processes[receiver], self._costs
        pair, nbytes = (min(sender, receiver), max(sender, receiver)), _HEADER_NBYTES + nbytes

        def deliver() -> None:
            one.send(other, nbytes, costs.message, costs.message, then, *args)

        if pair in self._connected:
            deliver()
        else:
            self._connected.add(pair)
            accept = partial(other.send, one, nbytes, 0.0, costs.dial / 2, deliver)
            dial = partial(one.send, other, nbytes, costs.dial / 2, costs.dial, accept)
            if self._pages[sender].holds(receiver):
                dial()
            else:
                self._pages[sender].request(receiver, lambda failure: dial())

    # -- a barrier -----------------------------------------------------------------------------------

    async def _barrier(self, *, is_first: bool = False) -> None:
        """Pass a barrier: within each host in shared memory, and between the first ranks of the hosts by messages."""
        shape, costs = self._shape, self._costs
        mates = min(shape.per_host, shape.size) - 1 if shape.memory else 0
        before = mates * (costs.wake / 2 + costs.map * is_first)
        await asyncio.gather(*(process.worked(before) for process in self._cluster.processes))
        ranks = range(0, shape.size, shape.per_host if shape.memory else 1)
        if len(ranks) > 1:
            await _Barrier(self, ranks).done
        await asyncio.gather(*(process.worked(mates * costs.wake / 2) for process in self._cluster.processes))

    # -- the loss of a rank ------------------------------------------------------------------------

    async def _lose(self, lost: int) -> None:
        """Return when all know that a rank has ended, which its host and the ranks connected to it see."""
        self._cluster.processes[lost].is_killed = True
        self._known, self._all_know = {lost}, asyncio.get_running_loop().create_future()
        nbytes = len(encode_abort(PeerLostError(lost, ENDED), 0))
        first = lost - lost % self._shape.per_host
        witnesses = {one + other - lost for one, other in self._connected if lost in (one, other)}
        witnesses.update(range(first, min(first + self._shape.per_host, self._shape.size)))
        for witness in witnesses - {lost}:
            self._learn(witness, None, nbytes)
        await self._all_know

    def _learn(self, rank: int, notified_by: int | None, nbytes: int) -> None:
        if rank not in self._known:
            self._known.add(rank)
            for peer in ranks_to_notify(range(self._shape.size), rank, notified_by):
                self.send(rank, peer, nbytes, self._learn, peer, rank, nbytes)
            if len(self._known) == self._shape.size:
                self._all_know.set_result(None)

    async def _regroup(self, lost: int) -> None:
        await SimulatedMembers(self._cluster, self._connected, self.send).regroup([lost])


class _Barrier:
    """Runs the schedules of a barrier of some ranks."""

    def __init__(self, world: _World, ranks: Sequence[int]) -> None:
        self._world, self._ranks, self._left = world, ranks, len(ranks)
        self.done = asyncio.get_running_loop().create_future()
        self._schedules: list[Schedule] = [
            recursive_doubling.barrier(place, len(ranks), None, None) for place in range(len(ranks))
        ]
        self._awaited: list[int | None] = [None] * len(ranks)
        self._arrived: list[Counter[int]] = [Counter() for _ in ranks]
        for place in range(len(ranks)):
            self._advance(place)

    def _advance(self, place: int) -> None:
        """Run a schedule until it waits for a message."""
        for step in self._schedules[place]:
            for action in cast(Iterable[Any], step):
                if isinstance(action, Send):
                    self._world.send(self._ranks[place], self._ranks[action.peer], 0, self._take, action.peer, place)
                elif isinstance(action, Recv):
                    self._awaited[place] = action.peer
            if not self._has_arrived(place):
                return
        self._left -= 1
        if self._left == 0:
            self.done.set_result(None)

    def _has_arrived(self, place: int) -> bool:
        peer = self._awaited[place]
        if peer is None or not self._arrived[place][peer]:
            return peer is None
        self._arrived[place][peer] -= 1
        self._awaited[place] = None
        return True

    def _take(self, place: int, sender: int) -> None:
        self._arrived[place][sender] += 1
        if self._awaited[place] == sender and self._has_arrived(place):
            self._advance(place)


def _address() -> str:
    number = _host.get()
    return f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"


def _port(number: int) -> int:
    """Return one of the ports that systems choose, in no order."""
    return 32768 + number * 7919 % 28229


class _Listening:
    """What an endpoint publishes: an address of TCP for all, and for its machine that of its shared memory."""

    def __init__(self, rank: int, memory: bool) -> None:
        self._rank, self._memory = rank, memory

    def listen(self, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the addresses for all ranks, and those for the ranks of the machine."""
        address = {"host": _address(), "port": _port(self._rank)}
        here = {"shm": {"socket": f"asyncdist-{self._rank}-{self._rank * 7919:016x}", "nbytes": 1 << 30}}
        return {"tcp": address}, here if self._memory else {}


def _identity(host_name: str | None = None) -> dict[str, Any]:
    number = _host.get()
    name = f"{_machine(number)} {host_name or ''}"
    return {"host": name, "pids": "pid:[4026531836]", "pid": number, "started": number}


@functools.cache
def _machine(number: int) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, str(number)))
