"""Time the contenders of one case in turns, so that the machine's other load affects all of them alike.

Called by `rank`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from asyncdist.cli.bench.contenders.contenders import CallTime, Contender, Contenders, Start
from asyncdist.cli.bench.hosts.limits import CpuMeter
from asyncdist.cli.bench.plan import BenchPlan, in_turns, rounds
from asyncdist.cli.bench.result import ResultRow, Timing
from asyncdist.cli.bench.workloads.collectives import Empty, Traffic, traffic

# From this size on, the ranks start every call together, because restoring the tensor takes a different time on each rank.
# Smaller calls run back to back: pacing spins, which starves contenders with an I/O thread (gloo: 3 to 8 times as long).
_PACED_NBYTES = 8 << 20
# Back to back, the root of these would run ahead of the other ranks, and rank 0's time would not be that of the operation.
_ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))

Entry = tuple[Contender, Traffic]


def measure_case(
    contenders: Contenders,
    collective: str,
    nbytes: int,
    rank: int,
    plan: BenchPlan,
    start: Start,
    progress: Callable[[float], None],
) -> ResultRow:
    """Measure one collective at one size; called on every rank with the same arguments."""
    entries = make_entries(contenders.members, collective, rank, plan.ranks, nbytes)
    meter = CpuMeter()
    timings = measure(entries, start, plan, progress, meter)
    size = entries[0][1].nbytes if nbytes else 0
    ticks = contenders.latest_ticks()
    busy = meter.shares() if plan.hosts > 1 else {}
    return ResultRow(collective, size, plan.ranks, timings, contenders.absent, contenders.device, ticks, busy)


def make_entries(contenders: Sequence[Contender], collective: str, rank: int, ranks: int, nbytes: int) -> list[Entry]:
    """Return the contenders that can execute the collective, each with its traffic. Equal ``empty`` share one traffic."""
    made: dict[Empty, Traffic] = {}
    entries = []
    for contender in contenders:
        if contender.enters(collective):
            if contender.empty not in made:
                made[contender.empty] = traffic(collective, rank, ranks, nbytes, contender.empty)
            entries.append((contender, made[contender.empty]))
    return entries


def measure(
    entries: Sequence[Entry],
    start: Start,
    plan: BenchPlan,
    progress: Callable[[float], None],
    meter: CpuMeter | None = None,
) -> dict[str, Timing]:
    """Check the result of every contender once, then time them; called on every rank with the same plan.

    Args:
        entries: Contenders with their traffic, all of one collective at one size.
        start: Returns on all ranks at the same instant.
        plan: Says how many calls to time.
        progress: Called with the completed share of the case (0 to 1).
        meter: Adds up how busy the processors are during the calls of each contender.

    Raises:
        BenchmarkError: A result is wrong.
    """
    meter = meter or CpuMeter()
    for contender, case in entries:
        contender.verify(case, start)
    for _, case in entries:
        case.prepare_timed_calls()
    first = entries[0][1]
    calls, block = plan.calls(first.nbytes)
    paced = first.nbytes >= _PACED_NBYTES or first.name in _ROOTED or plan.device != "cpu"
    # The first call of a block finds the caches full of another contender's code.
    lead_in = 1 if block > 1 else 0
    times: dict[str, list[CallTime]] = {contender.name: [] for contender, _ in entries}

    def before(case: Traffic) -> None:
        case.restore()
        if paced:
            start()

    for turn, count in enumerate(rounds(calls, block)):
        progress(turn * block / calls)
        for contender, case in in_turns(entries, turn):
            start()
            check = partial(case.check_ends, contender.name)
            meter.begin()
            times[contender.name] += contender.run(case, count + lead_in, partial(before, case), check)[lead_in:]
            meter.end(contender.name)
    return {name: Timing.of(calls) for name, calls in times.items()}
