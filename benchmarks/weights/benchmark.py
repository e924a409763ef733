"""Publish weights to readers, and measure when they have them and how late their requests are."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from asyncdist.cli.option_types import ListOf
from asyncdist.cli.option_types import rate as link_rate
from asyncdist.cli.page import Column, Grid, duration, size, times
from asyncdist.config import whole_number
from benchmarks.benchmark import COUNTS, Benchmark, option
from benchmarks.grid import Case, GridReport, Target, yes_or_no
from benchmarks.laboratory import LIMIT, ask, hear_all
from benchmarks.processes import RankProcess

OURS, ALONE = "asyncdist", "alone"
"""Publication to the swap on the slowest reader; and what it is compared with: one copy by one thread, one plain transfer
over the link, or a version all of whose values have changed."""
_QUIET = 0.5
"""Seconds without a publication before each one, in which requests are answered, too."""
_AFTER = 0.1
"""Seconds after the last swap in which answers still count, because the readers give up the version before."""
_LEAST_RATE = 0.6
"""The least rate of each reader, as a part of the rate of one copy."""
_LATEST = 0.010
"""Seconds by which an answer may be late because of a version."""
_MOST_TIME = 1.3
"""The most time in which all hosts have a version, in transfers over one link."""
_MOST_TIME_OF_CHANGES = 0.1
"""The most time in which all hosts have a version of which few values have changed, in versions that have changed whole."""
_MOST_PROCESSOR_TIME = 1 / 2**30
"""The most seconds of the publisher's processors for a byte of such a version."""
_ALLOWANCE = 1.1
"""A figure that misses its target by less than a tenth has reached it."""

_SIZES = ListOf("sizes such as 100M,1G", lambda word: whole_number(word) or None)


@dataclass(frozen=True)
class WeightsPlan:
    """What to measure. The first three versions of each case do not count."""

    parts: tuple[str, ...] = ("host", "hosts", "changes")
    rounds: int = option(7, "Versions of each case.")
    sizes: tuple[int, ...] = option("1G", "Bytes of a version on one host.", _SIZES)
    readers: tuple[int, ...] = option("1,4", "Numbers of readers on one host, each a case.", COUNTS)
    remote_sizes: tuple[int, ...] = option("100M", "Bytes of a version for other hosts.", _SIZES)
    hosts: tuple[int, ...] = option("1,8", "Numbers of other hosts, each a case.", COUNTS)
    rate: str = option("1gbit", "Rate of each host's link, in the words of tc.", link_rate)
    changed: int = option(2, "Percent of the values that change, for changes.", click.IntRange(1, 99))


def of_its_rate(case: Case) -> float:
    """Return the rate of the slowest reader over that of the copy or the transfer."""
    return case.times_better(OURS, ALONE) or 0.0


def times_as_long(case: Case) -> float:
    """Return the time of the slowest reader over that of what it is compared with."""
    return 1 / of_its_rate(case)


def later(case: Case) -> float:
    """Return by how much later answers come because of a version."""
    return case.median(OURS, "late") - case.median(OURS, "late_before")


def processor_time(case: Case) -> float:
    """Return the seconds of the publisher's processors for a byte of a version."""
    return case.median(OURS, "processor") / float(case.facts["nbytes"])


