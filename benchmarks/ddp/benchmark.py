"""Start the ranks of a benchmark of data-parallel training and collect their figures. Called by `asyncdist.cli`."""

from __future__ import annotations

import contextlib
import secrets
import select
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from asyncdist.cli.machine import machine
from asyncdist.errors import BenchmarkError
from asyncdist.testing.hosts import LINK, Hosts
from asyncdist.testing.processes import Nursery, RankEndedError, RankProcess
from benchmarks.ddp.plan import ALONE, CONTENDERS, KEPT, MODELS, ON_TWO_HOSTS, PARTS, STEPS, DdpPlan
from benchmarks.ddp.result import DdpReport, MemoryCase, StepCase, StepFigures, TrainingCase

_RANKS = Path(__file__).with_name("ranks.py")
_PATIENCE = 3600.0
_SAMPLE = 0.01
"""Seconds between two looks at the memory of the ranks."""
_MEMORY_MODELS = ("large", "convolutions", "transformer")
_MEMORY_CONTENDERS = ("asyncdist", "gloo", ALONE, KEPT)
_TRAINED = (ALONE, "data parallel", "diloco")

Progress = Callable[[str], None]


def run_ddp_benchmark(plan: DdpPlan, progress: Progress) -> DdpReport:
    """Execute a plan in new processes and return the report.

    Raises:
        BenchmarkError: A rank fails, or contenders or ranks end with different weights.
        HostsUnavailableError: A part needs two hosts, and this machine cannot make them.
    """
    report = DdpReport(plan, machine())
    preload = (
        "torch.distributed",
        "torch._dynamo",
        "torch.distributed.tensor",
        "asyncdist.torch_backend",
        "asyncdist.ddp",
    )
    with tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder, contextlib.ExitStack() as stack:
        nursery = stack.enter_context(Nursery(preload))
        hosts = stack.enter_context(Hosts(2)) if set(plan.parts) & set(ON_TWO_HOSTS) else None
        bench = _DdpBenchmark(plan, nursery, hosts, Path(folder), progress)
        try:
            for part in plan.parts:
                if part in STEPS:
                    report.steps += [bench.steps(part, model) for model in STEPS[part].models]
                elif part == "memory":
                    report.memory = bench.memory()
                else:
                    report.training = bench.few_exchanges()
        except (RankEndedError, TimeoutError) as error:
            raise BenchmarkError(f"the benchmark of data-parallel training failed: {error}") from error
    return report


class _DdpBenchmark:
    def __init__(self, plan: DdpPlan, nursery: Nursery, hosts: Hosts | None, folder: Path, progress: Progress) -> None:
        self._plan, self._nursery, self._hosts, self._folder, self._progress = plan, nursery, hosts, folder, progress
        self._token = secrets.token_hex(16)
        self._worlds = 0

    def _start(self, function: str, size: int, *arguments: Any, two_hosts: bool = False) -> list[RankProcess]:
        self._worlds += 1
        where = f"file://{self._folder}/world{self._worlds}"
        ranks = []
        for rank in range(size):
            environment, namespace = {"ASYNCDIST_TOKEN": self._token, "GLOO_SOCKET_IFNAME": "lo"}, None
            if two_hosts:
                assert self._hosts is not None
                namespace = self._hosts.namespaces[rank]
                environment |= {"ASYNCDIST_HOST": f"host{rank}", "GLOO_SOCKET_IFNAME": LINK}
            ranks.append(
                self._nursery.start(_RANKS, function, where, rank, size, namespace, *arguments, environment=environment)
            )
        return ranks

    def _limit(self, rate: str | None) -> None:
        assert self._hosts is not None
        for host in range(2):
            self._hosts.restore(host)
        if rate is not None:
            self._hosts.shape(rate)

    # -- steps -------------------------------------------------------------------------------------

    def steps(self, part: str, model: str) -> StepCase:
        """Time the training steps of one model in every round."""
        contenders = STEPS[part].contenders
        case = StepCase(part, model, contenders={who: StepFigures() for who in contenders})
        two_hosts = part in ON_TWO_HOSTS
        if two_hosts:
            self._limit(self._plan.rate)
        rounds = self._plan.rounds_of(part)
        for number in range(rounds):
            self._progress(f"{PARTS[part]}, {MODELS[model].title}: {number + 1} of {rounds}")
            size = 2 if two_hosts else 1 if part == "small" else self._plan.ranks
            ranks = self._start("time_steps", size, model, contenders, self._plan.steps, two_hosts=two_hosts)
            (case.gradient_nbytes, found), *_ = _all_say(ranks)
            for each in ranks:
                each.wait()
            for who, (seconds, hidden, forward, sent, note) in found.items():
                figures = case.contenders[who]
                figures.seconds.append(median(seconds))
                figures.sent.append(median(sent))
                figures.note = note
                if hidden:
                    figures.hidden.append(median(hidden))
                    figures.forward.append(median(forward))
            self._nursery.clear()
        return case

    # -- memory ------------------------------------------------------------------------------------

    def memory(self) -> list[MemoryCase]:
        """Measure the memory of each contender with each model."""
        cases = [MemoryCase(model, who) for model in _MEMORY_MODELS for who in _MEMORY_CONTENDERS]
        rounds = self._plan.rounds_of("memory")
        for number in range(rounds):
            for case in cases:
                who = CONTENDERS[case.contender]
                self._progress(f"{PARTS['memory']}, {who}: {number + 1} of {rounds}")
                ranks = self._start("use_memory", self._plan.ranks, case.model, case.contender)
                _all_say(ranks)
                before = most = _memory_of(ranks)
                for each in ranks:
                    each.say("begin")
                while len(select.select(ranks, (), (), 0)[0]) < len(ranks):
                    most = max(most, _memory_of(ranks))
                    time.sleep(_SAMPLE)
                case.largest_bucket = max(_all_say(ranks))
                case.peak.append((most - before) // len(ranks))
                for each in ranks:
                    each.say("end")
                for each in ranks:
                    each.wait()
                self._nursery.clear()
        return cases

    # -- few exchanges -----------------------------------------------------------------------------

    def few_exchanges(self) -> list[TrainingCase]:
        """Train without exchanges, with an exchange in each step, and with few; the last two end with one model."""
        cases = [TrainingCase(who) for who in _TRAINED]
        rounds = self._plan.rounds_of("diloco")
        for number in range(rounds):
            for case in cases:
                self._progress(f"{PARTS['diloco']}, {case.who}: {number + 1} of {rounds}")
                self._limit(self._plan.slow_rate if case.who == "diloco" else None)
                arguments = case.who, self._plan.every, self._plan.outer_steps
                ranks = self._start("train_with_few_exchanges", 2, *arguments, two_hosts=True)
                (seconds, loss, sent, waited), *_ = _all_say(ranks)
                for each in ranks:
                    each.say("end")
                for each in ranks:
                    each.wait()
                case.seconds.append(seconds)
                case.losses.append(loss)
                case.sent.append(sent)
                case.waited.append(waited)
                self._nursery.clear()
        return cases


def _all_say(ranks: Sequence[RankProcess]) -> list[Any]:
    """Return what each rank sends next."""
    return [each.hear(_PATIENCE) for each in ranks]


def _memory_of(ranks: Sequence[RankProcess]) -> int:
    """Return the bytes of memory of all ranks; memory that they share counts once (Linux: proportional set size)."""
    total = 0
    for rank in ranks:
        for line in Path(f"/proc/{rank.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total
