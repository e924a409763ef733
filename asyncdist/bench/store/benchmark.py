"""The benchmark behind ``asyncdist bench store``: our store beside torch's libuv TCPStore.

Servers and clients are processes of their own. Both servers run all the time and the same client processes use both in
turn, round after round, so that whatever else the machine does hits all alike; figures are medians over the rounds.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from asyncdist.bench.machine import machine
from asyncdist.bench.store.server_process import HOST
from asyncdist.config import Config
from asyncdist.errors import BenchmarkError
from asyncdist.store import TCPStore
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.state.change_log import Change, ChangeLog

OURS, TORCHS = "asyncdist", "torch"
PARTS = ("theirs", "ours", "crowd", "memory", "restart")
"""What can be measured by itself: torch's clients, ours, many connections, what one of them costs, reading a log."""


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
    """One measurement of ours beside torch's. ``bar`` is the ratio that ours is to reach, above or below."""

    name: str
    unit: str
    ours: float
    torchs: float | None
    bar: float
    less_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """How many times better ours is, where there is something to compare with."""
        if self.torchs is None:
            return None
        return self.torchs / self.ours if self.less_is_better else self.ours / self.torchs

    @property
    def reached(self) -> bool:
        """Whether ours is as good as it is to be: at least ``bar`` times torch's, or at most ``bar`` by itself."""
        return self.ours <= self.bar if self.ratio is None else self.ratio >= self.bar


@dataclass(slots=True)
class StoreReport:
    """What a run has found."""

    plan: StorePlan
    machine: dict[str, str]
    cases: list[Case] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "plan": asdict(self.plan),
            "cases": [{**asdict(case), "ratio": case.ratio, "reached": case.reached} for case in self.cases],
        }


_PATIENCE = 300.0  # seconds for which clients may be at one thing
_VALUE = b"v" * 64


# -- processes ---------------------------------------------------------------------------------------


