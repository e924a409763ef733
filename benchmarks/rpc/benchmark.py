"""The benchmark behind ``python -m benchmarks rpc``: remote calls, torch's RPC, and Ray where it is installed.

Caller and callee are separate processes. In each round all contenders take turns, so that the machine's other load affects
all alike. Figures are medians over the rounds. This process does not import torch. Called by
`benchmarks.rpc.command`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from asyncdist.cli.bench.programs import Program, Programs
from asyncdist.cli.machine import installed, machine
from asyncdist.errors import BenchmarkError
from benchmarks.publication import python

_TIMEOUT = 300.0
_POLLS_WHEN_IDLE = ("torch",)
"""Contenders whose idle processes take all of a core each. They are stopped while others take their turn."""
CONTENDERS = {"unix": "asyncdist, one host", "tcp": "asyncdist, TCP", "torch": "torch RPC", "ray": "Ray"}


@dataclass(frozen=True, slots=True)
class RpcPlan:
    """What to measure.

    Attributes:
        rounds: Rounds in which all contenders take turns.
        calls: Calls one after another in a turn.
        burst: Calls of a turn with many in flight.
        in_flight: Calls in flight.
        nbytes: Bytes of the tensor.
        transfers: Calls with the tensor in a turn.
        fan_outs: Calls of all objects in a turn; 0 to leave them out.
    """

    rounds: int = 7
    calls: int = 1000
    burst: int = 20_000
    in_flight: int = 1000
    nbytes: int = 16 << 20
    transfers: int = 20
    fan_outs: int = 10


@dataclass(frozen=True, slots=True)
class RpcCase:
    """One measurement.

    Attributes:
        name: What was measured.
        unit: "s" for seconds, "/s" for calls per second.
        figures: The median of each contender that was measured.
        target: The figure that asyncdist should reach on one host.
    """

    name: str
    unit: str
    figures: dict[str, float]
    target: float


@dataclass(slots=True)
class RpcReport:
    """All results of a run."""

    plan: RpcPlan
    machine: dict[str, str]
    cases: list[RpcCase] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "machine": self.machine,
            "plan": asdict(self.plan),
            "cases": [asdict(case) for case in self.cases],
        }


def run_rpc_benchmark(plan: RpcPlan, progress: Callable[[str], None] = lambda doing: None) -> RpcReport:
    """Measure all cases.

    Args:
        plan: What to measure.
        progress: Called with the name of each step when it begins.

    Raises:
        BenchmarkError: A process ends, or does not answer.
    """
    report = RpcReport(plan, machine())
    known = [name for name in CONTENDERS if name != "ray" or installed("ray") != "not installed"]
    cases = [
        ("round trip, a number", "s", ["round_trip", plan.calls], 60e-6, known),
        (f"calls with {plan.in_flight:,} in flight", "/s", ["rate", plan.burst, plan.in_flight], 30_000.0, known),
        (f"{plan.nbytes >> 20} MiB tensor argument", "s", ["tensor", plan.transfers, plan.nbytes], 4e-3, known),
    ]
    if plan.fan_outs:
        cases.append(("a call to all of 1,000 objects in 8 processes", "s", ["to_all", plan.fan_outs], 60e-3, ["unix"]))
    with Programs() as programs:
        progress("starting the processes")
        callers = {name: _start(programs, name) for name in known}
        try:
            for each in callers:
                _ask(callers[each], ["round_trip", 1])
                _let_run(callers, each, False)
            for name, unit, command, target, who in cases:
                figures: dict[str, list[float]] = {each: [] for each in who}
                for number in range(plan.rounds):
                    progress(f"{name}: round {number + 1} of {plan.rounds}")
                    for each in who:
                        _let_run(callers, each, True)
                        figures[each].append(_ask(callers[each], command))
                        _let_run(callers, each, False)
                medians = {each: median(values) for each, values in figures.items()}
                measured = {each: value for each, value in medians.items() if not math.isnan(value)}
                report.cases.append(RpcCase(name, unit, measured, target))
        except BenchmarkError as error:
            error.add_note(f"the processes of the benchmark ended{programs.last_words()}")
            raise
        finally:
            # Stopped processes would not end when they are told to.
            for each in callers:
                with contextlib.suppress(ProcessLookupError):
                    _let_run(callers, each, True)
    return report


def _start(programs: Programs, whose: str) -> Program:
    command = python("benchmarks.rpc.caller", whose)
    return programs.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _let_run(callers: Mapping[str, Program], whose: str, runs: bool) -> None:
    """Stop or continue the processes of a contender that polls when it is idle."""
    if whose in _POLLS_WHEN_IDLE:
        os.killpg(callers[whose].pid, signal.SIGCONT if runs else signal.SIGSTOP)


def _ask(caller: Program, command: list[Any]) -> float:
    assert caller.stdin is not None
    assert caller.stdout is not None
    try:
        caller.stdin.write(json.dumps(command) + "\n")
        caller.stdin.flush()
    except BrokenPipeError as cause:
        raise BenchmarkError("a process that makes calls has ended") from cause
    ready, _, _ = select.select([caller.stdout], [], [], _TIMEOUT)
    line = caller.stdout.readline() if ready else ""
    if not line:
        why = "has ended" if ready else f"did not answer for {_TIMEOUT:.0f} s"
        raise BenchmarkError(f"a process that makes calls {why}, in {command[0]}")
    return float(json.loads(line))
