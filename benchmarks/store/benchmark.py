"""The benchmark behind ``python -m benchmarks store``: asyncdist's store against torch's libuv TCPStore.

Servers and clients are separate processes. The same client processes use both servers in turn, so that the machine's other
load affects both alike. Figures are medians over the rounds. This process does not import torch. Called by
`benchmarks.store.command`.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from asyncdist.cli.bench.programs import Program, Programs
from asyncdist.cli.machine import machine
from asyncdist.config import Config
from asyncdist.errors import BenchmarkError
from asyncdist.store import TCPStore
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.state.change_log import Change, ChangeLog
from benchmarks.publication import python
from benchmarks.store.server_process import HOST

OURS, TORCHS = "asyncdist", "torch"
PARTS = ("torch", "asyncdist", "crowd", "memory", "restart")
"""Torch's clients, asyncdist's client, many connections, memory per connection, and a restart that reads the log."""
_TIMEOUT = 300.0  # seconds for one command of a client process
_VALUE = b"v" * 64


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What to measure, and for how long."""

    rounds: int = 7
    seconds: float = 0.4
    parts: tuple[str, ...] = PARTS
    clients: tuple[int, ...] = (1, 8)
    in_flight: int = 1000
    crowd: int = 8192
    crowd_rounds: int = 3
    crowd_processes: int = 4
    logged: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. ``bar`` is the smallest accepted ratio to torch's figure, or the largest figure without one."""

    name: str
    unit: str
    ours: float
    torchs: float | None
    bar: float
    less_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times better asyncdist is; None if torch has no such figure."""
        if self.torchs is None:
            return None
        return self.torchs / self.ours if self.less_is_better else self.ours / self.torchs

    @property
    def reached(self) -> bool:
        """Whether asyncdist reaches ``bar``."""
        return self.ours <= self.bar if self.ratio is None else self.ratio >= self.bar


@dataclass(slots=True)
class StoreReport:
    """All results of a run."""

    plan: StorePlan
    machine: dict[str, str]
    cases: list[Case] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "machine": self.machine,
            "plan": asdict(self.plan),
            "cases": [{**asdict(case), "ratio": case.ratio, "reached": case.reached} for case in self.cases],
        }


# -- processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server process and its port."""

    port: int
    program: Program

    def resident_nbytes(self) -> int:
        """Return the resident memory of the process."""
        pages = int(Path(f"/proc/{self.program.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class StoreProcesses:
    """The servers and client processes of one run; a context manager that ends them."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._programs = Programs()

    def __enter__(self) -> StoreProcesses:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BenchmarkError):
            error.add_note(f"the processes of the benchmark ended{self._programs.last_words()}")
        self._programs.__exit__()

    def start_server(self, whose: str, *folder: str) -> ServerProcess:
        """Start asyncdist's or torch's server; asyncdist's keeps its data in ``folder`` if there is one."""
        program = self._start("benchmarks.store.server_process", whose, *folder)
        assert program.stdout is not None
        port = program.stdout.readline()
        if not port:
            raise BenchmarkError(f"the server of {whose} did not start")
        return ServerProcess(int(port), program)

    @contextmanager
    def server(self, *folder: str) -> Iterator[ServerProcess]:
        """Run asyncdist's server during the block."""
        server = self.start_server(OURS, *folder)
        try:
            yield server
        finally:
            server.program.kill()
            self._programs.end(server.program)

    def start_clients(self, count: int) -> list[ClientProcess]:
        """Start ``count`` client processes."""
        return [ClientProcess(self._start("benchmarks.store.client_process")) for _ in range(count)]

    def _start(self, module: str, *arguments: str) -> Program:
        process = self._programs.start(python(module, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        _write_line(process, self.token)
        return process


class ClientProcess:
    """A process of clients: see `store.client_process`."""

    def __init__(self, process: Program) -> None:
        self._process = process

    def send(self, **command: Any) -> None:
        """Send a command."""
        _write_line(self._process, json.dumps(command))

    def receive(self) -> Any:
        """Return the result of the command; raise BenchmarkError if the process ends or takes too long."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT)
        if not ready:
            raise BenchmarkError(
                f"store clients waited for {_TIMEOUT:.0f} s: their server is too slow. Torch's server looks up the "
                "name of each client that connects: check whether look-ups are slow on this machine, or use --only"
            )
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("a process of store clients ended during a command")
        return json.loads(line)


def _execute(workers: Sequence[ClientProcess], **command: Any) -> list[Any]:
    """Execute a command in several processes concurrently; return the results."""
    for worker in workers:
        worker.send(**command)
    return [worker.receive() for worker in workers]


def _write_line(process: Program, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


# -- measurements -------------------------------------------------------------------------------------


def run_store_benchmark(plan: StorePlan, progress: Callable[[str], None] = lambda doing: None) -> StoreReport:
    """Measure the parts of a plan.

    Args:
        plan: What to measure.
        progress: Called with the name of each measurement when it begins.

    Raises:
        BenchmarkError: A process ends, or does not answer.
    """
    report = StoreReport(plan, machine())
    with StoreProcesses() as processes:
        progress("starting the servers and clients")
        ports = {whose: processes.start_server(whose).port for whose in (OURS, TORCHS)}
        workers = processes.start_clients(max(*plan.clients, plan.crowd_processes))
        for count in plan.clients if "torch" in plan.parts else ():
            for operation in ("get", "add"):
                progress(f"{count} of torch's clients: {operation}")
                report.cases.append(_torch_clients(plan, ports, workers[:count], operation))
        if "asyncdist" in plan.parts:
            progress("asyncdist's client")
            report.cases += _asyncdist_client(plan, ports, workers[:1])
        if "crowd" in plan.parts:
            progress(f"{plan.crowd} connections")
            report.cases.append(_crowd(plan, ports, workers[: plan.crowd_processes]))
        if "memory" in plan.parts:
            progress("memory")
            report.cases += _memory(plan, processes, workers[:1])
        if "restart" in plan.parts:
            progress(f"a log of {plan.logged:,} sets")
            report.cases.append(_restart(plan, processes))
    return report


def _torch_clients(plan: StorePlan, ports: Mapping[str, int], workers: Sequence[ClientProcess], operation: str) -> Case:
    rates = _in_turn(
        plan, {whose: partial(_dialogues, workers, plan, "torch", port, operation) for whose, port in ports.items()}
    )
    clients = f"{len(workers)} of torch's clients" if len(workers) > 1 else "torch's client"
    return Case(f"{clients}: {operation}", "calls/s", rates[OURS], rates[TORCHS], 1.0)


def _asyncdist_client(plan: StorePlan, ports: Mapping[str, int], workers: Sequence[ClientProcess]) -> list[Case]:
    flight = {"do": "flight", "port": ports[OURS], "count": plan.in_flight, "seconds": plan.seconds}
    rates = _in_turn(
        plan,
        {
            "one": partial(_dialogues, workers, plan, "asyncdist", ports[OURS], "get"),
            "many": lambda: float(_execute(workers, **flight)[0]),
            TORCHS: partial(_dialogues, workers, plan, "torch", ports[TORCHS], "get"),
        },
    )
    return [
        Case("asyncdist's client, one at a time: get", "calls/s", rates["one"], rates[TORCHS], 1.5),
        Case(f"asyncdist's client, {plan.in_flight:,} in flight: get", "calls/s", rates["many"], rates[TORCHS], 10.0),
    ]


def _dialogues(workers: Sequence[ClientProcess], plan: StorePlan, client: str, port: int, operation: str) -> float:
    """Return the calls per second of all workers together."""
    command = {"do": "dialogue", "client": client, "port": port, "operation": operation, "seconds": plan.seconds}
    return float(sum(_execute(workers, **command)))


def _in_turn(plan: StorePlan, contenders: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return each contender's median over rounds in which all take turns, without the first round."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(plan.rounds + 1):
        for name, measured in contenders.items():
            figure = measured()
            if number:
                found[name].append(figure)
    return {name: median(figures) for name, figures in found.items()}


def _crowd(plan: StorePlan, ports: Mapping[str, int], workers: Sequence[ClientProcess]) -> Case:
    found: dict[str, list[float]] = {whose: [] for whose in ports}
    share = plan.crowd // len(workers)
    total = share * len(workers)
    for number in range(plan.crowd_rounds):
        for whose, port in ports.items():
            _execute(workers, do="prepare_crowd", client=whose)
            begun = time.monotonic()
            command = {"do": "crowd", "client": whose, "port": port, "count": share, "total": total}
            ends = _execute(workers, **command, name=f"crowd {number}")
            served = sum(end["served"] for end in ends)
            if served != total:
                raise BenchmarkError(f"the server of {whose} served {served} of {total} connections")
            found[whose].append(max(end["last"] for end in ends) - begun)
    name = f"{total:,} clients connect, authenticate, add, meet at a barrier"
    return Case(name, "s", median(found[OURS]), median(found[TORCHS]), 1.0, less_is_better=True)


def _memory(plan: StorePlan, processes: StoreProcesses, workers: Sequence[ClientProcess]) -> list[Case]:
    """Measure on a new server for each format, so that it has no other connections."""
    cases = []
    for client, name in (("asyncdist", "asyncdist's format"), ("torch", "torch's format")):
        with processes.server() as server:
            _execute(workers, do="hold", client=client, port=server.port, count=1)
            before = server.resident_nbytes()
            _execute(workers, do="hold", client=client, port=server.port, count=plan.crowd)
            nbytes = (server.resident_nbytes() - before) / plan.crowd
            _execute(workers, do="release")
            cases.append(Case(f"memory per connection, {name}", "KiB", nbytes / 1024, None, 20.0))
    return cases


def _restart(plan: StorePlan, processes: StoreProcesses) -> Case:
    """Measure from the start of a server process until clients can connect; the server reads its log before that."""
    durations = []
    with tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder:
        _write_log(Path(folder), plan.logged)
        for _ in range(plan.crowd_rounds):
            begun = time.monotonic()
            with processes.server(folder) as server:
                durations.append(time.monotonic() - begun)
                with TCPStore(HOST, server.port, timeout=_TIMEOUT, config=Config(token=processes.token)) as store:
                    if store.num_keys() != plan.logged:
                        raise BenchmarkError(f"the store restored {store.num_keys()} of {plan.logged} keys")
    return Case(f"restart from a log of {plan.logged:,} sets", "s", median(durations), None, 10.0)


def _write_log(folder: Path, count: int) -> None:
    """Write the log of a daemon whose clients have set ``count`` keys, one request for each."""
    journal, changes = Journal(folder, compact_nbytes=1 << 62), ChangeLog()
    changes.start(lambda: None)
    try:
        for number in range(count):
            changes.record(Change.SET, f"key {number}", _VALUE)
            journal.commit(*changes.take(), sync=False)
    finally:
        journal.close()
