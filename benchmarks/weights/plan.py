"""What a benchmark of weights measures. Read by `asyncdist.cli` before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHTS_PARTS = ("host", "hosts")


@dataclass(frozen=True)
class WeightsPlan:
    """What to measure.

    Attributes:
        parts: ``"host"``: readers on the publisher's host. ``"hosts"``: one reader on each of several other hosts.
        rounds: How often each version is published and read; the first round is not counted.
        sizes: Bytes of a version in the part ``"host"``.
        readers: The numbers of readers on one host, each a case.
        remote_sizes: Bytes of a version in the part ``"hosts"``.
        hosts: The numbers of other hosts, each a case.
        rate: The rate of each host's link, in the words of ``tc``.
    """

    parts: tuple[str, ...] = WEIGHTS_PARTS
    rounds: int = 7
    sizes: tuple[int, ...] = (1 << 30,)
    readers: tuple[int, ...] = (1, 4)
    remote_sizes: tuple[int, ...] = (100 << 20,)
    hosts: tuple[int, ...] = (1, 8)
    rate: str = "1gbit"
