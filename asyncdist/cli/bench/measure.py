"""Time the contenders of one case in turns, so that the machine's other load affects all of them alike.

Called by `rank`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from asyncdist.base.callables import AnyFunction, Callback
from asyncdist.cli.bench.contenders.contenders import CallTime, Contender, nothing
from asyncdist.cli.bench.limits import CpuMeter
from asyncdist.cli.bench.plan import BenchPlan, in_turns, rounds
from asyncdist.cli.bench.result import ResultRow, Timing
from asyncdist.cli.bench.traffic import Empty, Traffic

# From this size on, the ranks start every call together, because restoring the tensor takes a different time on each rank.
# Smaller calls run back to back: pacing spins, which starves contenders with an I/O thread (gloo: 3 to 8 times as long).
_PACED_NBYTES = 8 << 20
# Back to back, the root of these would run ahead of the other ranks, and rank 0's time would not be that of the operation.
_ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))


class TimedContender(NamedTuple):
    """A contender with its traffic, and the function that makes one call."""

    contender: Contender
    case: Traffic
    call: AnyFunction

    @classmethod
    def of(cls, contender: Contender, case: Traffic) -> TimedContender:
        return cls(contender, case, contender.prepare(case))

    def verify(self, start: Callback) -> None:
        """Make one call and compare every element; raise BenchmarkError if one is wrong."""
        self.case.load()
        self.contender.run(self.case, self.call, 1, start, nothing)
        if self.contender.has_result:
            self.case.check(self.contender.name)


def measure_case(
    contenders: Sequence[Contender], collective: str, nbytes: int, rank: int, plan: BenchPlan, start: Callback
) -> ResultRow:
    """Measure one collective at one size; called on every rank with the same arguments."""
    entries = make_entries(contenders, collective, rank, plan.ranks, nbytes)
    first, meter = entries[0].case, CpuMeter()
    paced = first.nbytes >= _PACED_NBYTES or collective in _ROOTED
    timings = measure(entries, start, *plan.calls(first.nbytes), paced=paced, meter=meter)
    busy = meter.shares() if plan.hosts > 1 else {}
    return ResultRow(collective, first.nbytes if nbytes else 0, plan.ranks, timings, busy)


def make_entries(
    contenders: Sequence[Contender], collective: str, rank: int, ranks: int, nbytes: int
) -> list[TimedContender]:
    """Return the contenders that can execute the collective, each with its traffic. Equal ``empty`` share one traffic."""
    made: dict[Empty, Traffic] = {}
    entries = []
    for contender in contenders:
        if contender.collectives is None or collective in contender.collectives:
            if contender.empty not in made:
                made[contender.empty] = Traffic(collective, rank, ranks, nbytes, contender.empty)
            entries.append(TimedContender.of(contender, made[contender.empty]))
    return entries


def measure(
    entries: Sequence[TimedContender],
    start: Callback,
    calls: int,
    block: int,
    *,
    paced: bool,
    meter: CpuMeter | None = None,
) -> dict[str, Timing]:
    """Check the result of every contender once, then time them; called on every rank with the same arguments.

    Args:
        start: Returns on all ranks at the same instant.
        calls: The timed calls of each contender, of which it makes ``block`` in each turn.
        paced: Whether all ranks start each call together.

    Raises:
        BenchmarkError: A result is wrong.
    """
    meter = meter or CpuMeter()
    for entry in entries:
        entry.verify(start)
    for entry in entries:
        entry.case.prepare_timed_calls()
    # The first call of a block finds the caches full of another contender's code.
    lead_in = 1 if block > 1 else 0
    times: dict[str, list[CallTime]] = {entry.contender.name: [] for entry in entries}

    def before(case: Traffic) -> None:
        case.restore()
        if paced:
            start()

    for turn, count in enumerate(rounds(calls, block)):
        for contender, case, call in in_turns(entries, turn):
            start()
            check = partial(case.check_ends, contender.name) if contender.has_result else nothing
            meter.begin()
            times[contender.name] += contender.run(case, call, count + lead_in, partial(before, case), check)[lead_in:]
            meter.end(contender.name)
    return {name: Timing.of(calls) for name, calls in times.items()}
