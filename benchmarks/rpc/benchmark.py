"""Remote calls, torch's RPC, and Ray where it is installed.

Caller and callee are separate processes. In each round all contenders take turns, so that the machine's other load affects
all alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncdist.cli.machine import installed
from asyncdist.cli.page import Grid
from benchmarks.benchmark import Benchmark, option
from benchmarks.grid import Case, GridReport, figure_within, side_by_side
from benchmarks.laboratory import ask
from benchmarks.processes import RankProcess
from benchmarks.rpc.called import OBJECTS

_POLLS_WHEN_IDLE = ("torch",)
"""Contenders whose idle processes take all of a core each. They are stopped while others take their turn."""
_PROCESSES = 8
"""The processes of the call to all objects."""
CONTENDERS = {"unix": "asyncdist, one host", "tcp": "asyncdist, TCP", "torch": "torch RPC", "ray": "Ray"}


@dataclass(frozen=True)
class RpcPlan:
    """What to measure.

    Attributes:
        bursts: Calls of a turn with many in flight, for each of ``in_flight``.
        nbytes: Bytes of the tensor.
        transfers: Calls with the tensor in a turn.
        fan_outs: Calls of all objects in a turn; 0 to leave them out.
    """

    rounds: int = option(7, "Rounds in which all contenders take turns.")
    calls: int = option(1000, "Calls one after another in a turn.")
    in_flight: int = option(1000, "Number of concurrent calls.")
    bursts: int = 20
    nbytes: int = 16 << 20
    transfers: int = 20
    fan_outs: int = 10


class RpcBenchmark(Benchmark[RpcPlan]):
    """Compare remote calls with torch's RPC over TensorPipe, and with Ray's async actors where Ray is installed.

    The cases are a round trip with a number, calls per second with many in flight, a tensor of 16 MiB as an argument, and a
    call to 1,000 objects in 8 processes. asyncdist calls over a Unix socket with shared memory, and over TCP. A run takes
    two minutes and needs an idle machine.

    \b
    python -m benchmarks rpc --output docs/bench
    python -m benchmarks rpc --rounds 3
    """

    title = "Remote calls"
    plan_type = RpcPlan
    program = Path(__file__).with_name("processes.py")
    preload = ("torch.distributed.rpc", "asyncdist.rpc")

    def measure(self) -> Iterator[Case]:
        plan, known = self.plan, [name for name in CONTENDERS if name != "ray" or installed("ray") != "not installed"]
        burst, objects = plan.bursts * plan.in_flight, _PROCESSES * OBJECTS
        to_all = f"a call to all of {objects:,} objects in {_PROCESSES} processes"
        self.laboratory.progress("starting the processes")
        with self.laboratory.store() as store:
            processes = {name: self._start(name, f"{store}-{name}") for name in known}
            for who in known:
                self._turn(processes, who, "round_trip", 1)
            for name, unit, order, target in (
                ("round trip, a number", "s", ("round_trip", plan.calls), 60e-6),
                (f"calls with {plan.in_flight:,} in flight", "/s", ("rate", burst, plan.in_flight), 30_000.0),
                (f"{plan.nbytes >> 20} MiB tensor argument", "s", ("tensor", plan.transfers, plan.nbytes), 4e-3),
                (to_all, "s", ("to_all", plan.fan_outs, objects), 60e-3),
            ):  # fmt: skip
                case = Case("calls", name, unit, targets=[figure_within(target, "unix", unit)])
                if order[0] == "to_all":
                    if not plan.fan_outs:
                        return
                    for number in range(1, _PROCESSES):
                        self.laboratory.start("serve", "unix", f"{store}-unix", number)
                for number in range(plan.rounds):
                    self.laboratory.progress(f"{name}: round {number + 1} of {plan.rounds}")
                    for who in known if order[0] != "to_all" else ["unix"]:
                        case.add(who, self._turn(processes, who, *order))
                yield case

    @classmethod
    def tables(cls, report: GridReport[RpcPlan]) -> tuple[list[str], list[Grid]]:
        about = [
            report.about(f"medians of {report.plan.rounds} rounds in which all contenders took turns"),
            "the caller and the callee are Python processes; the target is that of asyncdist on one host",
            "idle processes of torch RPC take all of a core each, so they are stopped while the others take their turns",
        ]
        return about, [side_by_side("", report.cases, CONTENDERS, ("unix", "torch"))]

    def _start(self, whose: str, job: str) -> list[RankProcess]:
        """Start the caller and the callee of a contender. Ray starts callees of its own."""
        where = self.laboratory.world() if whose == "torch" else job
        callees = [] if whose == "ray" else [self.laboratory.start("serve", whose, where, 0)]
        return [self.laboratory.start("call", whose, where), *callees]

    def _turn(self, processes: dict[str, list[RankProcess]], who: str, *order: object) -> float:
        for each in processes[who] if who in _POLLS_WHEN_IDLE else ():
            each.resume()
        answer = float(ask(processes[who][0], *order))
        for each in processes[who] if who in _POLLS_WHEN_IDLE else ():
            each.stop()
        return answer
