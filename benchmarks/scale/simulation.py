"""A world in a simulated cluster: its start, its first calls, and the loss of a rank, by the code of real ranks.

This runs the real code of the rendezvous, the introductions, the store's state, the schedules, the choice of who is told
of a failure, and the agreement. Only sockets, processes and time are simulated.
"""

from __future__ import annotations

import asyncio
import functools
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.groups import introductions
from asyncdist.kernel.algorithms import tree
from asyncdist.kernel.algorithms.schedule import Recv, Schedule, Send
from asyncdist.kernel.engine.control_messages import ENDED, encode_abort, ranks_to_notify
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.rendezvous.join import Found, WorldSpec, join_world
from asyncdist.rendezvous.pages import Pages
from asyncdist.rendezvous.record_store import AddressRecord
from asyncdist.rendezvous.session import RendezvousSession, TimeLimit
from benchmarks.scale.cluster import Cluster, Costs, Shape
from benchmarks.scale.simulated_members import SimulatedMembers
from benchmarks.scale.simulated_restart import restart
from benchmarks.scale.simulated_store import SimulatedServer, SimulatedStore
from benchmarks.scale.simulated_watchers import Watchers
from benchmarks.scale.virtual_time import run

_HEADER_NBYTES = 32
"""The bytes of a message between ranks without its body."""
_LONG = 1e6
"""Seconds that no simulated start takes."""
DOWNTIME = 5.0
"""Seconds for which a restarted store answers no client."""
SLOWNESS = 20.0
"""The processor time of a slow rank, as a multiple of that of the others."""
_RACK = 32
"""The hosts of a rack; fewer in a world of fewer than four racks."""
_STOPPED, _CUT_OFF = "stopped", "cut off"
_UNDISTURBED = 3
"""The heartbeats before ranks fall silent."""
_host: ContextVar[int] = ContextVar("_host")
"""The host on which the current task runs."""


class Loss(NamedTuple):
    """The seconds from a loss until all others know of it, and from then until they have the new group."""

    known: float
    regroup: float


_UNKNOWN = Loss(math.nan, math.nan)


@dataclass(slots=True)
class Outcome:
    """What a simulated world took, in virtual seconds and bytes; NaN for what was not simulated.

    Attributes:
        start: From the first process until the last rank has met the others.
        sent: The bytes that the store has sent until then.
        most_read: The most of them that one rank has read.
        first: The first barrier, for which connections are opened.
        later: A later one.
        slow_start: The start if one rank needs more processor time.
        slow_barrier: A later barrier, if it does.
        killed: The loss of a rank that ends, …
        stopped: … of one that is stopped, …
        rack: … of a rack whose processes all end, …
        cut: … of one that falls silent, and …
        first_cut: … of that of rank 0.
        back: From the return of a store until all its clients are served again.
        busy: The processor time of the store until then.
    """

    start: float = math.nan
    sent: float = math.nan
    most_read: float = math.nan
    first: float = math.nan
    later: float = math.nan
    slow_start: float = math.nan
    slow_barrier: float = math.nan
    killed: Loss = _UNKNOWN
    stopped: Loss = _UNKNOWN
    rack: Loss = _UNKNOWN
    cut: Loss = _UNKNOWN
    first_cut: Loss = _UNKNOWN
    back: float = math.nan
    busy: float = math.nan


def simulate(shape: Shape, costs: Costs, *, is_killed: bool = False, faults: bool = False) -> Outcome:
    """Simulate a world, of which a rank ``is_killed``; with ``faults`` all that may happen to one."""

    async def live() -> Outcome:
        return await _World(shape, costs).live(faults, is_killed)

    outcome = run(live())
    if faults:
        outcome.slow_start, _ = run(start(shape, costs, is_slow=True))
        outcome.back, outcome.busy = run(restart(shape, costs, DOWNTIME))
    return outcome


