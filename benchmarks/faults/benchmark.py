"""Let ranks fail, and measure how soon the others know it and go on. Called by `benchmarks.faults.command`."""

from __future__ import annotations

import contextlib
import itertools
import random
import secrets
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncdist.base.background_loop import background_loop
from asyncdist.cli.machine import machine
from asyncdist.errors import BenchmarkError
from asyncdist.store.server.server import StoreServer
from asyncdist.testing.hosts import LINK, Hosts
from asyncdist.testing.processes import PATIENCE, Nursery, RankEndedError, RankProcess
from benchmarks.faults.plan import FAULTS, ON_TWO_HOSTS, FaultsPlan

_RANKS = Path(__file__).with_name("ranks.py")
_SETTLE = 0.2
"""Seconds for the ranks to enter their all-reduce before one fails."""
_LONGER = 60.0
"""Seconds for which a native call holds the interpreter after the limit. The rank is killed before."""
_UNDISTURBED, _DISTURBED, _TURNS = 6.0, 8.0, 4
"""The seconds of training without kills and, at least, with kills in each turn, and the number of turns."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FaultCase:
    """The times of one contender after one fault.

    Attributes:
        fault: A name from `plan.FAULTS`.
        contender: ``"shm"``, ``"tcp"``, ``"shm+tcp"`` (between hosts) or ``"gloo"``.
        heartbeat: The seconds of ASYNCDIST_HEARTBEAT; None for gloo.
        told: For each round the seconds from the fault to the error on the last rank.
        again: For each round the seconds from a rank's error to its first all-reduce in the new group, on the slowest rank.
        unaware: The number of rounds in which a rank had no error within the limit; the case ends with the first.
    """

    fault: str
    contender: str
    heartbeat: float | None
    told: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    unaware: int = 0


@dataclass(frozen=True, slots=True)
class JobCase:
    """What a job whose members change did.

    Attributes:
        part: ``"join"``, or ``"throughput"``.
        contender: The transport.
        every: The seconds between two kills; None in the part ``"join"``.
        seconds: ``"join"``: for each round the seconds from the call of `join` to the newcomer's first group.
        share: ``"throughput"``: the committed steps of all members, over those that as many members commit without kills.
        kills: The number of kills.
    """

    part: str
    contender: str
    every: float | None = None
    seconds: list[float] = field(default_factory=list)
    share: float | None = None
    kills: int = 0


@dataclass(slots=True)
class FaultsReport:
    """All results of a run."""

    plan: FaultsPlan
    machine: dict[str, str]
    faults: list[FaultCase] = field(default_factory=list)
    jobs: list[JobCase] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in seconds."""
        return asdict(self)


def run_faults_benchmark(plan: FaultsPlan, progress: Progress) -> FaultsReport:
    """Execute a plan in new processes and return the report.

    Raises:
        BenchmarkError: A rank fails in another way than the plan wants.
        HostsUnavailableError: A part needs two hosts, and this machine cannot make them.
    """
    report = FaultsReport(plan, machine())
    with tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder, contextlib.ExitStack() as stack:
        nursery = stack.enter_context(Nursery(("torch", "torch.distributed", "asyncdist", "asyncdist.sync")))
        hosts = stack.enter_context(Hosts(2)) if set(plan.parts) & set(ON_TWO_HOSTS) else None
        bench = _FaultsBenchmark(plan, nursery, hosts, Path(folder), progress)
        try:
            for fault in (part for part in plan.parts if part in FAULTS):
                report.faults += bench.cases(fault)
            for transport in plan.transports:
                if "join" in plan.parts:
                    report.jobs.append(bench.join(transport))
                if "throughput" in plan.parts:
                    report.jobs += [bench.throughput(transport, every) for every in plan.every]
        except (RankEndedError, TimeoutError) as error:
            raise BenchmarkError(f"the benchmark of failures failed: {error}") from error
    return report


