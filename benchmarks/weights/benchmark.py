"""Publish weights to readers, and measure when they have them and how late their requests are.

Called by `benchmarks.weights.command`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from asyncdist.base.background_loop import background_loop
from asyncdist.cli.machine import machine
from asyncdist.errors import BenchmarkError
from asyncdist.store.server.server import StoreServer
from asyncdist.testing.hosts import Hosts
from asyncdist.testing.processes import Nursery, RankEndedError, RankProcess
from benchmarks.weights.plan import WeightsPlan

_PROGRAM = Path(__file__).with_name("processes.py")
_QUIET = 0.5
"""Seconds without a publication before each one, in which requests are answered, too."""
_AFTER = 0.1
"""Seconds after the last swap in which answers still count, because the readers give up the version before."""
_LIMIT = 300.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WeightsCase:
    """Readers that read the same versions.

    Attributes:
        part: ``"host"`` or ``"hosts"``.
        readers: The number of readers.
        nbytes: Bytes of a version.
        alone: For each round, the seconds of one copy of the bytes by one thread, or of one plain transfer over the link.
        published: For each round, the seconds of the call of `publish`.
        read: For each round, the seconds from that call to the swap on each reader.
        late: For each round, by how many seconds the latest answer of any reader came after its request, from the call to
            0.1 s after the last swap.
        late_before: The same for an equally long time before the call.
    """

    part: str
    readers: int
    nbytes: int
    alone: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    read: list[list[float]] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    late_before: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median over the rounds of a round's time on its slowest reader, divided by the median of ``alone``."""
        return median(max(each) for each in self.read) / median(self.alone)


@dataclass(slots=True)
class WeightsReport:
    """All results of a run."""

    plan: WeightsPlan
    machine: dict[str, str]
    cases: list[WeightsCase] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data: times in seconds."""
        return asdict(self)


def run_weights_benchmark(plan: WeightsPlan, progress: Progress) -> WeightsReport:
    """Execute a plan in new processes and return the report.

    Raises:
        BenchmarkError: A process fails.
        HostsUnavailableError: A part needs several hosts, and this machine cannot make them.
    """
    report = WeightsReport(plan, machine())
    with Nursery(("torch", "asyncdist", "asyncdist.weights", "asyncdist.sync")) as nursery:
        bench = _WeightsBenchmark(plan, nursery, progress)
        try:
            if "host" in plan.parts:
                report.cases += [bench.one_host(count, nbytes) for nbytes in plan.sizes for count in plan.readers]
            if "hosts" in plan.parts:
                report.cases += [bench.several_hosts(count, size) for size in plan.remote_sizes for count in plan.hosts]
        except (RankEndedError, TimeoutError) as error:
            raise BenchmarkError(f"the benchmark of weights failed: {error}") from error
    return report


class _WeightsBenchmark:
    def __init__(self, plan: WeightsPlan, nursery: Nursery, progress: Progress) -> None:
        self._plan, self._nursery, self._progress = plan, nursery, progress
        self._environment = {"ASYNCDIST_TOKEN": secrets.token_hex(16)}

    def one_host(self, readers: int, nbytes: int) -> WeightsCase:
        """Measure readers on the publisher's host, and one copy of the bytes within the publisher."""
        case = WeightsCase("host", readers, nbytes)
        with self._store("127.0.0.1") as job:
            publisher = self._start("publish", job, case.nbytes, None)
            processes = [self._start("read", job, case.nbytes, None) for _ in range(readers)]
            self._rounds(case, publisher, processes, lambda: _ask(publisher, "copy"))
        return case

    def several_hosts(self, readers: int, nbytes: int) -> WeightsCase:
        """Measure one reader on each of several hosts, and one plain transfer of the bytes between two of them."""
        case = WeightsCase("hosts", readers, nbytes)
        with Hosts(readers + 1) as hosts, self._daemon(hosts) as job:
            hosts.shape(self._plan.rate)
            publisher = self._start("publish", job, case.nbytes, hosts.namespaces[0], host=0)
            processes = [
                self._start("read", job, case.nbytes, hosts.namespaces[host], host=host)
                for host in range(1, readers + 1)
            ]
            sender = self._nursery.start(_PROGRAM, "send_plainly", hosts.addresses[0], case.nbytes, hosts.namespaces[0])
            port = sender.hear()
            self._nursery.start(_PROGRAM, "receive_plainly", hosts.addresses[0], port, case.nbytes, hosts.namespaces[1])
            self._rounds(case, publisher, processes, lambda: _ask(sender, "send"))
        return case

    def _rounds(
        self,
        case: WeightsCase,
        publisher: RankProcess,
        readers: Sequence[RankProcess],
        alone: Callable[[], tuple[float, float]],
    ) -> None:
        where = "one host" if case.part == "host" else "as many hosts"
        windows = []
        # The first three versions come into new memory.
        for number in range(-3, self._plan.rounds):
            self._progress(f"{case.readers} readers on {where}: {number + 1} of {self._plan.rounds}")
            begun, ended = alone()
            time.sleep(_QUIET)
            for each in readers:
                each.say("next")
            called, visible = _ask(publisher, "publish")
            swapped = [each.hear(_LIMIT) for each in readers]
            if number >= 0:
                case.alone.append(ended - begun)
                case.published.append(visible - called)
                case.read.append([at - called for at in swapped])
                windows.append((called, max(swapped) + _AFTER))
        for each in readers:
            each.say(None)
        requests = [request for each in readers for request in each.hear(_LIMIT)]
        for begun, ended in windows:
            case.late.append(_latest(requests, begun, ended))
            case.late_before.append(_latest(requests, max(begun - _QUIET, 2 * begun - ended), begun))
        self._nursery.clear()

    # -- processes -------------------------------------------------------------------------------

    def _start(self, function: str, *args: Any, host: int | None = None) -> RankProcess:
        environment = dict(self._environment)
        if host is not None:
            environment["ASYNCDIST_HOST"] = f"host{host}"
        process = self._nursery.start(_PROGRAM, function, *args, environment=environment)
        process.hear(_LIMIT)
        return process

    @contextlib.contextmanager
    def _store(self, host: str) -> Iterator[str]:
        """Serve the store of a job; yield its URL."""
        server = background_loop().run(StoreServer.start(host, 0, token=self._environment["ASYNCDIST_TOKEN"]))
        try:
            yield f"asyncdist://{host}:{server.port}/job"
        finally:
            self._nursery.clear()
            background_loop().run(server.close())

    @contextlib.contextmanager
    def _daemon(self, hosts: Hosts) -> Iterator[str]:
        """Serve the store of a job on the publisher's host; yield its URL."""
        daemon = self._nursery.start(
            _PROGRAM, "serve_store", hosts.addresses[0], hosts.namespaces[0], environment=self._environment
        )
        try:
            yield f"asyncdist://{hosts.addresses[0]}:{daemon.hear()}/job"
        finally:
            self._nursery.clear()


def _ask(process: RankProcess, order: str) -> tuple[float, float]:
    process.say(order)
    begun, ended = process.hear(_LIMIT)
    return begun, ended


def _latest(requests: Sequence[tuple[float, float]], begun: float, ended: float) -> float:
    """Return by how much the latest answer came after its request, of those whose wait overlaps a time."""
    return max((late for due, late in requests if due <= ended and due + late >= begun), default=0.0)