class Worker:
    """A process of clients."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tell(self, **what: Any) -> None:
        """Have it begin something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Return what came of it. Raises BenchmarkError when the process has ended, or is never done."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        if not ready:
            raise BenchmarkError(
                f"store clients waited for {_PATIENCE:.0f} s: their server does not keep up. Torch's looks up the name of "
                "each client that connects, so see whether look-ups are slow here; or measure the other cases with --only"
            )
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError("a process of store clients ended before it was done")
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Server:
    """A server's process."""

    port: int
    pid: int

    def resident_nbytes(self) -> int:
        """Return how much memory it has in use."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class Field:
    """The servers and client processes of one run, ended when it is left."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._stack = ExitStack()
        # Torch warns of every connection whose peer's name it cannot look up.
        self._said = self._stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115, the stack closes it

    def __enter__(self) -> Field:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BenchmarkError):
            self._said.seek(0)
            error.add_note(self._said.read()[-2000:])
        self._stack.close()

    @contextmanager
    def server(self, whose: str, *data: str) -> Iterator[Server]:
        """Start a server, with the data of a folder if there is one, and end it."""
        with self._process("asyncdist.bench.store.server_process", whose, *data) as process:
            assert process.stdout is not None
            port = process.stdout.readline()
            if not port:
                raise BenchmarkError(f"the server of {whose} did not start")
            yield Server(int(port), process.pid)

    def servers(self) -> dict[str, Server]:
        """Start both servers for the whole run."""
        return {whose: self._stack.enter_context(self.server(whose)) for whose in (OURS, TORCHS)}

    def workers(self, count: int) -> list[Worker]:
        """Start processes of clients for the whole run."""
        return [
            Worker(self._stack.enter_context(self._process("asyncdist.bench.store.client_process")))
            for _ in range(count)
        ]

    @contextmanager
    def _process(self, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(self.token + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()
            process.communicate()


# -- measurements -------------------------------------------------------------------------------------

Tell = Callable[[str], None]


def run_store_benchmark(plan: StorePlan, tell: Tell = lambda doing: None) -> StoreReport:
    """Measure the plan's parts; ``tell`` hears what is being done. Raises BenchmarkError when a process dies."""
    report = StoreReport(plan, machine())
    with Field() as field_:
        tell("starting the servers and clients")
        servers = field_.servers()
        workers = field_.workers(max(*plan.clients, plan.crowd_processes))
        for count in plan.clients if "theirs" in plan.parts else ():
            for operation in ("get", "add"):
                tell(f"{count} of torch's clients: {operation}")
                report.cases.append(_torchs_clients(plan, servers, workers[:count], operation))
        if "ours" in plan.parts:
            tell("our client")
            report.cases += _our_client(plan, servers, workers[0])
        if "crowd" in plan.parts:
            tell(f"{plan.crowd} connections")
            report.cases.append(_crowd(plan, servers, workers[: plan.crowd_processes]))
        if "memory" in plan.parts:
            tell("memory")
            report.cases += _memory(plan, field_, workers[0])
        if "restart" in plan.parts:
            tell(f"a log of {plan.logged:,} sets")
            report.cases.append(_restart(plan, field_))
    return report


def _torchs_clients(plan: StorePlan, servers: dict[str, Server], workers: Sequence[Worker], operation: str) -> Case:
    contenders = {
        whose: partial(_dialogues, workers, plan, "torch", server.port, operation) for whose, server in servers.items()
    }
    rates = _in_turn(plan, contenders)
    clients = f"{len(workers)} of torch's clients" if len(workers) > 1 else "torch's client"
    return Case(f"{clients}: {operation}", "calls/s", rates[OURS], rates[TORCHS], 1.0)


def _our_client(plan: StorePlan, servers: dict[str, Server], worker: Worker) -> list[Case]:
    ours, torchs = servers[OURS].port, servers[TORCHS].port

    def flight() -> float:
        worker.tell(do="flight", port=ours, count=plan.in_flight, seconds=plan.seconds)
        return float(worker.hear())

    rates = _in_turn(
        plan,
        {
            "one": partial(_dialogues, [worker], plan, "asyncdist", ours, "get"),
            "many": flight,
            TORCHS: partial(_dialogues, [worker], plan, "torch", torchs, "get"),
        },
    )
    return [
        Case("our client, one at a time: get", "calls/s", rates["one"], rates[TORCHS], 1.5),
        Case(f"our client, {plan.in_flight:,} in flight: get", "calls/s", rates["many"], rates[TORCHS], 10.0),
    ]


def _dialogues(workers: Sequence[Worker], plan: StorePlan, client: str, port: int, operation: str) -> float:
    """Return how many calls a second all workers make together."""
    for worker in workers:
        worker.tell(do="dialogue", client=client, port=port, operation=operation, seconds=plan.seconds)
    return sum(float(worker.hear()) for worker in workers)


def _in_turn(plan: StorePlan, contenders: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Return each contender's median over rounds in which all took turns; the first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(plan.rounds + 1):
        for name, measured in contenders.items():
            figure = measured()
            if number:
                found[name].append(figure)
    return {name: median(figures) for name, figures in found.items()}


def _crowd(plan: StorePlan, servers: dict[str, Server], workers: Sequence[Worker]) -> Case:
    found: dict[str, list[float]] = {OURS: [], TORCHS: []}
    share = plan.crowd // len(workers)
    total = share * len(workers)
    for number in range(plan.crowd_rounds):
        for whose, server in servers.items():
            begun = time.monotonic()
            for worker in workers:
                client = "torch" if whose == TORCHS else "asyncdist"
                worker.tell(
                    do="crowd", client=client, port=server.port, count=share, total=total, name=f"crowd {number}"
                )
            ends = [worker.hear() for worker in workers]
            served = sum(end["served"] for end in ends)
            if served != total:
                raise BenchmarkError(f"the server of {whose} served {served} of {total} connections")
            found[whose].append(max(end["last"] for end in ends) - begun)
    name = f"{total:,} clients connect, authenticate, add, meet at a barrier"
    return Case(name, "s", median(found[OURS]), median(found[TORCHS]), 1.0, less_is_better=True)


def _memory(plan: StorePlan, field_: Field, worker: Worker) -> list[Case]:
    """Measure on servers that have had no other connections."""
    cases = []
    for client, name in (("asyncdist", "ours"), ("torch", "torch's format")):
        with field_.server(OURS) as server:
            nbytes = _held(server, worker, client, plan.crowd)
            cases.append(Case(f"memory a connection, {name}", "KiB", nbytes / 1024, None, 20.0))
    return cases


def _held(server: Server, worker: Worker, client: str, count: int) -> float:
    """Return bytes of a server's memory for each of ``count`` connections."""
    worker.tell(do="hold", client=client, port=server.port, count=1)
    worker.hear()
    before = server.resident_nbytes()
    worker.tell(do="hold", client=client, port=server.port, count=count)
    worker.hear()
    after = server.resident_nbytes()
    worker.tell(do="release")
    worker.hear()
    return (after - before) / count


def _restart(plan: StorePlan, field_: Field) -> Case:
    """Measure from the start of a process until clients can connect to what it found in its log."""
    took = []
    with tempfile.TemporaryDirectory(prefix="asyncdist-bench-") as folder:
        _write_log(Path(folder), plan.logged)
        for _ in range(plan.crowd_rounds):
            begun = time.monotonic()
            with field_.server(OURS, folder) as server:
                took.append(time.monotonic() - begun)
                with TCPStore(HOST, server.port, timeout=_PATIENCE, config=Config(token=field_.token)) as store:
                    if store.num_keys() != plan.logged:
                        raise BenchmarkError(f"of {plan.logged} sets, {store.num_keys()} came back")
    return Case(f"restart from a log of {plan.logged:,} sets", "s", median(took), None, 10.0)


def _write_log(folder: Path, count: int) -> None:
    """Write what a daemon writes when so many keys are set, each by itself."""
    journal, changes = Journal(folder, compact_nbytes=1 << 62), ChangeLog()
    changes.start(lambda: None)
    try:
        for number in range(count):
            changes.record(Change.SET, f"key {number}", _VALUE)
            journal.commit(*changes.take(), sync=False)
    finally:
        journal.close()
