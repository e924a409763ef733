"""A simulated cluster: hosts with processors and a network between them, in virtual time.

What a process does takes its thread, and one processor of its host, for some seconds; a message then takes its time on the
wires of both hosts. Everything happens in the order of the calls. The model is LogGP's (Alexandrov, Ionescu,
Schauser, Scheiman, "LogGP: incorporating long messages into the LogP model", SPAA 1995), with processors that are shared.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from asyncdist.kernel.algorithms import recursive_doubling, tree
from asyncdist.kernel.algorithms.schedule import CROWD, Schedule
from asyncdist.kernel.algorithms.selection import DEFAULT, choose


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of what processes and the network do, as measured on real ones.

    Attributes:
        start: Processor time of a rank for its start, without what follows.
        neighbour: Further processor time of a rank for each other rank of its host: both probe shared memory.
        know: Processor time of a rank for each other rank of its crowd that it does not meet at the start.
        wake: Processor time of a rank for each other rank of its host in a barrier in shared memory.
        cold: Further processor time of a rank in the first one, whose code and memory are not in the caches.
        map: Further processor time of a rank for each of them in the first one, for which it maps their memory.
        connect: Processor time of a client for a connection to the store.
        accept: Processor time of the store for it.
        request: Processor time of the store for a request and its reply.
        answer: Processor time of a client for a request and its reply.
        nbyte: Processor time on each side for a byte that the store receives or sends.
        dial: Processor time on each side for a connection between ranks.
        message: Processor time on each side for a small message between ranks.
        wakeup: Further processor time of a process for what arrives, after others have had its processor.
        latency: Time of a message on the way between two hosts.
        bandwidth: Bytes per second into and out of a host.
    """

    start: float = 5e-3
    neighbour: float = 1e-4
    know: float = 1e-5
    wake: float = 5e-6
    cold: float = 5e-4
    map: float = 2e-5
    connect: float = 4e-4
    accept: float = 3e-4
    request: float = 2e-5
    answer: float = 3e-5
    nbyte: float = 5e-10
    dial: float = 4e-4
    message: float = 4e-5
    wakeup: float = 0.0
    latency: float = 2e-5
    bandwidth: float = 1.25e9


class ClusterHost:
    """A host: processors, and a wire in each direction. Attributes say until when they are busy."""

    __slots__ = ("incoming", "outgoing", "processors")

    def __init__(self, processors: int) -> None:
        self.processors = [0.0] * processors
        self.outgoing = self.incoming = 0.0


class ClusterProcess:
    """A process of a host. It has one thread, which does one thing after the other."""

    __slots__ = ("_busy", "_cluster", "host", "is_silent", "slowness", "used")

    def __init__(self, cluster: Cluster, host: ClusterHost) -> None:
        self._cluster, self.host, self._busy, self.is_silent = cluster, host, 0.0, False
        self.slowness, self.used = 1.0, 0.0
        """The factor of its processor time, and the processor time that it has used."""

    def work(self, seconds: float, wakeup: float = 0.0) -> float:
        """Use a processor for some seconds from now, after earlier work; return when that is done.

        It takes ``wakeup`` more if the process has slept, or others have had the processor in between.
        """
        processors = self.host.processors
        begun = max(self._cluster.now(), self._busy, processors[0])
        seconds = (seconds + wakeup * (begun > self._busy)) * self.slowness
        self._busy = begun + seconds
        self.used += seconds
        heapq.heapreplace(processors, self._busy)
        return self._busy

    async def worked(self, seconds: float) -> None:
        """Work for some seconds."""
        await asyncio.sleep(self.work(seconds) - self._cluster.now())

    def send(
        self, to: ClusterProcess, nbytes: int, own: float, their: float, then: Callable[..., Any], *args: Any
    ) -> None:
        """Send a message, and call a function when the receiver has processed it, unless it is silent by then.

        Args:
            own: Processor time of the sender.
            their: Processor time of the receiver.
        """

        def receive() -> None:
            self._cluster.at(to.work(their, self._cluster.costs.wakeup), finish)

        def finish() -> None:
            if not to.is_silent:
                then(*args)

        self._cluster.at(self._cluster.carried(self.host, to.host, nbytes, self.work(own)), receive)


@dataclass(frozen=True, slots=True)
class Shape:
    """The processes of a cluster and its hosts; with ``memory`` the processes of a host share memory."""

    size: int
    per_host: int = 8
    processors: int = 64
    memory: bool = True

    @property
    def is_crowd(self) -> bool:
        """Whether all ranks are of one host, whose processors many of them share."""
        return CROWD < self.size <= self.per_host and self.size >= 2 * self.processors

    @property
    def schedule_of_barrier(self) -> Callable[[int, int, Any, Any], Schedule]:
        """The schedule of a barrier by messages."""
        model = replace(DEFAULT, cores=self.processors if self.is_crowd else 0)
        is_tree = choose("barrier", 0, self.size, model=model) == "tree"
        return tree.barrier if is_tree else recursive_doubling.barrier


class Cluster:
    """Hosts with equally many processes, in order."""

    def __init__(self, shape: Shape, costs: Costs) -> None:
        loop = asyncio.get_running_loop()
        self.now, self.at, self.costs, self.per_host = loop.time, loop.call_at, costs, shape.per_host
        self.hosts = [ClusterHost(shape.processors) for _ in range(-(-shape.size // shape.per_host))]
        self.processes = [ClusterProcess(self, self.hosts[rank // shape.per_host]) for rank in range(shape.size)]
        self.sent = 0
        """The bytes of all messages."""

    def carried(self, sender: ClusterHost, receiver: ClusterHost, nbytes: int, ready: float) -> float:
        """Return when a message has arrived that was ready at a time."""
        self.sent += nbytes
        if sender is receiver:
            return ready
        seconds = nbytes / self.costs.bandwidth
        sender.outgoing = max(sender.outgoing, ready) + seconds
        receiver.incoming = max(receiver.incoming, sender.outgoing - seconds + self.costs.latency) + seconds
        return receiver.incoming
