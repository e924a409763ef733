"""Measures on real processes of this machine what the simulation needs, and worlds that it is compared with."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import nan
from operator import attrgetter
from statistics import median
from typing import Any

from benchmarks.laboratory import HOST, Laboratory, hear_all
from benchmarks.processes import RankProcess
from benchmarks.scale.cluster import Costs, Shape
from benchmarks.scale.simulation import start
from benchmarks.scale.virtual_time import run

CONNECTIONS, REQUESTS, READ_NBYTES = 64, 2048, 16 * (4 << 20)
"""The connections and requests of the client of the measured store, and the bytes that it reads."""
FEW, MANY, CROWDED, LARGER = 2, 32, 48, 144
"""The ranks of the worlds in which the processor time of a rank is measured: two that all meet, and two crowds."""
_BARRIERS = 8
_PATIENCE = 900.0
_NO_SPINNING = {"ASYNCDIST_SPIN_US": "0", "ASYNCDIST_AWAIT_SPIN_US": "0"}


@dataclass(frozen=True, slots=True)
class RealWorld:
    """What a world of processes has taken.

    Attributes:
        turn: The seconds for which each of its processes is busy when they pass a token on, one after the other.
    """

    start: Step
    barriers: list[Step]
    turn: float

    @property
    def first_seconds(self) -> float:
        """The seconds of the start and the first barrier."""
        return self.start.seconds + self.barriers[0].seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A step that all ranks of a real world take at the same time.

    Attributes:
        seconds: From its begin on the first rank to its end on the last.
        processor: The processor time of a rank, on average.
    """

    seconds: float
    processor: float


def real_world(laboratory: Laboratory, size: int, transport: str) -> RealWorld:
    """Start a world of processes on this machine, and let it pass barriers and a token."""
    where = laboratory.world()
    settings: dict[str, Any] = {"ASYNCDIST_TRANSPORT": transport, **_NO_SPINNING}
    ranks = [laboratory.start("be_rank", where, rank, size, _BARRIERS, **settings) for rank in range(size)]
    first, *passed, turns = _steps(laboratory, ranks, 2 + _BARRIERS)
    return RealWorld(first, passed, turns.seconds / size)


def world_of_gloo(laboratory: Laboratory, size: int, *, is_over_tcp: bool) -> RealWorld:
    """Start a world of gloo, whose store is torch's over TCP, as launchers use it, or a file; let it pass a barrier."""
    where = laboratory.world()
    if is_over_tcp:
        with socket.create_server((HOST, 0)) as server:
            where = f"tcp://{HOST}:{server.getsockname()[1]}"
    ranks = [laboratory.start("be_gloo_rank", laboratory.world(), where, rank, size) for rank in range(size)]
    first, barrier = _steps(laboratory, ranks, 2)
    return RealWorld(first, [barrier], nan)


def _steps(laboratory: Laboratory, ranks: Sequence[RankProcess], count: int) -> list[Step]:
    """Let ranks take steps, and end."""
    steps = []
    hear_all(ranks, _PATIENCE)
    for _ in range(count):
        for each in ranks:
            each.say("begin")
        begun, ended, used = zip(*hear_all(ranks, _PATIENCE), strict=True)
        steps.append(Step(max(ended) - min(begun), sum(used) / len(ranks)))
    for each in ranks:
        each.say("end")
    for each in ranks:
        each.wait(_PATIENCE)
    laboratory.clear()
    return steps


def measured_costs(laboratory: Laboratory, transport: str, *, crowded: bool) -> tuple[Costs, float]:
    """Return what processes of this machine need, with the network of `Costs`.

    Args:
        transport: The transports of the ranks.
        crowded: Whether many ranks share a processor, so that each message has its share of what the system needs to pass a
            processor from one to another. Otherwise they have a processor each.

    Returns:
        The costs, and the time that a process of the largest measured world needs for its turn. The more processes take
        turns, the longer does each need when it wakes up, because its data have left the caches.
    """
    costs = replace(_with_store(laboratory, Costs()), start=0, neighbour=0)
    memory = transport != "tcp"
    few, many = (real_world(laboratory, size, transport) for size in (FEW, MANY))
    costs = replace(costs, start=max(0.0, few.start.processor - _used(Shape(FEW, memory=memory), costs)))
    grown = many.start.processor - _used(Shape(MANY, MANY, memory=memory), costs)
    costs = replace(costs, neighbour=max(0.0, grown) / (MANY - 1))
    if crowded:
        return _with_crowd(laboratory, transport, costs)
    if memory:
        _, later = _barriers(few.barriers)
        (cold, _), (grown, _) = _barriers(few.barriers), _barriers(many.barriers)
        mapping = max(0.0, grown - cold) / (MANY - FEW)
        costs = replace(costs, wake=later / (FEW - 1), map=mapping, cold=max(0.0, cold - mapping))
        few = real_world(laboratory, FEW, "tcp")
    # A rank of a dissemination sends and receives in each round, always over another connection.
    dial, message = (spent / 2 for spent in _barriers(few.barriers))
    return replace(costs, message=message, dial=dial), many.turn


def _with_crowd(laboratory: Laboratory, transport: str, costs: Costs) -> tuple[Costs, float]:
    """Return what a rank of a crowd needs, whose barriers take its share of the time of all processors."""
    cores = os.cpu_count() or 1
    shape, memory = Shape(CROWDED, CROWDED, cores, memory=transport != "tcp"), transport != "tcp"
    world = real_world(laboratory, CROWDED, transport)
    if memory:
        larger = real_world(laboratory, LARGER, transport)
        grown = larger.start.seconds / LARGER - world.start.seconds / CROWDED
        costs = replace(costs, know=max(0.0, grown) * cores / (LARGER - CROWDED))
    costs = replace(costs, start=costs.start + max(0.0, _share(world.start) - _used(shape, costs)))
    first, later = _barriers(world.barriers, _share)
    # Each of the connections of a tree carries a message in each direction. Those in shared memory exist since the start.
    per_connection = CROWDED / (CROWDED - 1)
    costs = replace(costs, message=later * per_connection / 4)
    return replace(costs, cold=first) if memory else replace(costs, dial=first * per_connection / 2), world.turn


def _used(shape: Shape, costs: Costs) -> float:
    """Return the processor time of a rank in a simulated start."""
    _, used = run(start(shape, costs))
    return used


def _barriers(
    barriers: Sequence[Step], spent: Callable[[Step], float] = attrgetter("processor")
) -> tuple[float, float]:
    """Return what the first barrier takes of a rank more than a later one, and what that takes."""
    first, *others = map(spent, barriers)
    later = median(others)
    return max(0.0, first - later), later


def _share(step: Step) -> float:
    """Return a rank's part of the time of all processors, in a crowd."""
    return step.seconds * (os.cpu_count() or 1) / CROWDED


def _with_store(laboratory: Laboratory, costs: Costs) -> Costs:
    server = laboratory.start("serve")
    client = laboratory.start("ask", server.hear(), CONNECTIONS, REQUESTS)
    spent: list[tuple[float, float]] = []
    for count in (CONNECTIONS, CONNECTIONS, REQUESTS, REQUESTS, READ_NBYTES):
        server.say("time")
        before = server.hear()
        client.say("begin")
        own = client.hear()
        server.say("time")
        spent.append((own / count, (server.hear() - before) / count))
    client.say("end")
    server.say("end")
    laboratory.clear()
    (connecting, _), (_, accepting), (asking, _), (_, serving), (reading, writing) = spent
    return replace(
        costs, connect=connecting, accept=accepting, answer=asking, request=serving, nbyte=max(reading, writing)
    )