class _FaultsBenchmark:
    def __init__(
        self, plan: FaultsPlan, nursery: Nursery, hosts: Hosts | None, folder: Path, progress: Progress
    ) -> None:
        self._plan, self._nursery, self._hosts, self._folder, self._progress = plan, nursery, hosts, folder, progress
        self._environment = {"ASYNCDIST_TOKEN": secrets.token_hex(16)}
        self._worlds = 0

    # -- faults ----------------------------------------------------------------------------------

    def cases(self, fault: str) -> Iterator[FaultCase]:
        """Yield the cases of a fault. Heartbeats make no difference where the connections of a process end."""
        heartbeats = self._plan.heartbeats[:1] if fault.startswith("kill") else self._plan.heartbeats
        for contender in ("shm+tcp",) if fault in ON_TWO_HOSTS else self._plan.transports:
            for heartbeat in heartbeats:
                yield self._case(FaultCase(fault, contender, heartbeat))
        if self._plan.gloo:
            yield self._case(FaultCase(fault, "gloo", None))

    def _case(self, case: FaultCase) -> FaultCase:
        for number in range(self._plan.rounds):
            beat = f", heartbeat {case.heartbeat:g} s" if case.heartbeat else ""
            self._progress(f"{FAULTS[case.fault]}; {case.contender}{beat}: {number + 1} of {self._plan.rounds}")
            ranks = self._start(case)
            try:
                if not self._round(case, ranks):
                    return FaultCase(case.fault, case.contender, case.heartbeat, unaware=1)
            finally:
                self._nursery.clear()
                if self._hosts is not None:
                    self._hosts.restore(1)
        return case

    def _start(self, case: FaultCase) -> list[RankProcess]:
        """Start the ranks; return once each has finished an all-reduce."""
        self._worlds += 1
        where, size = f"file://{self._folder}/world{self._worlds}", self._plan.ranks
        function, ranks = "wait_with_gloo" if case.contender == "gloo" else "wait_with_asyncdist", []
        for rank in range(size):
            environment, namespace = dict(self._environment), None
            if case.heartbeat is not None:
                environment["ASYNCDIST_HEARTBEAT"] = str(case.heartbeat)
            if case.fault in ON_TWO_HOSTS:
                assert self._hosts is not None
                host = 2 * rank // size
                namespace, environment["ASYNCDIST_HOST"] = self._hosts.namespaces[host], f"host{host}"
            elif case.contender != "gloo":
                environment["ASYNCDIST_TRANSPORT"] = case.contender
            environment["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else LINK
            ranks.append(self._nursery.start(_RANKS, function, where, rank, size, namespace, environment=environment))
        for each in ranks:
            each.hear()
        return ranks

    def _round(self, case: FaultCase, ranks: Sequence[RankProcess]) -> bool:
        """Let the fault happen, and note the times; return False if a rank has not noticed it within the limit."""
        victim, told = ranks[-1], ranks[:-1]
        for each in told:
            each.say(0.0)
        if case.fault == "hold":
            time.sleep(_SETTLE)
            victim.say(self._plan.limit + _LONGER)
            begun = victim.hear()
        else:
            time.sleep(_SETTLE)
            begun = time.monotonic()
            self._fail(case.fault, victim)
        try:
            failed = [each.hear(max(0.0, begun + self._plan.limit - time.monotonic()))[1] for each in told]
        except TimeoutError:
            return False
        case.told.append(max(failed) - begun)
        if case.contender != "gloo":
            outcomes = [each.hear() for each in told]
            again = [time_of - at for (error, time_of), at in zip(outcomes, failed, strict=True) if error is None]
            if not again:
                raise BenchmarkError(f"no rank could go on after {case.fault!r}: {outcomes}")
            case.again.append(max(again))
        return True

    def _fail(self, fault: str, victim: RankProcess) -> None:
        match fault:
            case "kill" | "kill-host":
                victim.kill()
            case "stop":
                victim.stop()
            case "cut":
                assert self._hosts is not None
                self._hosts.cut(1)
            case "drop":
                assert self._hosts is not None
                self._hosts.drop(1)

    # -- jobs ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _job(self, transport: str) -> Iterator[Callable[..., RankProcess]]:
        """Serve the store of a job; yield a function that starts a process of it."""
        server = background_loop().run(StoreServer.start("127.0.0.1", 0))
        where = f"asyncdist://127.0.0.1:{server.port}/job"
        environment = {"ASYNCDIST_TRANSPORT": transport}

        def start(function: str, min_size: int, start_size: int) -> RankProcess:
            return self._nursery.start(_RANKS, function, where, min_size, start_size, environment=environment)

        try:
            yield start
        finally:
            self._nursery.clear()
            background_loop().run(server.close())

    def join(self, transport: str) -> JobCase:
        """Measure how long a process takes to become a member, without a state to receive."""
        case = JobCase("join", transport)
        with self._job(transport) as start:
            founders = [start("join", 2, self._plan.ranks - 1) for _ in range(self._plan.ranks - 1)]
            for each in founders:
                each.hear()
            for each in founders:
                each.say("join")
            for each in founders:
                each.hear()
            for number in range(self._plan.rounds):
                self._progress(f"a process joins a job; {transport}: {number + 1} of {self._plan.rounds}")
                newcomer = start("join", 2, 2)
                newcomer.hear()
                newcomer.say("join")
                called, joined = newcomer.hear()
                case.seconds.append(joined - called)
                newcomer.kill()
                newcomer.wait()
        return case

    def throughput(self, transport: str, every: float) -> JobCase:
        """Measure the steps of four members, without kills and then with one kill in ``every`` seconds."""
        size = 4
        self._progress(f"members are killed every {every:g} s while they train; {transport}")
        with self._job(transport) as start:
            members = [start("train", 2, size) for _ in range(size)]
            for each in members:
                each.hear()
            chance, steps, kills = random.Random(0), 0, max(1, round(_DISTURBED / every))
            # In turns, because the speed of the machine may change.
            undisturbed = [_member_steps(members, _UNDISTURBED)]
            for _ in range(_TURNS):
                for _ in range(kills):
                    members.pop(chance.randrange(size)).kill()
                    members.append(start("train", 2, size))
                    steps += _member_steps(members, every)
                _wait_for_all(members)
                undisturbed.append(_member_steps(members, _UNDISTURBED))
        rates = [(before + after) / 2 / _UNDISTURBED for before, after in itertools.pairwise(undisturbed)]
        return JobCase("throughput", transport, every, share=steps / (sum(rates) * kills * every), kills=_TURNS * kills)


def _wait_for_all(members: Sequence[RankProcess]) -> None:
    """Return once all members train together; raise TimeoutError if they do not."""
    waiting, until = set(members), time.monotonic() + PATIENCE
    while waiting:
        for member in select.select(members, (), (), 1.0)[0]:
            if member.hear()[1] == len(members):
                waiting.discard(member)
        if time.monotonic() > until:
            raise TimeoutError(f"{len(waiting)} of {len(members)} members do not train together after {PATIENCE:g} s")


def _member_steps(members: Sequence[RankProcess], seconds: float) -> int:
    """Count the steps that members commit within some seconds, each once for each member."""
    steps, end = 0, time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        for member in select.select(members, (), (), left)[0]:
            member.hear()
            steps += 1
    return steps
