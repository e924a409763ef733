"""Rounds: every contender in turn, so that whatever else the machine does hits all alike. Used by `rank`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncdist.bench.contenders.contenders import Contender, Start
from asyncdist.bench.plan import BenchPlan, in_turns, rounds
from asyncdist.bench.result import Timing
from asyncdist.bench.workloads.collectives import Traffic, traffic

# From this size on ranks start every call together: restoring the tensor takes them unequally long. Smaller ones run back
# to back, as collectives benchmarks do: pacing spins, which starves contenders that have an I/O thread of their own
# (gloo at 1 KiB to 1 MiB took three to eight times as long).
_PACED_NBYTES = 8 << 20
# Back to back, the root of these runs ahead of the others, and its time is not that of the operation.
_ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))


Entry = tuple[Contender, Traffic]


def entered(contenders: Sequence[Contender], collective: str, rank: int, ranks: int, nbytes: int) -> list[Entry]:
    """Return who takes part with what; who moves tensors of the same kind shares them."""
    made: dict[Any, Traffic] = {}
    entries = []
    for contender in contenders:
        if contender.enters(collective):
            kind = type(contender).empty
            if kind not in made:
                made[kind] = traffic(collective, rank, ranks, nbytes, contender.empty)
            entries.append((contender, made[kind]))
    return entries


def measure(
    entries: Sequence[Entry], start: Start, plan: BenchPlan, tell: Callable[[float], None]
) -> dict[str, Timing]:
    """Check every contender's result once, then time them; call it on every rank with the same plan.

    All entries are of one collective at one size. ``tell`` hears how much of the case is done, between 0 and 1. Raises
    BenchmarkError for a wrong result.
    """
    for contender, case in entries:
        contender.verify(case, start)
    for _, case in entries:
        case.settle()
    nbytes = entries[0][1].nbytes
    calls, block = plan.calls(nbytes)
    # In a row of calls the first one finds the caches full of another contender's code.
    lead_in = 1 if block > 1 else 0
    seconds: dict[str, list[float]] = {contender.name: [] for contender, _ in entries}

    def before(case: Traffic) -> None:
        case.restore()
        if nbytes >= _PACED_NBYTES or case.name in _ROOTED:
            start()

    for turn, count in enumerate(rounds(calls, block)):
        tell(turn * block / calls)
        for contender, case in in_turns(entries, turn):
            start()
            times = contender.run(case, count + lead_in, partial(before, case), partial(case.glance, contender.name))
            seconds[contender.name] += times[lead_in:]
    return {name: Timing.of(times) for name, times in seconds.items()}
