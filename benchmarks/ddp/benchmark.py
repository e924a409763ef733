"""Data-parallel training: steps on one host and between two, memory, and training with few exchanges."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from asyncdist.cli.bench.limits import rate_in_bytes
from asyncdist.cli.option_types import rate as link_rate
from asyncdist.cli.page import Column, Grid, duration, times
from benchmarks.benchmark import Benchmark, option
from benchmarks.ddp.names import ALONE, CONTENDERS, HEADS, KEPT, MODELS, ON_TWO_HOSTS, PARTS, STEPS
from benchmarks.grid import Case, GridReport, Line, lines, mib, spread
from benchmarks.laboratory import hear_all
from benchmarks.processes import RankProcess

_PATIENCE = 3600.0
_SAMPLE = 0.01
"""Seconds between two looks at the memory of the ranks."""
_ROUNDS_PER_ROUND = {"steps": 1.0, "small": 1.0, "sharded": 0.3, "hosts": 0.5, "memory": 0.2, "diloco": 0.1}
"""Rounds of each part for a round of the part "steps"; a round of the others takes longer, or varies less."""
_MEMORY_MODELS = ("large", "convolutions", "transformer")
_MEMORY_CONTENDERS = ("asyncdist", "gloo", ALONE, KEPT)
_TRAINED = {ALONE: "each member alone", "data parallel": "data parallel, no limit", "diloco": "DiLoCo, int8, slow link"}
"""The contenders of the part "diloco". The second one sends a hundred times the bytes, on a link without a limit."""


@dataclass(frozen=True)
class DdpPlan:
    """What to measure. Tables show medians of the rounds' medians."""

    parts: tuple[str, ...] = tuple(PARTS)
    rounds: int = option(
        10,
        "Rounds of steps and small, each with new processes; hosts has half, sharded a third, memory a fifth, diloco a "
        "tenth of them.",
    )
    steps: int = option(10, "Steps of a contender in a round.")
    ranks: int = option(2, "Number of ranks on one host.", click.IntRange(2, 64))
    rate: str = option("1gbit", "Link between the hosts of `hosts`.", link_rate)
    slow_rate: str = option("100mbit", "Link between the hosts of `diloco`.", link_rate)
    every: int = option(100, "Inner steps between two outer steps.", click.IntRange(5))
    outer_steps: int = option(10, "Outer steps of `diloco`.")

    def rounds_of(self, part: str) -> int:
        """Return how often each case of a part is measured: at least once."""
        return max(1, round(self.rounds * _ROUNDS_PER_ROUND[part]))


