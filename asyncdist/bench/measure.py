"""Rounds: every contender in turn, so that whatever else the machine does hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncdist.bench.contenders import Contender, Pace
from asyncdist.bench.plan import Plan, rounds
from asyncdist.bench.result import Timing
from asyncdist.bench.traffic import Traffic

# From this size on ranks start every call together: restoring the tensor takes them unequally long. Smaller ones run back
# to back, as collectives benchmarks do: pacing spins, which starves contenders that have an I/O thread of their own
# (gloo at 1 KiB to 1 MiB took three to eight times as long).
_PACED_NBYTES = 8 << 20
# Back to back, the root of these runs ahead of the others, and its time is not that of the operation.
_ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))


def measure(
    case: Traffic, contenders: Sequence[Contender], pace: Pace, plan: Plan, tell: Callable[[float], None]
) -> dict[str, Timing]:
    """Check every contender's result once, then time them; call it on every rank with the same plan.

    ``tell`` hears how much of the case is done, between 0 and 1. Raises BenchmarkError for a wrong result.
    """
    _check(case, contenders, pace)
    case.settle()
    calls, block = plan.calls(case.nbytes)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}

    def before() -> None:
        case.restore()
        if case.nbytes >= _PACED_NBYTES or case.name in _ROOTED:
            pace()

    for turn, count in enumerate(rounds(calls, block)):
        tell(turn * block / calls)
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            # In a row of calls the first one finds the caches full of another contender's code.
            lead_in = 1 if block > 1 else 0
            pace()
            times = contender.run(case, count + lead_in, before, lambda name=contender.name: case.glance(name))  # type: ignore[misc]
            seconds[contender.name] += times[lead_in:]
    return {name: Timing.of(times) for name, times in seconds.items()}


def _check(case: Traffic, contenders: Sequence[Contender], pace: Pace) -> None:
    for contender in contenders:
        case.load()
        contender.run(case, 1, pace, lambda: None)
        case.check(contender.name)