class WeightsBenchmark(Benchmark[WeightsPlan]):
    """Measure how fast published weights reach their readers, and how late the readers' answers are.

    PART host: readers on the publisher's host, which answer requests while each version arrives, compared with a copy of
    the same bytes by one thread. PART hosts: one reader on each of several hosts, which are network namespaces with links
    of a limited rate, compared with one plain transfer over such a link; it needs root. PART changes: the same readers when
    few values have changed, compared with a version all of whose values have. The default is all three.

    A run takes three minutes, and needs an idle machine with as much free memory as six versions.

    \b
    python -m benchmarks weights --output docs/bench
    python -m benchmarks weights host --sizes 100M --readers 8
    """

    title = "Weights"
    plan_type = WeightsPlan
    program = Path(__file__).with_name("processes.py")
    preload = ("torch", "asyncdist", "asyncdist.weights", "asyncdist.sync")
    parts = ("host", "hosts", "changes")
    parts_on_hosts = ("hosts", "changes")

    def measure(self) -> Iterator[Case]:
        if "host" in self.plan.parts:
            yield from (self._one_host(count, nbytes) for nbytes in self.plan.sizes for count in self.plan.readers)
        for part, measure in ("hosts", self._several), ("changes", self._changes):
            if part in self.plan.parts:
                yield from (measure(count, nbytes) for nbytes in self.plan.remote_sizes for count in self.plan.hosts)

    @classmethod
    def tables(cls, report: GridReport[WeightsPlan]) -> tuple[list[str], list[Grid]]:
        about, grids = [report.about(f"medians of {report.plan.rounds} rounds, in which all take turns")], []
        if host := report.of("host"):
            about.append(
                "one host: from the call of `publish` until the slowest reader has swapped the version in, compared with a "
                "copy of the same bytes by one thread. Latest answer: how late the latest answer of any reader was from "
                "the call to 0.1 s after the last swap, and in an equally long time before; the median over the rounds. "
                f"Targets: {_LEAST_RATE:.0%} of the rate of the copy for each reader, and no answer more than "
                f"{1e3 * _LATEST:g} ms later"
            )
            columns: list[Column[Case]] = [
                ("of its rate", lambda case: f"{of_its_rate(case):.0%}"),
                ("latest answer", lambda case: duration(case.median(OURS, "late"))),
                ("before", lambda case: duration(case.median(OURS, "late_before"))),
            ]
            grids.append(_grid("One host", "readers", "one copy", columns, host))
        if hosts := report.of("hosts"):
            about.append(
                f"several hosts: network namespaces with links of {report.plan.rate} in each direction, one reader each, "
                "compared with a plain TCP transfer of the same bytes between two of them"
            )
            columns = [
                ("of one transfer", lambda case: times(times_as_long(case))),
                ("target", lambda case: str(case.targets[0])),
            ]
            grids.append(_grid("Several hosts", "hosts", "one transfer", columns, hosts))
        if changes := report.of("changes"):
            about.append(
                f"few changes: the same hosts and links, when {report.plan.changed}% of bfloat16 values have changed by "
                "one or two units in the last place since the version that the readers have, compared with a version all "
                f"of whose values have. Targets: {_MOST_TIME_OF_CHANGES:g} of its time, {_MOST_PROCESSOR_TIME * 2**30:g} s "
                f"of the publisher's processors for 1 GiB, and no answer more than {1e3 * _LATEST:g} ms later"
            )
            columns = [
                ("of it", lambda case: times(times_as_long(case))),
                ("processor time", lambda case: duration(case.median(OURS, "processor"))),
                ("latest answer", lambda case: duration(case.median(OURS, "late"))),
                ("before", lambda case: duration(case.median(OURS, "late_before"))),
            ]
            grids.append(_grid("Few changes", "hosts", "whole version", columns, changes))
        return about, grids

    def _one_host(self, readers: int, nbytes: int) -> Case:
        """Measure readers on the publisher's host, and one copy of the bytes within the publisher."""
        case = Case("host", f"{readers} readers on one host", facts={"readers": readers, "nbytes": nbytes})
        case.targets = [
            Target(_LEAST_RATE, of_its_rate, "{:.0%}".format, True, _ALLOWANCE),
            Target(_LATEST, later, duration, allowance=_ALLOWANCE),
        ]
        with self.laboratory.store() as job:
            publisher = self._start("publish", job, nbytes)
            processes = [self._start("read", job, nbytes) for _ in range(readers)]
            self._rounds(case, publisher, processes, lambda: ask(publisher, "copy"))
        return case

    def _several(self, readers: int, nbytes: int) -> Case:
        """Measure one reader on each of several hosts, and one plain transfer of the bytes between two of them."""
        case = Case("hosts", f"{readers} readers on as many hosts", facts={"readers": readers, "nbytes": nbytes})
        case.targets = [Target(_MOST_TIME, times_as_long, times, allowance=_ALLOWANCE)]
        with self._on_hosts(readers, nbytes) as (publisher, processes, address):
            sender = self.laboratory.start("send_plainly", address, nbytes, host=0)
            self.laboratory.start("receive_plainly", address, sender.hear(), nbytes, host=1)
            self._rounds(case, publisher, processes, lambda: ask(sender, "send"))
        return case

    def _changes(self, readers: int, nbytes: int) -> Case:
        """Measure readers that have the version before, and a version that has changed whole."""
        case = Case("changes", f"changes for {readers} hosts", facts={"readers": readers, "nbytes": nbytes})
        case.targets = [
            Target(_MOST_TIME_OF_CHANGES, times_as_long, times, allowance=_ALLOWANCE),
            Target(_MOST_PROCESSOR_TIME, processor_time, "{:.2e} s per byte".format, allowance=_ALLOWANCE),
            Target(_LATEST, later, duration, allowance=_ALLOWANCE),
        ]

        def whole() -> tuple[float, float]:
            called, _, swapped, _ = _version(publisher, processes, 1)
            return called, swapped

        with self._on_hosts(readers, nbytes) as (publisher, processes, _):
            self._rounds(case, publisher, processes, whole, self.plan.changed / 100)
        return case

    @contextlib.contextmanager
    def _on_hosts(self, readers: int, nbytes: int) -> Iterator[tuple[RankProcess, list[RankProcess], str]]:
        """Start a publisher on one host, whose address is yielded too, and a reader on each of several others."""
        with self.laboratory.on_hosts(readers + 1) as hosts, self.laboratory.store(host=0) as job:
            hosts.shape(self.plan.rate)
            publisher = self._start("publish", job, nbytes, host=0)
            processes = [self._start("read", job, nbytes, host=host + 1) for host in range(readers)]
            yield publisher, processes, hosts.addresses[0]

    def _start(self, function: str, job: str, nbytes: int, host: int | None = None) -> RankProcess:
        process = self.laboratory.start(function, job, nbytes, host=host)
        process.hear(LIMIT)
        return process

    def _rounds(
        self,
        case: Case,
        publisher: RankProcess,
        readers: Sequence[RankProcess],
        alone: Callable[[], tuple[float, float]],
        changed: float = 1,
    ) -> None:
        rounds = []
        # The first three versions come into new memory.
        for number in range(-3, self.plan.rounds):
            self.laboratory.progress(f"{case.name}: {number + 1} of {self.plan.rounds}")
            begun, ended = alone()
            time.sleep(_QUIET)
            measured = _version(publisher, readers, changed)
            if number >= 0:
                case.add(ALONE, ended - begun)
                rounds.append(measured)
        for each in readers:
            each.say(None)
        requests = [request for answers in hear_all(readers) for request in answers]
        for called, visible, swapped, used in rounds:
            ended = swapped + _AFTER
            before = max(called - _QUIET, 2 * called - ended)
            late, late_before = _latest(requests, called, ended), _latest(requests, before, called)
            further = {"late": late, "late_before": late_before, "processor": used}
            case.add(OURS, swapped - called, published=visible - called, **further)