class DdpBenchmark(Benchmark[DdpPlan]):
    """Measure data-parallel training against stock PyTorch and against training without communication.

    PART is steps (training steps on one host), small (a model of 1,000 small parameters, in a world of one), sharded (steps
    of torch's FSDP2 and tensor parallel on one host), hosts (training steps between two hosts, whose link is limited),
    memory (above model, gradients and optimizer) or diloco (training with few exchanges over a slow link). The default is
    all parts; those with two hosts need root. Contenders take turns step by step, and must end with the same weights.

    A run of all parts needs an idle machine with a core for each rank, and takes about half an hour there.

    \b
    python -m benchmarks ddp --output docs/bench
    python -m benchmarks ddp steps small --rounds 3
    """

    title = "Data-parallel training"
    plan_type = DdpPlan
    program = Path(__file__).with_name("ranks.py")
    preload = (
        "torch.distributed",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "asyncdist.torch_backend",
        "asyncdist.ddp",
    )
    parts = tuple(PARTS)
    parts_on_hosts = ON_TWO_HOSTS

    def measure(self) -> Iterator[Case]:
        parts = self.plan.parts
        with self.laboratory.on_hosts(2) if set(parts) & set(ON_TWO_HOSTS) else contextlib.nullcontext():
            for part in parts:
                if part in STEPS:
                    yield from (self._steps(part, model) for model in STEPS[part].models if self._is_possible(model))
                elif part == "memory":
                    yield from self._memory()
                else:
                    yield self._few_exchanges()

    @classmethod
    def tables(cls, report: GridReport[DdpPlan]) -> tuple[list[str], list[Grid]]:
        plan = report.plan
        rounds = ", ".join(f"{plan.rounds_of(part)} of {part}" for part in plan.parts)
        grids = []
        for case in report.of(*STEPS):
            one_host = f"One host, {plan.ranks} ranks"
            titles = {"steps": one_host, "small": "A world of one", "sharded": f"{one_host}, sharded"}
            title = titles.get(case.part)
            columns = _step_columns() if title else _host_columns(plan.rate)
            grids.append(Grid.of(title or f"Two hosts, {plan.rate}", columns, lines([case]), group_rows=True))
        if memory := report.of("memory"):
            grids.append(Grid.of("Memory", _MEMORY_COLUMNS, lines(memory), group_rows=True))
        if training := report.of("diloco"):
            grids.append(Grid.of(f"Few exchanges, {plan.slow_rate}", _TRAINING_COLUMNS, lines(training)))
        return [report.about(f"rounds: {rounds}; one thread per rank; float32"), *_explained(report)], grids

    def _start(self, function: str, size: int, *arguments: Any, two_hosts: bool = False) -> list[RankProcess]:
        where = self.laboratory.world()
        return [
            self.laboratory.start(function, where, rank, size, *arguments, host=rank if two_hosts else None)
            for rank in range(size)
        ]

    def _is_possible(self, model: str) -> bool:
        is_possible = model != "tensor_parallel" or HEADS % self.plan.ranks == 0
        if not is_possible:
            click.echo(f"tensor parallel is left out: {self.plan.ranks} ranks cannot share {HEADS} heads", err=True)
        return is_possible

    def _limit(self, rate: str | None) -> None:
        assert self.laboratory.hosts is not None
        for host in range(2):
            self.laboratory.hosts.restore(host)
        if rate is not None:
            self.laboratory.hosts.shape(rate)

    def _steps(self, part: str, model: str) -> Case:
        """Time the training steps of one model in every round."""
        contenders, rounds = STEPS[part].contenders, self.plan.rounds_of(part)
        case = Case(part, MODELS[model], facts={"model": model, "notes": {}})
        if two_hosts := part in ON_TWO_HOSTS:
            self._limit(self.plan.rate)
        for number in range(rounds):
            self.laboratory.progress(f"{PARTS[part]}, {case.name}: {number + 1} of {rounds}")
            size = 2 if two_hosts else 1 if part == "small" else self.plan.ranks
            ranks = self._start("time_steps", size, model, contenders, self.plan.steps, two_hosts=two_hosts)
            (case.facts["gradient_nbytes"], found), *_ = hear_all(ranks, _PATIENCE)
            self.laboratory.end(ranks)
            for who, (seconds, hidden, forward, sent, note) in found.items():
                further = {"hidden": median(hidden), "forward": median(forward)} if hidden else {}
                case.add(who, median(seconds), sent=median(sent), **further)
                case.facts["notes"][who] = note
        return case

    def _memory(self) -> list[Case]:
        """Measure the memory of each contender with each model."""
        cases = [
            Case("memory", MODELS[model], "B", facts={"model": model, "largest_bucket": {}}) for model in _MEMORY_MODELS
        ]
        rounds = self.plan.rounds_of("memory")
        for number in range(rounds):
            for case, who in [(case, who) for case in cases for who in _MEMORY_CONTENDERS]:
                self.laboratory.progress(f"{PARTS['memory']}, {CONTENDERS[who]}: {number + 1} of {rounds}")
                ranks = self._start("use_memory", self.plan.ranks, case.facts["model"], who)
                hear_all(ranks, _PATIENCE)
                before = most = _memory_of(ranks)
                for each in ranks:
                    each.say("begin")
                while len(select.select(ranks, (), (), 0)[0]) < len(ranks):
                    most = max(most, _memory_of(ranks))
                    time.sleep(_SAMPLE)
                case.facts["largest_bucket"][who] = max(hear_all(ranks, _PATIENCE))
                case.add(who, (most - before) // len(ranks))
                self.laboratory.end(ranks)
        return cases

    def _few_exchanges(self) -> Case:
        """Train without exchanges, with an exchange in each step, and with few; the last two end with one model."""
        case, rounds = Case("diloco", PARTS["diloco"]), self.plan.rounds_of("diloco")
        for number in range(rounds):
            for who in _TRAINED:
                self.laboratory.progress(f"{case.name}, {who}: {number + 1} of {rounds}")
                self._limit(self.plan.slow_rate if who == "diloco" else None)
                arguments = who, self.plan.every, self.plan.outer_steps
                ranks = self._start("train_with_few_exchanges", 2, *arguments, two_hosts=True)
                (seconds, loss, sent, waited), *_ = hear_all(ranks, _PATIENCE)
                self.laboratory.end(ranks)
                case.add(who, seconds, loss=loss, sent=sent, waited=waited)
        return case


def _memory_of(ranks: Sequence[RankProcess]) -> int:
    """Return the bytes of memory of all ranks; memory that they share counts once (Linux: proportional set size)."""
    total = 0
    for rank in ranks:
        for line in Path(f"/proc/{rank.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


# -- the page ----------------------------------------------------------------------------------------


def over_bound(case: Case, who: str, rate: str, *, after_forward: bool = False) -> list[float]:
    """Return the time of a contender over the longer one of computation and transfer, for each round.

    These are the step without communication, and the bytes that the contender has sent over a link of this rate.

    Args:
        case: Steps between hosts.
        after_forward: Let the transfer begin after the forward of asyncdist's class: before, there are no gradients.
    """
    alone, sent = case.of(ALONE), case.of(who, "sent")
    delays = case.of("asyncdist", "forward") if after_forward else [0.0] * len(sent)
    return [
        seconds / max(compute, delay + nbytes / rate_in_bytes(rate))
        for seconds, nbytes, compute, delay in zip(case.of(who), sent, alone, delays, strict=True)
    ]


def _explained(report: GridReport[DdpPlan]) -> list[str]:
    texts = {
        (
            *STEPS,
        ): "Contenders take turns step by step in the same processes, and end with the same weights; each round has "
        "new processes. Times and ratios are medians of the rounds' medians. × alone: over the step without communication, "
        "which all ranks take at the same time. hidden: the share of the all-reduces' time that passed during backward",
        (
            "hosts",
        ): "× bound: over the longer one of the step without communication, and of the bytes sent over the rate of "
        "the link. × limit: the same, but the bytes follow the forward, because no gradient exists before; range: its "
        "range. MB sent: all bytes on the link of one host in a step",
        (
            "memory",
        ): "peak: memory of a rank above that before the first step; shared memory counts once. above alone: more "
        "than without communication, which frees all gradients between two steps",
        (
            "diloco",
        ): f"few exchanges: {report.plan.outer_steps} outer steps of {report.plan.every} inner steps, an MLP of "
        f"25 M parameters; the slow link has {report.plan.slow_rate}. rate: inner steps per second, over those of a member "
        "alone",
    }
    return [text for parts, text in texts.items() if report.of(*parts)]


def _step_columns() -> list[Column[Line]]:
    def over_gloo(line: Line) -> str:
        case, who = line
        return times(median(case.ratios("gloo", who))) if "gloo" in case.samples else "—"

    return [
        *_who("training step"),
        ("median", lambda line: duration(line[0].median(line[1]))),
        ("× alone", lambda line: times(median(line[0].ratios(line[1], ALONE)))),
        ("range", lambda line: spread(line[0].ratios(line[1], ALONE))),
        ("gloo / it", over_gloo),
        ("hidden", _hidden),
    ]


def _host_columns(rate: str) -> list[Column[Line]]:
    return [
        *_who("training step"),
        ("median", lambda line: duration(line[0].median(line[1]))),
        ("MB sent", lambda line: f"{line[0].median(line[1], 'sent') / 1e6:.2f}"),
        ("of the bytes", lambda line: f"{line[0].median(line[1], 'sent') / line[0].median('asyncdist', 'sent'):.2f}"),
        ("× bound", lambda line: times(median(over_bound(*line, rate)))),
        ("× limit", lambda line: times(median(over_bound(*line, rate, after_forward=True)))),
        ("range", lambda line: spread(over_bound(*line, rate, after_forward=True))),
        ("hidden", _hidden),
    ]


def _who(heading: str) -> list[Column[Line]]:
    return [(heading, lambda line: line[0].name), ("who", lambda line: CONTENDERS[line[1]])]


def _hidden(line: Line) -> str:
    return f"{line[0].median(line[1], 'hidden'):.0%}" if line[0].of(line[1], "hidden") else "—"


_MEMORY_COLUMNS: list[Column[Line]] = [
    *_who("model"),
    ("peak", lambda line: mib(line[0].median(line[1]))),
    ("above alone", lambda line: mib(line[0].median(line[1]) - line[0].median(ALONE), "+")),
    ("largest bucket", lambda line: mib(nbytes) if (nbytes := line[0].facts["largest_bucket"][line[1]]) else "—"),
]
_TRAINING_COLUMNS: list[Column[Line]] = [
    ("training", lambda line: _TRAINED[line[1]]),
    ("time", lambda line: duration(line[0].median(line[1]))),
    ("rate", lambda line: f"{median(line[0].ratios(ALONE, line[1])):.1%}"),
    ("held-out loss", lambda line: f"{line[0].median(line[1], 'loss'):.3f}"),
    ("range of the loss", lambda line: "{:.3f} to {:.3f}".format(*_ends(line[0].of(line[1], "loss")))),
    ("MB sent", lambda line: f"{line[0].median(line[1], 'sent') / 1e6:,.1f}"),
    ("waited", lambda line: duration(line[0].median(line[1], "waited"))),
]


def _ends(samples: Sequence[float]) -> tuple[float, float]:
    return min(samples), max(samples)
