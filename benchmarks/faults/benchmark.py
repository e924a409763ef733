"""Let ranks fail, and measure how soon the others know it and go on."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import random
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from asyncdist.cli.option_types import ListOf, Seconds
from asyncdist.cli.page import Column, Grid, duration, times
from asyncdist.errors import BenchmarkError
from benchmarks.benchmark import Benchmark, option
from benchmarks.grid import Case, GridReport, Line, lines
from benchmarks.laboratory import HOST, hear_all
from benchmarks.processes import PATIENCE, RankProcess

FAULTS = {
    "kill": "a process is killed (SIGKILL)",
    "stop": "a process is stopped (SIGSTOP)",
    "hold": "a native call sleeps and holds the interpreter",
    "kill-host": "a process is killed, between two hosts",
    "cut": "the link of a host goes down",
    "drop": "the packets that a host sends are dropped",
}
"""The faults, with what happens. The last three need two hosts."""
ON_TWO_HOSTS = ("kill-host", "cut", "drop")
ON_ONE_HOST = ("kill", "stop", "hold")
TORCHFT = {"asyncdist under torchft": "asyncdist", "gloo under torchft": "gloo"}
"""The contenders under torchft, with their back ends."""
JOBS = ("join", "throughput")
"""The parts of the benchmark with jobs whose members change: one joins, and members are killed while they train."""
_SETTLE = 0.2
"""Seconds for the ranks to enter their all-reduce before one fails."""
_LONGER = 60.0
"""Seconds for which a native call holds the interpreter after the limit. The rank is killed before."""
_UNDISTURBED, _DISTURBED, _TURNS = 6.0, 8.0, 4
"""The seconds of training without kills and, at least, with kills in each turn, and the number of turns."""

_HEARTBEATS = ListOf("seconds such as 5,0.5", lambda word: float(word) if word.replace(".", "", 1).isdigit() else None)
_TRANSPORTS = ListOf("transports such as shm,tcp", str)


@dataclass(frozen=True)
class FaultsPlan:
    """What to measure. ``every``: seconds between two kills in the part "throughput", for each of which it runs once."""

    parts: tuple[str, ...]
    ranks: int = option(8, "Number of ranks.", click.IntRange(3, 64))
    rounds: int = option(20, "How often each fault happens.")
    transports: tuple[str, ...] = option(
        "shm,tcp", "Transports between the ranks of one host, each a contender.", _TRANSPORTS, name="--transport"
    )
    heartbeats: tuple[float, ...] = option(
        "5,0.5", "Values of ASYNCDIST_HEARTBEAT to measure with.", _HEARTBEATS, name="--heartbeat"
    )
    gloo: bool = option(False, "Also measure torch's gloo.")
    torchft: bool = option(False, "Also measure asyncdist and gloo under torchft; needs torch 2.14 or later.")
    limit: float = option(60.0, "Seconds after which a fault counts as unnoticed.", Seconds(1))
    every: tuple[float, ...] = (15.0, 2.0)


class FaultsBenchmark(Benchmark[FaultsPlan]):
    """Measure how soon ranks know of a failure, and how soon they go on.

    The ranks wait in an all-reduce for one of them, to which PART happens: kill, stop, hold (a native call sleeps and holds
    the interpreter); between two hosts kill-host, cut (the link goes down) and drop (the packets of a host are dropped).
    PART join measures how long a newcomer takes to become a member of a job, and throughput the training of four members
    of which one is killed and replaced at intervals. The default is all parts; those between hosts need root.

    A run of all parts takes half an hour, and needs an idle machine.

    \b
    python -m benchmarks faults --gloo --output docs/bench
    python -m benchmarks faults kill stop --rounds 5 --heartbeat 0.5
    python -m benchmarks faults kill stop cut drop join throughput --torchft
    """

    title = "Failures"
    plan_type = FaultsPlan
    program = Path(__file__).with_name("ranks.py")
    preload = (
        *("torch", "torch.distributed", "asyncdist", "asyncdist.sync"),
        *(("torchft", "asyncdist.torch_backend") if importlib.util.find_spec("torchft") is not None else ()),
    )
    parts = (*FAULTS, *JOBS)
    parts_on_hosts = ON_TWO_HOSTS

    def measure(self) -> Iterator[Case]:
        plan = self.plan
        with self.laboratory.on_hosts(2) if set(plan.parts) & set(ON_TWO_HOSTS) else contextlib.nullcontext():
            for fault in (part for part in plan.parts if part in FAULTS):
                # Heartbeats make no difference where the connections of a process end.
                contenders = ("shm+tcp",) if fault in ON_TWO_HOSTS else plan.transports
                if fault != "hold":
                    contenders = (*contenders, *self._under_torchft)
                beats = plan.heartbeats[:1] if fault.startswith("kill") else plan.heartbeats
                for heartbeat in beats if contenders else ():
                    yield self._case(fault, heartbeat, contenders)
                if plan.gloo:
                    yield self._case(fault, None, ("gloo",))
        for who in (*plan.transports, *self._under_torchft):
            if "join" in plan.parts:
                yield self._join(who)
            if "throughput" in plan.parts:
                yield from (self._throughput(who, every) for every in plan.every)

    @property
    def _under_torchft(self) -> Sequence[str]:
        return tuple(TORCHFT) if self.plan.torchft else ()

    @classmethod
    def file_stem(cls, name: str, plan: FaultsPlan) -> str:
        return f"{name}-torchft" if plan.torchft else name

    @classmethod
    def tables(cls, report: GridReport[FaultsPlan]) -> tuple[list[str], list[Grid]]:
        about, grids = [report.about(f"{report.plan.ranks} ranks")], []
        if report.of(*FAULTS):
            about.append(
                "known to all: from the fault to the error on the last of the ranks that wait. going on: from a rank's "
                "error to the end of its first all-reduce in the new group, on the slowest rank. Medians and longest times"
            )
        if any("gloo" in case.samples for case in report.cases):
            about.append("a rank of gloo ends with its error, as a training script does; gloo's timeout is 30 minutes")
        if report.plan.torchft:
            about.append(
                "under torchft the lighthouse forgets a replica after the heartbeat (5 s if none is named), and operations "
                "time out after it (torchft's default: 60 s)"
            )
        for title, faults in (("One host", ON_ONE_HOST), ("Two hosts", ON_TWO_HOSTS)):
            if cases := report.of(*faults):
                grids.append(
                    Grid.of(
                        title, _fault_columns(report.plan.limit, report.plan.torchft), lines(cases), group_rows=True
                    )
                )
        if report.of("throughput"):
            about.append(
                "steps kept: those that the three survivors of each kill commit until the next one, over those of three "
                "members without kills; the last column counts the replacement, too. A step takes 20 ms"
            )
        if jobs := report.of(*JOBS):
            grids.append(Grid.of("Jobs whose members change", _JOB_COLUMNS, lines(jobs)))
        return about, grids

    # -- faults ----------------------------------------------------------------------------------

    def _case(self, fault: str, heartbeat: float | None, contenders: Sequence[str]) -> Case:
        beat = "" if heartbeat is None else f", heartbeat {heartbeat:g} s"
        case = Case(fault, FAULTS[fault], facts={"heartbeat": heartbeat, "unaware": []})
        for who in contenders:
            for number in range(self.plan.rounds):
                self.laboratory.progress(f"{case.name}; {who}{beat}: {number + 1} of {self.plan.rounds}")
                try:
                    ranks = self._start(fault, who, heartbeat)
                    if not self._round(case, who, ranks):
                        case.facts["unaware"].append(who)
                        case.samples[who] = {}
                        break
                finally:
                    self.laboratory.clear()
                    if self.laboratory.hosts is not None:
                        self.laboratory.hosts.restore(1)
        return case

    def _start(self, fault: str, who: str, heartbeat: float | None) -> list[RankProcess]:
        """Start the ranks; return once each has finished an all-reduce."""
        where, size = self.laboratory.world(), self.plan.ranks
        environment = {} if heartbeat is None else {"ASYNCDIST_HEARTBEAT": str(heartbeat)}
        function = "wait_with_gloo" if who == "gloo" else "wait_with_asyncdist"
        arguments: tuple[Any, ...] = ()
        if who in TORCHFT:
            function, arguments = (
                "wait_under_torchft",
                (TORCHFT[who], *self._lighthouse(heartbeat, 0 if fault in ON_TWO_HOSTS else None)),
            )
        elif fault not in ON_TWO_HOSTS and who != "gloo":
            environment["ASYNCDIST_TRANSPORT"] = who
        ranks = []
        for rank in range(size):
            host = 2 * rank // size if fault in ON_TWO_HOSTS else None
            own = (self._address(host),) if who in TORCHFT else ()
            ranks.append(self.laboratory.start(function, where, rank, size, *arguments, *own, host=host, **environment))
        hear_all(ranks, PATIENCE)
        return ranks

    def _address(self, host: int | None) -> str:
        return HOST if host is None or self.laboratory.hosts is None else self.laboratory.hosts.addresses[host]

    def _lighthouse(self, heartbeat: float | None = None, host: int | None = None) -> tuple[str, float]:
        """Start a lighthouse; return its URL and the seconds after which it forgets replicas, by default torchft's 5."""
        limit = heartbeat or 5.0
        port = self.laboratory.start("serve_lighthouse", limit, host=host).hear()
        return f"http://{self._address(host)}:{port}", limit

    def _round(self, case: Case, who: str, ranks: Sequence[RankProcess]) -> bool:
        """Let the fault happen, and note the times; return False if a rank has not noticed it within the limit."""
        victim, told = ranks[-1], ranks[:-1]
        for each in told:
            each.say(0.0)
        time.sleep(_SETTLE)
        if case.part == "hold":
            victim.say(self.plan.limit + _LONGER)
            begun = victim.hear()
        else:
            begun = time.monotonic()
            self._fail(case.part, victim)
        try:
            failed = [each.hear(max(0.0, begun + self.plan.limit - time.monotonic()))[1] for each in told]
        except TimeoutError:
            return False
        further = {}
        if who != "gloo":
            # Replicas that are cut off from the lighthouse ask it for a minute.
            heard = told[: (self.plan.ranks + 1) // 2] if who in TORCHFT and case.part in ("cut", "drop") else told
            outcomes = hear_all(heard, 3 * PATIENCE if who in TORCHFT else PATIENCE)
            again = [time_of - at for (error, time_of), at in zip(outcomes, failed, strict=False) if error is None]
            if not again and who not in TORCHFT:
                raise BenchmarkError(f"no rank could go on after {case.part!r}: {outcomes}")
            further = {"again": max(again)} if len(again) == len(heard) or who not in TORCHFT else {}
        case.add(who, max(failed) - begun, **further)
        return True

    def _fail(self, fault: str, victim: RankProcess) -> None:
        if fault.startswith("kill"):
            victim.kill()
        elif fault == "stop":
            victim.stop()
        else:
            assert self.laboratory.hosts is not None
            {"cut": self.laboratory.hosts.cut, "drop": self.laboratory.hosts.drop}[fault](1)

    # -- jobs ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _job(self, who: str) -> Iterator[Callable[..., RankProcess]]:
        """Serve the store of a job, or its lighthouse; yield a function that starts a process of it."""
        if who in TORCHFT:
            known, numbers = (TORCHFT[who], *self._lighthouse()), itertools.count()
            where = self.laboratory.world()
            yield lambda function, *sizes: self.laboratory.start(
                f"{function}_under_torchft", where, next(numbers), *known, *sizes
            )
            self.laboratory.clear()
            return
        with self.laboratory.store() as where:
            yield lambda function, *sizes: self.laboratory.start(function, where, *sizes, ASYNCDIST_TRANSPORT=who)

    def _join(self, who: str) -> Case:
        """Measure how long a process takes to become a member, without a state to receive."""
        case, founders = Case("join", "from `join` to the first group"), self.plan.ranks - 1
        with self._job(who) as start:
            members = [start("join", 2, founders) for _ in range(founders)]
            hear_all(members, PATIENCE)
            for each in members:
                each.say("join")
            hear_all(members, PATIENCE)
            for number in range(self.plan.rounds):
                self.laboratory.progress(f"a process joins a job; {who}: {number + 1} of {self.plan.rounds}")
                newcomer = start("join", 2, 2)
                newcomer.hear()
                newcomer.say("join")
                called, joined = newcomer.hear()
                case.add(who, joined - called)
                newcomer.kill()
                newcomer.wait()
                # With a store the members have gone on before the next process could call `join`.
                while who in TORCHFT and members[0].hear()[1] != founders:
                    pass
        return case

    def _throughput(self, who: str, every: float) -> Case:
        """Measure the steps of four members, without kills and then with one kill in ``every`` seconds.

        The figure is the steps that all members commit with kills, over those that as many members commit without
        kills, before and after each turn; ``"survivors"`` leaves out the newest member in both.
        """
        size, kills = 4, max(1, round(_DISTURBED / every))
        name = f"{size} members train, one is killed and replaced every {every:g} s"
        case = Case("throughput", name, "of the throughput", facts={"every": every, "kills": _TURNS * kills})
        self.laboratory.progress(f"members are killed every {every:g} s while they train; {who}")
        with self._job(who) as start:
            members = [start("train", 2, size) for _ in range(size)]
            hear_all(members, PATIENCE)
            chance = random.Random(0)
            # In turns, because the speed of the machine may change.
            undisturbed, steps, kept = [_member_steps(members, _UNDISTURBED)], 0, 0
            for _ in range(_TURNS):
                for _ in range(kills):
                    members.pop(chance.randrange(size)).kill()
                    members.append(start("train", 2, size))
                    steps += (counted := _member_steps(members, every)).total()
                    kept += counted.total() - counted[members[-1]]
                _wait_for_all(members)
                undisturbed.append(_member_steps(members, _UNDISTURBED))
        rates = [(before + after).total() / 2 / _UNDISTURBED for before, after in itertools.pairwise(undisturbed)]
        without = sum(rates) * kills * every
        case.add(who, steps / without, survivors=kept / (without * (size - 1) / size))
        return case


def _fault_columns(limit: float, is_under_torchft: bool) -> list[Column[Line]]:
    def known(write: Callable[[Sequence[float]], str]) -> Callable[[Line], str]:
        return lambda line: f"> {limit:g} s" if line[1] in line[0].facts["unaware"] else write(line[0].of(line[1]))

    def going_on(write: Callable[[Sequence[float]], str], over: str) -> Callable[[Line], str]:
        def text(line: Line) -> str:
            again = line[0].of(line[1], "again")
            return write(again) if again else "—" if line[1] in line[0].facts["unaware"] else over

        return text

    return [
        ("fault", lambda line: line[0].name),
        ("who", lambda line: line[1]),
        ("heartbeat", lambda line: f"{beat:g} s" if (beat := line[0].facts["heartbeat"]) else "—"),
        ("rounds", lambda line: str(len(line[0].of(line[1])) or 1)),
        ("known to all", known(_median)),
        ("longest", known(_longest)),
        ("going on", going_on(_median, "the job is over")),
        ("longest", going_on(_longest, "—")),
        *([("gloo under torchft / it", _times_shorter)] if is_under_torchft else []),
    ]


_JOB_COLUMNS: list[Column[Line]] = [
    ("job", lambda line: line[0].name),
    ("who", lambda line: line[1]),
    ("rounds", lambda line: str(line[0].facts.get("kills", len(line[0].of(line[1]))))),
    ("median", lambda line: _median(line[0].of(line[1])) if line[0].unit == "s" else "—"),
    ("longest", lambda line: _longest(line[0].of(line[1])) if line[0].unit == "s" else "—"),
    ("steps kept by survivors", lambda line: _share(line[0].of(line[1], "survivors"))),
    ("of the throughput without kills", lambda line: "—" if line[0].unit == "s" else f"{line[0].median(line[1]):.0%}"),
]


def _times_shorter(line: Line) -> str:
    """Return the ratio of the medians of gloo under torchft to those of a contender, from the fault until it goes on."""
    case, who = line
    each = [(case.of(name), case.of(name, "again")) for name in ("gloo under torchft", who)]
    if not all(known and again for known, again in each):
        return times(None)
    theirs, ours = (median(known) + median(again) for known, again in each)
    return times(theirs / ours)


def _median(samples: Sequence[float]) -> str:
    return duration(median(samples))


def _share(samples: Sequence[float]) -> str:
    return f"{median(samples):.0%}" if samples else "—"


def _longest(samples: Sequence[float]) -> str:
    return duration(max(samples))


def _wait_for_all(members: Sequence[RankProcess]) -> None:
    """Return once all members train together; raise TimeoutError if they do not."""
    waiting, until = set(members), time.monotonic() + PATIENCE
    while waiting:
        for member in select.select(members, (), (), 1.0)[0]:
            if member.hear()[1] == len(members):
                waiting.discard(member)
        if time.monotonic() > until:
            raise TimeoutError(f"{len(waiting)} of {len(members)} members do not train together after {PATIENCE:g} s")


def _member_steps(members: Sequence[RankProcess], seconds: float) -> Counter[RankProcess]:
    """Count the steps that each member commits within some seconds."""
    steps, end = Counter[RankProcess](), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for member in select.select(members, (), (), left)[0]:
            member.hear()
            steps[member] += 1
    return steps
