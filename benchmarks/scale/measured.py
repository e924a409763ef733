"""Measures on real processes of this machine what the simulation needs, and worlds that it is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.laboratory import Laboratory, hear_all
from benchmarks.scale.cluster import Costs
from benchmarks.scale.simulation import Shape, used_by_start

CONNECTIONS, REQUESTS, READ_NBYTES = 64, 2048, 16 * (4 << 20)
"""The connections and requests of the client of the measured store, and the bytes that it reads."""
_FEW, _MANY = 2, 32
"""The ranks of the worlds in which the processor time of a rank is measured."""
_BARRIERS = 8
_PATIENCE = 900.0
_NO_SPINNING = {"ASYNCDIST_SPIN_US": "0", "ASYNCDIST_AWAIT_SPIN_US": "0"}


@dataclass(frozen=True, slots=True)
class Step:
    """A step that all ranks of a real world take at the same time.

    Attributes:
        seconds: From its begin on the first rank to its end on the last.
        processor: The processor time of a rank, on average.
    """

    seconds: float
    processor: float


def real_world(laboratory: Laboratory, size: int, transport: str, barriers: int = 2) -> list[Step]:
    """Start a world of processes on this machine; return its start, its first barrier, and later ones."""
    where = laboratory.world()
    settings: dict[str, Any] = {"ASYNCDIST_TRANSPORT": transport, **_NO_SPINNING}
    ranks = [laboratory.start("be_rank", where, rank, size, barriers, **settings) for rank in range(size)]
    steps = []
    hear_all(ranks, _PATIENCE)
    for _ in range(1 + barriers):
        for each in ranks:
            each.say("begin")
        begun, ended, used = zip(*hear_all(ranks, _PATIENCE), strict=True)
        steps.append(Step(max(ended) - min(begun), sum(used) / size))
    for each in ranks:
        each.say("end")
    for each in ranks:
        each.wait(_PATIENCE)
    laboratory.clear()
    return steps


def measured_costs(laboratory: Laboratory, transport: str, *, crowded: bool) -> Costs:
    """Return what processes of this machine need, with the network of `Costs`.

    Args:
        transport: The transports of the ranks.
        crowded: Whether many ranks share a processor, so that each message has its share of what the system needs to pass a
            processor from one to another.
    """
    costs = _with_store(laboratory, Costs())
    memory = transport != "tcp"
    few, many = (real_world(laboratory, size, transport, _BARRIERS) for size in (_FEW, _MANY))
    start = max(0.0, few[0].processor - used_by_start(Shape(_FEW, memory=memory), replace(costs, start=0, neighbour=0)))
    costs = replace(costs, start=start, neighbour=0.0)
    grown = many[0].processor - used_by_start(Shape(_MANY, _MANY, memory=memory), costs)
    costs = replace(costs, neighbour=max(0.0, grown) / (_MANY - 1))
    size, steps = (_MANY, many) if crowded else (_FEW, few)
    if memory:
        map_, wake = (spent / (size - 1) for spent in _barriers(steps, size, crowded))
        costs = replace(costs, wake=wake, map=map_)
        steps = real_world(laboratory, size, "tcp", _BARRIERS)
    # A rank of a dissemination sends and receives in each round, always over another connection.
    dial, message = (spent / (2 * (size - 1).bit_length()) for spent in _barriers(steps, size, crowded))
    return replace(costs, message=message, dial=dial)


def _barriers(steps: Sequence[Step], size: int, crowded: bool) -> tuple[float, float]:
    """Return what the first barrier takes of a rank's processor time more than a later one, and what that takes.

    In a ``crowded`` world that is the rank's part of the time of all processors.
    """
    spent = [step.seconds * (os.cpu_count() or 1) / size if crowded else step.processor for step in steps[1:]]
    later = median(spent[1:])
    return max(0.0, spent[0] - later), later


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
