"""The results of ``python -m benchmarks ddp`` as a page."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from asyncdist.cli.page import Grid, Page, about_machine, duration, times
from benchmarks.ddp.plan import ALONE, CONTENDERS, MODELS, DdpPlan
from benchmarks.ddp.result import DdpReport, MemoryCase, StepCase, TrainingCase

_STEP_COLUMNS = ("training step", "who", "median", "× alone", "range", "gloo / it", "hidden")
_HOST_COLUMNS = ("training step", "who", "median", "MB sent", "of the bytes", "× bound", "× limit", "range", "hidden")
_MEMORY_COLUMNS = ("model", "who", "peak", "above alone", "largest bucket")
_TRAINING_COLUMNS = ("training", "time", "rate", "held-out loss", "range of the loss", "MB sent", "waited")
_NAMES = {"alone": "each member alone", "data parallel": "data parallel, no limit", "diloco": "DiLoCo, int8, slow link"}


def ddp_page(report: DdpReport) -> Page:
    """Return the page of a run, with its parts in the order in which they were measured."""
    plan = report.plan
    rounds = ", ".join(f"{plan.rounds_of(part)} of {part}" for part in plan.parts)
    about = [f"{about_machine(report.machine)}; rounds: {rounds}; one thread per rank; float32"]
    grids = []
    for case in report.steps:
        title, made = {
            "steps": (f"One host, {plan.ranks} ranks", _step_grid),
            "small": ("A world of one", _step_grid),
            "hosts": (f"Two hosts, {plan.rate}", _host_grid),
        }[case.part]
        grids.append(made(title, case, plan))
    if report.memory:
        grids.append(_memory_grid(report.memory))
    if report.training:
        grids.append(_training_grid(report.training, plan))
    return Page("Data-parallel training", [*about, *_explained(report)], grids)


def _explained(report: DdpReport) -> list[str]:
    lines = []
    if report.steps:
        lines.append(
            "Contenders take turns step by step in the same processes, and end with the same weights; each round has new "
            "processes. Times and ratios are medians of the rounds' medians. × alone: over the step without communication, "
            "which all ranks take at the same time. hidden: the share of the all-reduces' time that passed during backward"
        )
    if any(case.part == "hosts" for case in report.steps):
        lines.append(
            "× bound: over the longer one of the step without communication, and of the bytes sent over the rate of the "
            "link. × limit: the same, but the bytes follow the forward, because no gradient exists before; range: its "
            "range. MB sent: all bytes on the link of one host in a step"
        )
    if report.memory:
        lines.append(
            "peak: memory of a rank above that before the first step; shared memory counts once. above alone: more than "
            "without communication, which frees all gradients between two steps"
        )
    if report.training:
        lines.append(
            f"few exchanges: {report.plan.outer_steps} outer steps of {report.plan.every} inner steps, an MLP of 25 M "
            f"parameters; the slow link has {report.plan.slow_rate}. rate: inner steps per second, over those of a member "
            "alone"
        )
    return lines


def _step_grid(title: str, case: StepCase, plan: DdpPlan) -> Grid:
    rows = []
    for who, figures in case.contenders.items():
        ratios = case.ratios(who, ALONE)
        gloo = times(median(case.ratios("gloo", who))) if "gloo" in case.contenders else "—"
        rows.append(
            (MODELS[case.model].title, CONTENDERS[who], duration(median(figures.seconds)), times(median(ratios)),
             _range(ratios), gloo, _share(figures.hidden))
        )  # fmt: skip
    return Grid(title, _STEP_COLUMNS, rows, group_rows=True)


def _host_grid(title: str, case: StepCase, plan: DdpPlan) -> Grid:
    rows = []
    whole = median(case.contenders["asyncdist"].sent)
    for who, figures in case.contenders.items():
        bound, limit = case.over_bound(who, plan.rate), case.over_limit(who, plan.rate)
        sent = median(figures.sent)
        rows.append(
            (MODELS[case.model].title, CONTENDERS[who], duration(median(figures.seconds)), f"{sent / 1e6:.2f}",
             f"{sent / whole:.2f}", times(median(bound)), times(median(limit)), _range(limit), _share(figures.hidden))
        )  # fmt: skip
    return Grid(title, _HOST_COLUMNS, rows, group_rows=True)


def _memory_grid(cases: Sequence[MemoryCase]) -> Grid:
    alone = {case.model: median(case.peak) for case in cases if case.contender == ALONE}
    rows = [
        (MODELS[case.model].title, CONTENDERS[case.contender], _mib(median(case.peak)),
         f"{(median(case.peak) - alone[case.model]) / (1 << 20):+.1f} MiB",
         _mib(case.largest_bucket) if case.largest_bucket else "—")
        for case in cases
    ]  # fmt: skip
    return Grid("Memory", _MEMORY_COLUMNS, rows, group_rows=True)


def _training_grid(cases: Sequence[TrainingCase], plan: DdpPlan) -> Grid:
    alone = next(case for case in cases if case.who == ALONE)
    rows = [
        (_NAMES[case.who], duration(median(case.seconds)),
         f"{median([one / it for one, it in zip(alone.seconds, case.seconds, strict=True)]):.1%}",
         f"{median(case.losses):.3f}", f"{min(case.losses):.3f} to {max(case.losses):.3f}",
         f"{median(case.sent) / 1e6:,.1f}", duration(median(case.waited)))
        for case in cases
    ]  # fmt: skip
    return Grid(f"Few exchanges, {plan.slow_rate}", _TRAINING_COLUMNS, rows)


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _share(hidden: Sequence[float]) -> str:
    return f"{median(hidden):.0%}" if hidden else "—"


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
