"""Measures on real processes of this machine what the simulation needs, and worlds that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.laboratory import Laboratory, hear_all
from benchmarks.scale.cluster import Costs
from benchmarks.scale.simulation import Shape, used_by_start

CONNECTIONS, REQUESTS, READ_NBYTES = 64, 2000, 16 * (4 << 20)
"""What the client of the measured store does: connections, changes, and bytes that it reads."""
_FEW, _MANY = 2, 16
"""The ranks of the worlds in which the processor time of a rank is measured."""
_BARRIERS = 8
_PATIENCE = 900.0
_NO_SPINNING = {"ASYNCDIST_SPIN_US": "0", "ASYNCDIST_AWAIT_SPIN_US": "0"}


@dataclass(frozen=True, slots=True)
class Step:
    """What all ranks of a real world do at the same time: seconds from the first to the last, processor time of a rank."""

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


def measured_costs(laboratory: Laboratory) -> Costs:
    """Return what processes of this machine need, with the network of `Costs`."""
    costs = _with_store(laboratory, Costs())
    few, many = (real_world(laboratory, size, "shm,tcp") for size in (_FEW, _MANY))
    start = max(0.0, few[0].processor - used_by_start(Shape(_FEW), replace(costs, start=0.0, neighbour=0.0)))
    costs = replace(costs, start=start, neighbour=0.0)
    grown = many[0].processor - used_by_start(Shape(_MANY, per_host=_MANY), costs)
    costs = replace(costs, neighbour=max(0.0, grown) / (_MANY - 1))
    first, *later = (step.processor for step in real_world(laboratory, _MANY, "tcp", _BARRIERS)[1:])
    # A rank of a dissemination sends and receives in each round, always over another connection.
    messages = 2 * (_MANY - 1).bit_length()
    message = median(later) / messages
    return replace(costs, message=message, dial=max(0.0, (first - median(later)) / messages))


def _with_store(laboratory: Laboratory, costs: Costs) -> Costs:
    server = laboratory.start("serve")
    client = laboratory.start("ask", server.hear(), CONNECTIONS, REQUESTS)
    spent: list[tuple[float, float]] = []
    for count in (CONNECTIONS, REQUESTS, READ_NBYTES):
        server.say("time")
        before = server.hear()
        client.say("begin")
        own = client.hear()
        server.say("time")
        spent.append((own / count, (server.hear() - before) / count))
    client.say("end")
    server.say("end")
    laboratory.clear()
    (connecting, accepting), (asking, serving), (reading, writing) = spent
    return replace(
        costs, connect=connecting, accept=accepting, answer=asking, request=serving, nbyte=max(reading, writing)
    )
