"""asyncdist's store against torch's libuv TCPStore.

The same client processes use both servers in turn, so that the machine's other load affects both alike.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from asyncdist.cli.option_types import Seconds, names_among
from asyncdist.cli.page import Grid
from asyncdist.config import Config
from asyncdist.errors import BenchmarkError
from asyncdist.store import TCPStore
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.state.change_log import Change, ChangeLog
from benchmarks.benchmark import COUNTS, Benchmark, option
from benchmarks.grid import Case, GridReport, figure_within, side_by_side, times_at_least
from benchmarks.laboratory import HOST, LIMIT, hear_all
from benchmarks.processes import RankProcess

OURS, TORCHS = "asyncdist", "torch"
CONTENDERS = {OURS: "asyncdist", TORCHS: "torch"}
PARTS = ("torch", "asyncdist", "crowd", "memory", "restart")
"""Torch's clients, asyncdist's client, many connections, memory per connection, and a restart that reads the log."""
_VALUE = b"v" * 64


@dataclass(frozen=True)
class StorePlan:
    """What to measure, and for how long."""

    rounds: int = option(7, "Rounds in which all contenders take turns.")
    seconds: float = option(0.4, "Duration of each turn in seconds.", Seconds(0.01))
    crowd: int = option(8192, "Number of simultaneous connections.", click.IntRange(4))
    in_flight: int = option(1000, "Number of concurrent calls of one asyncdist client.")
    clients: tuple[int, ...] = option("1,8", "Numbers of torch's clients to measure with, separated by commas.", COUNTS)
    only: tuple[str, ...] = option(
        "", f"Parts to measure: torch (torch's clients), asyncdist (its own client), {', '.join(PARTS[2:])}.",
        names_among(PARTS),
    )  # fmt: skip
    crowd_rounds: int = 3
    crowd_processes: int = 4
    logged: int = 1_000_000


class Server(NamedTuple):
    """A server process and its port."""

    process: RankProcess
    port: int

    def resident_nbytes(self) -> int:
        """Return the resident memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class StoreBenchmark(Benchmark[StorePlan]):
    """Measure the store against torch's libuv TCPStore. Servers and clients run in separate processes.

    The parts are: torch's clients on either server; asyncdist's client and torch's, one call at a time and with many
    calls in flight; thousands of clients that connect, authenticate, add and meet at a barrier; the memory per
    connection; and a restart from a log of a million sets. A run takes one to two minutes and needs an idle machine.

    \b
    python -m benchmarks store --output docs/bench
    python -m benchmarks store --only torch --clients 8
    """

    title = "The store"
    plan_type = StorePlan
    program = Path(__file__).with_name("processes.py")

    def measure(self) -> Iterator[Case]:
        plan, progress = self.plan, self.laboratory.progress
        parts = plan.only or PARTS
        progress("starting the servers and clients")
        ports = {whose: self.start_server(whose).port for whose in (OURS, TORCHS)}
        workers = self.start_clients(max(*plan.clients, plan.crowd_processes))
        for count in plan.clients if "torch" in parts else ():
            for operation in ("get", "add"):
                progress(f"{count} of torch's clients: {operation}")
                yield self._torch_clients(ports, workers[:count], operation)
        if "asyncdist" in parts:
            progress("asyncdist's client")
            yield from self._asyncdist_client(ports, workers[:1])
        if "crowd" in parts:
            progress(f"{plan.crowd} connections")
            yield self._crowd(ports, workers[: plan.crowd_processes])
        if "memory" in parts:
            progress("memory")
            yield from self._memory(workers[:1])
        if "restart" in parts:
            progress(f"a log of {plan.logged:,} sets")
            yield self._restart()

    @classmethod
    def tables(cls, report: GridReport[StorePlan]) -> tuple[list[str], list[Grid]]:
        plan = report.plan
        about = report.about(
            f"medians of {plan.rounds} rounds of {plan.seconds:g} s in which all contenders took turns "
            f"({plan.crowd_rounds} rounds of {plan.crowd:,} clients and of the restart)"
        )
        return [about], [side_by_side("", report.cases, CONTENDERS, (OURS, TORCHS))]

    # -- processes -------------------------------------------------------------------------------

    def start_server(self, whose: str, folder: str | None = None) -> Server:
        """Start asyncdist's or torch's server; asyncdist's keeps its data in ``folder`` if there is one."""
        process = self.laboratory.start("serve", whose, folder)
        return Server(process, process.hear(LIMIT))

    @contextlib.contextmanager
    def server(self, folder: str | None = None) -> Iterator[Server]:
        """Run asyncdist's server during the block."""
        server = self.start_server(OURS, folder)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()

    def start_clients(self, count: int) -> list[RankProcess]:
        return [self.laboratory.start("run_clients") for _ in range(count)]

    def _ask(self, workers: Sequence[RankProcess], *order: Any) -> list[Any]:
        """Execute an order in several processes concurrently; return the results."""
        for worker in workers:
            worker.say(order)
        try:
            return hear_all(workers)
        except TimeoutError as cause:
            raise BenchmarkError(
                f"store clients waited for {LIMIT:.0f} s: their server is too slow. Torch's server looks up the "
                "name of each client that connects: check whether look-ups are slow on this machine, or use --only"
            ) from cause

    # -- measurements ----------------------------------------------------------------------------

    def _in_turn(self, cases: Mapping[str, Sequence[Case]], rates: Mapping[str, Callable[[], float]]) -> None:
        """Add each contender's rate to its cases, in rounds in which all take turns; the first round does not count."""
        for number in range(self.plan.rounds + 1):
            for who, measured in rates.items():
                rate = measured()
                for case in cases[who] if number else ():
                    case.add(OURS if who in ("one", "many") else who, rate)

    def _rate(self, workers: Sequence[RankProcess], client: str, port: int, operation: str) -> float:
        """Return the calls per second of all workers together."""
        return float(sum(self._ask(workers, "dialogue", client, port, operation, self.plan.seconds)))

    def _torch_clients(self, ports: Mapping[str, int], workers: Sequence[RankProcess], operation: str) -> Case:
        clients = f"{len(workers)} of torch's clients" if len(workers) > 1 else "torch's client"
        case = Case("torch", f"{clients}: {operation}", "/s", targets=[times_at_least(1.0, OURS, TORCHS)])
        rates = {whose: partial(self._rate, workers, "torch", port, operation) for whose, port in ports.items()}
        self._in_turn({whose: [case] for whose in ports}, rates)
        return case

    def _asyncdist_client(self, ports: Mapping[str, int], workers: Sequence[RankProcess]) -> list[Case]:
        plan, ours = self.plan, ports[OURS]
        one, many = (
            Case("asyncdist", f"asyncdist's client, {how}: get", "/s", targets=[times_at_least(least, OURS, TORCHS)])
            for how, least in (("one at a time", 1.5), (f"{plan.in_flight:,} in flight", 10.0))
        )
        rates: dict[str, Callable[[], float]] = {
            "one": partial(self._rate, workers, "asyncdist", ours, "get"),
            "many": lambda: float(self._ask(workers, "flight", ours, plan.in_flight, plan.seconds)[0]),
            TORCHS: partial(self._rate, workers, "torch", ports[TORCHS], "get"),
        }
        self._in_turn({"one": [one], "many": [many], TORCHS: [one, many]}, rates)
        return [one, many]

    def _crowd(self, ports: Mapping[str, int], workers: Sequence[RankProcess]) -> Case:
        share = self.plan.crowd // len(workers)
        total = share * len(workers)
        name = f"{total:,} clients connect, authenticate, add, meet at a barrier"
        case = Case("crowd", name, targets=[times_at_least(1.0, OURS, TORCHS)])
        for number in range(self.plan.crowd_rounds):
            for whose, port in ports.items():
                self._ask(workers, "prepare_crowd", whose)
                begun = time.monotonic()
                served, last = zip(
                    *self._ask(workers, "crowd", whose, port, share, total, f"crowd {number}"), strict=True
                )
                if sum(served) != total:
                    raise BenchmarkError(f"the server of {whose} served {sum(served)} of {total} connections")
                case.add(whose, max(last) - begun)
        return case

    def _memory(self, workers: Sequence[RankProcess]) -> Iterator[Case]:
        """Measure on a new server for each format, so that it has no other connections."""
        for client in (OURS, TORCHS):
            name = f"memory per connection, {client}'s format"
            case = Case("memory", name, "KiB", targets=[figure_within(20.0, OURS, "KiB")])
            with self.server() as server:
                self._ask(workers, "hold", client, server.port, 1)
                before = server.resident_nbytes()
                self._ask(workers, "hold", client, server.port, self.plan.crowd)
                case.add(OURS, (server.resident_nbytes() - before) / self.plan.crowd / 1024)
                self._ask(workers, "release")
            yield case

    def _restart(self) -> Case:
        """Measure from the start of a server process until clients can connect; the server reads its log before that."""
        logged, token = self.plan.logged, self.laboratory.token
        case = Case("restart", f"restart from a log of {logged:,} sets", targets=[figure_within(10.0, OURS)])
        folder = self.laboratory.folder / "log"
        _write_log(folder, logged)
        for _ in range(self.plan.crowd_rounds):
            begun = time.monotonic()
            with self.server(str(folder)) as server:
                case.add(OURS, time.monotonic() - begun)
                with TCPStore(HOST, server.port, timeout=LIMIT, config=Config(token=token)) as store:
                    if store.num_keys() != logged:
                        raise BenchmarkError(f"the store restored {store.num_keys()} of {logged} keys")
        return case


def _write_log(folder: Path, count: int) -> None:
    """Write the log of a daemon whose clients have set ``count`` keys, one request for each."""
    folder.mkdir()
    journal, changes = Journal(folder, compact_nbytes=1 << 62), ChangeLog()
    changes.start(lambda: None)
    try:
        for number in range(count):
            changes.record(Change.SET, f"key {number}", _VALUE)
            journal.commit(*changes.take(), sync=False)
    finally:
        journal.close()
