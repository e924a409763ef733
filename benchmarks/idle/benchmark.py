"""Let ranks join a world and wait, and measure what they keep: descriptors, threads, and memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from asyncdist.cli.page import Column, Grid
from benchmarks.benchmark import Benchmark, option
from benchmarks.grid import Case, GridReport, Line, lines, mib
from benchmarks.laboratory import HOST, hear_all

CONTENDERS = ("shm,tcp", "tcp", "gloo")
"""The transports of asyncdist, as it chooses by itself and without shared memory, and gloo."""
_MOST_MAPPINGS = 8


@dataclass(frozen=True)
class IdlePlan:
    """What to measure."""

    ranks: int = option(4, "Number of ranks.", click.IntRange(2, 64))
    rounds: int = option(3, "Rounds, each with new processes.")


class IdleBenchmark(Benchmark[IdlePlan]):
    """Measure the descriptors, threads and memory of idle ranks of one host, with shared memory and without, against gloo.

    Each rank joins the world over TCP, has passed a barrier, and waits. A run takes a minute.

    \b
    python -m benchmarks idle --rounds 1
    """

    title = "Idle ranks"
    plan_type = IdlePlan
    program = Path(__file__).with_name("ranks.py")
    # Pages that a fork shares with its parent would hide those of a rank.
    preload = ()

    def measure(self) -> Iterator[Case]:
        cases = [Case("idle", name, "descriptors", facts={"kept": {}}) for name in ("rank 0", "each other rank")]
        for number in range(self.plan.rounds):
            for who in CONTENDERS:
                self.laboratory.progress(f"{who}: {number + 1} of {self.plan.rounds}")
                for rank, found in enumerate(self._ranks(who)):
                    self._add(cases[min(rank, 1)], who, *found)
        yield from cases

    def _ranks(self, who: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        with socket.create_server((HOST, 0)) as probe:
            where = f"tcp://{HOST}:{probe.getsockname()[1]}"
        settings: dict[str, Any] = {} if who == "gloo" else {"ASYNCDIST_TRANSPORT": who}
        size = self.plan.ranks
        ranks = [self.laboratory.start("be_idle", who, where, rank, size, **settings) for rank in range(size)]
        hear_all(ranks)
        found = []
        # All have joined. One after the other, because a process that reads /proc is not idle.
        for each in ranks:
            each.say("measure")
            found.append(each.hear())
        self.laboratory.end(ranks)
        return found

    @staticmethod
    def _add(case: Case, who: str, imported: dict[str, Any], world: dict[str, Any]) -> None:
        case.add(
            who,
            # The pipe of the benchmark is not the rank's.
            sum(world["descriptors"].values()) - 1,
            threads=sum(world["threads"].values()),
            imported=imported["Rss"],
            imported_private=imported["Private_Dirty"],
            resident=world["Rss"],
            private=world["Private_Dirty"],
            shared=world["Shared_Dirty"],
            modules=len(imported["modules"]) + len(world["modules"]),
        )
        case.facts["kept"][who] = {"import": imported, "world": world}

    @classmethod
    def tables(cls, report: GridReport[IdlePlan]) -> tuple[list[str], list[Grid]]:
        about = [
            report.about(f"{report.plan.ranks} ranks on one host, {report.plan.rounds} rounds"),
            "descriptors: all of the process, with standard input and output. import: memory that importing the package "
            "adds to a process that has imported torch.distributed. world: what joining a world adds to that. resident "
            "counts pages of libraries that other processes share; private pages are written, and of this process alone; "
            "shared ones are written, and of several",
        ]
        cases = report.cases
        return about, [
            Grid.of("Idle ranks", _COLUMNS, lines(cases), group_rows=True),
            *(_by_kind("Descriptors", "descriptors", case) for case in cases),
            _by_kind("Threads", "threads", cases[-1]),
            _mappings(cases[-1]),
        ]


def _memory_column(quantity: str) -> Column[Line]:
    heading = (
        quantity.replace("imported", "import\n").replace("_", "") if "imported" in quantity else f"world\n{quantity}"
    )
    return heading, lambda line: mib(median(line[0].of(line[1], quantity)))


_COLUMNS: list[Column[Line]] = [
    ("rank", lambda line: line[0].name),
    ("who", lambda line: line[1]),
    ("descriptors", lambda line: f"{line[0].median(line[1]):.0f}"),
    ("threads", lambda line: f"{line[0].median(line[1], 'threads'):.0f}"),
    ("modules", lambda line: f"{line[0].median(line[1], 'modules'):.0f}"),
    *map(_memory_column, ("imported", "imported_private", "resident", "private", "shared")),
]


def _by_kind(title: str, what: str, case: Case) -> Grid:
    kept = {who: found["world"][what] for who, found in case.facts["kept"].items()}
    kinds = sorted({kind for each in kept.values() for kind in each})
    rows = [[kind, *(str(each.get(kind, "—")) for each in kept.values())] for kind in kinds]
    return Grid(title, ["kind", *kept], rows, caption=case.name)


def _mappings(case: Case) -> Grid:
    """Return the mappings whose resident memory the world has enlarged most, for each contender."""
    rows = []
    for who, found in case.facts["kept"].items():
        memory = sorted(found["world"]["memory"].items(), key=lambda item: -item[1]["Rss"])
        rows += [[who, name, mib(each["Rss"]), mib(each["Private_Dirty"])] for name, each in memory[:_MOST_MAPPINGS]]
    return Grid("Memory of the world by mapping", ["who", "mapping", "resident", "private"], rows, group_rows=True)