async def start(shape: Shape, costs: Costs, *, is_slow: bool = False) -> tuple[float, float]:
    """Return the seconds of a start, of which one rank may be slow, and the processor time of a rank on average."""
    world = _World(shape, costs)
    if is_slow:
        world.slow(shape.size // 2)
    await world.meet()
    return world.cluster.now(), sum(process.used for process in world.cluster.processes) / shape.size


class _World:
    def __init__(self, shape: Shape, costs: Costs) -> None:
        self._shape, self._costs = shape, costs
        self._connected: set[tuple[int, int]] = set()
        self.cluster = Cluster(shape, costs)
        self._server, self._stores = SimulatedServer(self.cluster), list[SimulatedStore]()
        self._pages: dict[int, Pages] = {}

    def slow(self, rank: int, factor: float = SLOWNESS) -> None:
        """Let a rank need more processor time from now on."""
        self.cluster.processes[rank].slowness = factor

    async def live(self, faults: bool, is_killed: bool) -> Outcome:
        """Return what the world took."""
        outcome = Outcome()
        outcome.start = await self._timed(self.meet())
        outcome.sent, outcome.most_read = self._server.sent, max(store.nbytes for store in self._stores)
        outcome.first = await self._timed(self._barrier(is_first=True))
        outcome.later = await self._timed(self._barrier())
        size, per_host = self._shape.size, self._shape.per_host
        if faults:
            self.slow(size // 2)
            outcome.slow_barrier = await self._timed(self._barrier())
            self.slow(size // 2, 1.0)
        first = size // 2 // per_host * per_host
        rack = range(first, min(size, first + per_host * max(1, min(_RACK, size // per_host // 4))))
        one = range(size // 2, size // 2 + 1)
        losses: dict[str, tuple[range, str]] = {
            "killed": (one, ENDED),
            "rack": (rack, ENDED),
            "cut": (rack, _CUT_OFF),
            "first_cut": (range(len(rack)), _CUT_OFF),
            "stopped": (one, _STOPPED),
        }
        for name, (lost, how) in losses.items():
            if 2 * len(lost) < size and (faults or (is_killed and name == "killed")):
                setattr(outcome, name, await self._lose(lost, how))
        return outcome

    async def _timed(self, coroutine: Coroutine[Any, Any, None]) -> float:
        begun = self.cluster.now()
        await coroutine
        return self.cluster.now() - begun

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
        process, config = self.cluster.processes[rank], Config()
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
            met = [mate for mate in mates if mate != rank]
            if self._shape.is_crowd:
                met = tree.neighbours(rank, len(mates))
                self._connected.update((min(rank, mate), max(rank, mate)) for mate in met)
            await process.worked(self._costs.neighbour * len(met) + self._costs.know * (len(mates) - 1 - len(met)))
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
        one, other, costs = self.cluster.processes[sender], self.cluster.processes[receiver], self._costs
        pair, nbytes = (min(sender, receiver), max(sender, receiver)), _HEADER_NBYTES + nbytes

        def deliver() -> None:
            one.send(other, nbytes, costs.message, costs.message, then, *args)

        if pair in self._connected:
            deliver()
        else:
            self._connected.add(pair)
            spent = costs.neighbour if self._shape.memory and one.host is other.host else costs.dial
            accept = partial(other.send, one, nbytes, 0.0, spent / 2, deliver)
            dial = partial(one.send, other, nbytes, spent / 2, spent, accept)
            if self._pages[sender].holds(receiver):
                dial()
            else:
                self._pages[sender].request(receiver, lambda failure: dial())

    # -- a barrier -----------------------------------------------------------------------------------

    async def _barrier(self, *, is_first: bool = False) -> None:
        """Pass a barrier: between the first ranks of the hosts by messages, and in a crowd between all."""
        shape, costs = self._shape, self._costs
        per_node = min(shape.per_host, shape.size) if shape.memory and not shape.is_crowd else 1
        mates = per_node - 1
        others = mates * costs.map + costs.cold * shape.memory
        await asyncio.gather(
            *(process.worked(mates * costs.wake / 2 + others * is_first) for process in self.cluster.processes)
        )
        ranks = range(0, shape.size, per_node)
        if len(ranks) > 1:
            await _Barrier(self, ranks, shape.schedule_of_barrier).done
        await asyncio.gather(*(process.worked(mates * costs.wake / 2) for process in self.cluster.processes))

    # -- the loss of a rank ------------------------------------------------------------------------

    async def _lose(self, lost: Collection[int], how: str) -> Loss:
        """Lose ranks for a while, until all others have regrouped.

        An end is seen by the ranks of the host, and by those that are connected to it. They miss the heartbeats of others.
        """
        connected, processes = self._connected.copy(), self.cluster.processes
        witnesses = self._witnesses(set(lost))
        members = SimulatedMembers(self.cluster, self._connected, self.send, have_ended=how == ENDED)
        self._informed, self._all_know = dict[int, object](), asyncio.get_running_loop().create_future()
        self._watchers = Watchers(
            self.cluster, lost, witnesses if how != ENDED else {}, is_cut_off=how == _CUT_OFF, send=self.send,
            lost=partial(self._notice, members),
        )  # fmt: skip
        members.watch = self._watchers.watch
        with self._watchers.running():
            self._watchers.silent_since = math.inf
            await asyncio.sleep(_UNDISTURBED * self._watchers.period)
            self._watchers.silent_since = begun = self.cluster.now()
            for rank in lost:
                processes[rank].is_silent = True
            for witness, peers in witnesses.items() if how == ENDED else ():
                members.seen[witness] = dict.fromkeys(peers, ENDED)
                self._inform(witness, None, PeerLostError(min(peers), ENDED))
            await self._all_know
            known = self.cluster.now()
            assert set(self._informed.values()) <= set(lost)
            decision = await members.regroup()
            assert not decision.votes.keys() & set(lost)
            assert len(decision.votes) == self._shape.size - len(lost)
            regrouped = self.cluster.now()
        # Notices that are on the way belong to this loss.
        await asyncio.sleep(self._watchers.period)
        for rank in lost:
            processes[rank].is_silent = False
        self._connected = connected
        return Loss(known - begun, regrouped - known)

    def _witnesses(self, lost: set[int]) -> dict[int, set[int]]:
        """Return the others that notice the loss of ranks, each with those of these that it watches."""
        found: dict[int, set[int]] = defaultdict(set)
        for rank in lost:
            first = rank - rank % self._shape.per_host
            for mate in range(first, min(first + self._shape.per_host, self._shape.size)):
                found[mate].add(rank)
        for one, other in self._connected:
            for rank, peer in ((one, other), (other, one)):
                if peer in lost:
                    found[rank].add(peer)
        return {rank: peers for rank, peers in found.items() if rank not in lost}

    def _notice(self, members: SimulatedMembers, rank: int, lost: int, error: PeerLostError) -> None:
        members.lose(rank, lost, error.why)
        self._inform(rank, None, error)

    def _inform(self, rank: int, notified_by: int | None, error: PeerLostError) -> None:
        if notified_by is not None and rank in self._watchers.of:
            self._watchers.of[rank].notified(error)
        if rank in self._informed:
            return
        self._informed[rank] = error.peer
        nbytes = len(encode_abort(error, rank))
        for peer in ranks_to_notify(range(self._shape.size), rank, notified_by):
            self.send(rank, peer, nbytes, self._inform, peer, rank, error)
        if len(self._informed) == self._shape.size - len(self._watchers.silent):
            self._all_know.set_result(None)


class _Barrier:
    """Runs the schedules of a barrier of some ranks."""

    def __init__(self, world: _World, ranks: Sequence[int], schedule: Callable[[int, int, Any, Any], Schedule]) -> None:
        self._world, self._ranks, self._left = world, ranks, len(ranks)
        self.done = asyncio.get_running_loop().create_future()
        self._schedules = [schedule(place, len(ranks), None, None) for place in range(len(ranks))]
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
                    self._arrived[place][action.peer] -= 1
            if self._waits(place):
                return
        self._left -= 1
        if self._left == 0:
            self.done.set_result(None)

    def _waits(self, place: int) -> bool:
        return any(left < 0 for left in self._arrived[place].values())

    def _take(self, place: int, sender: int) -> None:
        waited = self._waits(place)
        self._arrived[place][sender] += 1
        if waited and not self._waits(place):
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