def _version(
    publisher: RankProcess, readers: Sequence[RankProcess], changed: float
) -> tuple[float, float, float, float]:
    """Change a part of the values, and publish them.

    Returns:
        When `publish` was called, when it returned, when the last reader had swapped the version in, and the processor time
        that the publisher has used between the first and the last.
    """
    used = ask(publisher, "change", changed)
    for each in readers:
        each.say("next")
    called, visible = ask(publisher, "publish")
    swapped = max(hear_all(readers))
    return called, visible, swapped, ask(publisher, "change", 0) - used


def _grid(title: str, count: str, alone: str, further: Sequence[Column[Case]], cases: Sequence[Case]) -> Grid:
    columns: list[Column[Case]] = [
        (count, lambda case: str(case.facts["readers"])),
        ("version", lambda case: size(case.facts["nbytes"])),
        (alone, lambda case: duration(case.median(ALONE))),
        ("published", lambda case: duration(case.median(OURS, "published"))),
        ("read by all", lambda case: duration(case.median(OURS))),
        *further,
        ("reached", yes_or_no),
    ]
    return Grid.of(title, columns, cases)


def _latest(requests: Sequence[tuple[float, float]], begun: float, ended: float) -> float:
    """Return by how much the latest answer came after its request, of those whose wait overlaps a time."""
    return max((late for due, late in requests if due <= ended and due + late >= begun), default=0.0)
