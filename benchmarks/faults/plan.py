"""What a benchmark of failures measures. Read by `asyncdist.cli` before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = {
    "kill": "a process is killed (SIGKILL)",
    "stop": "a process is stopped (SIGSTOP)",
    "hold": "a native call sleeps and holds the interpreter",
    "kill-host": "a process is killed, between two hosts",
    "cut": "the link of a host goes down",
    "drop": "the packets that a host sends are dropped",
}
"""The faults, with what happens. The last three need two hosts."""
ON_TWO_HOSTS = ("kill-host", "cut", "drop")
JOBS = {"join": "a process joins a job", "throughput": "members are killed and replaced while they train"}
"""The parts of the benchmark with jobs whose members change."""


@dataclass(frozen=True)
class FaultsPlan:
    """What to measure.

    Attributes:
        parts: Names from `FAULTS` and `JOBS`.
        ranks: The number of ranks.
        rounds: How often each fault happens to each contender.
        transports: The transports of asyncdist, each a contender on one host. Between hosts ranks use both.
        gloo: Whether to measure torch's gloo too.
        heartbeats: The values of ASYNCDIST_HEARTBEAT in seconds.
        limit: Seconds after which the ranks of a contender count as unaware of a fault.
        every: Seconds between two kills in the part ``throughput``, for each of which it runs once.
    """

    parts: tuple[str, ...]
    ranks: int = 8
    rounds: int = 20
    transports: tuple[str, ...] = ("shm", "tcp")
    gloo: bool = False
    heartbeats: tuple[float, ...] = (5.0, 0.5)
    limit: float = 60.0
    every: tuple[float, ...] = (15.0, 2.0)
