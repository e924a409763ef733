"""Measures the links between hosts, for the model that selects the schedules of collectives.

When ranks on several hosts have met, the first rank of each host sends messages to the first rank of the next host, and
receives those of the host before: the traffic of one round of a ring. It takes at most `LIMIT` seconds, and every rank
gets the results through the store.

A round with k small messages each way takes ``alpha + k * overhead``, and one with a large message ``beta`` for each byte
more. ``gamma`` is not measured: a byte that is reduced in cache costs little compared with one that crosses a link. At the
end, `lanes` compares few connections with many.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from asyncdist.base.cores import allowed_cores
from asyncdist.errors import GroupError, TransportUnavailableError
from asyncdist.groups.calibration.lanes import measure_lanes
from asyncdist.groups.calibration.profile import Values
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.endpoint import Endpoint

LIMIT = 0.1
"""Seconds that the measurement at the start of a world takes at most, once the hosts are connected."""
_CONNECT_LIMIT = 2.0
"""Seconds for the connections to the neighbours, which later collectives use too."""
_MANY = 8
"""Messages in a round that tells the cost of a message from that of a round."""
_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
"""Bytes of the large messages. The first ones may fit into the buffers of the hosts and of the network."""
_LEAST_SECONDS, _LEAST_PER_BYTE = 0.1e-6, 1e-12
"""Lower bounds of the measured values: noise must not make a round or a byte free of charge."""


def first_of_hosts(hosts: Sequence[bytes | None]) -> list[int]:
    """Return the first rank of each host, from the hosts of all ranks."""
    first: dict[bytes | None, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return list(first.values())


async def measure_links(
    endpoint: Endpoint,
    ranks: Sequence[int],
    *,
    limit: float | None = None,
    repeat: int = 5,
    lanes: bool = True,
    name: str = "calibration",
) -> Values:
    """Measure the links between neighbours in a ring of ranks; each of them calls this at the same time.

    Args:
        endpoint: This rank's endpoint. Its world has no groups that communicate yet.
        ranks: The ranks, one of each host.
        limit: Seconds after which the measurement ends, with what it has found; `LIMIT` by default.
        repeat: The number of rounds with small messages of each kind.
        lanes: Whether to compare few connections with many.
        name: Name of the groups that measure. Each measurement of a world needs a name of its own: a rank discards messages
            of a group that it has destroyed, also if it is about to make one with the same name.

    Returns:
        The values that were found; without any if a link is too slow or fails.
    """
    limit = LIMIT if limit is None else limit
    group = Group(endpoint, ranks, name, _CONNECT_LIMIT + limit)
    ring = _Ring(group)
    try:
        with contextlib.suppress(GroupError, TransportUnavailableError, TimeoutError):
            async with asyncio.timeout(_CONNECT_LIMIT):
                await ring.shift(1)
            until = time.monotonic() + limit
            async with asyncio.timeout(limit):
                await ring.measure(until, repeat)
                if lanes:
                    ring.found |= await _measure_lanes(endpoint, ranks, ring.found, until, name)
    finally:
        ring.close()
        # The flight recorder is for the program's operations.
        endpoint.recorder.clear()
    return ring.found


async def _measure_lanes(endpoint: Endpoint, ranks: Sequence[int], found: Values, until: float, name: str) -> Values:
    """Compare few connections with many between the two hosts of each pair in the order of the ranks."""
    place = ranks.index(endpoint.rank)
    pair = ranks[place & -2 : (place & -2) + 2]
    if len(pair) < 2 or "beta" not in found or not endpoint.link(pair[1 - place % 2]).has_lanes:
        return {}
    threads = endpoint.config.tcp_threads == "auto" and _has_cores(endpoint)
    return await measure_lanes(endpoint, pair, name, beta=found["beta"], until=until, threads=threads)


def _has_cores(endpoint: Endpoint) -> bool:
    """Return whether this host has two cores for each of its ranks."""
    own = endpoint.processes.get(endpoint.rank)
    neighbours = endpoint.processes.values()
    ranks = 1 if own is None else sum(each is not None and each["host"] == own["host"] for each in neighbours)
    return allowed_cores() >= 2 * ranks


class _Ring:
    """Rounds in which each rank sends to the next one and receives from the one before."""

    def __init__(self, group: Group) -> None:
        self._group, size, rank = group, group.size(), group.rank()
        self._next, self._before = (rank + 1) % size, (rank - 1) % size
        self._pending: list[Any] = []
        self.found: Values = {}

    async def measure(self, until: float, repeat: int) -> None:
        """Fill `found` as far as the time allows."""
        one = await self._fastest(1, repeat)
        self.found["alpha"] = one
        many = await self._fastest(_MANY, repeat)
        overhead = max((many - one) / (_MANY - 1), _LEAST_SECONDS)
        self.found |= {"overhead": overhead, "alpha": max(one - overhead, _LEAST_SECONDS)}
        before, last = 4, one
        for nbytes in _SIZES:
            # A message that would not arrive in time would delay the first operations of the program.
            if time.monotonic() + max(last, self.found.get("beta", 0.0) * nbytes) > until:
                break
            seconds = min([await self._seconds(1, nbytes) for _ in range(2 if nbytes < _SIZES[-1] else 1)])
            self.found["beta"] = max((seconds - last) / (nbytes - before), _LEAST_PER_BYTE)
            before, last = nbytes, seconds

    async def _fastest(self, messages: int, repeat: int) -> float:
        await self.shift(messages)
        # The least, because other processes may delay a round by several times its duration.
        return min([await self._seconds(messages) for _ in range(repeat)])

    async def _seconds(self, messages: int, nbytes: int = 4) -> float:
        start = time.perf_counter()
        await self.shift(messages, nbytes)
        return time.perf_counter() - start

    async def shift(self, messages: int, nbytes: int = 4) -> None:
        """Send messages to the next rank, and receive as many from the one before."""
        group = self._group
        sent = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(messages)]
        received = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(messages)]
        self._pending = [group.recv(tensor, self._before, tag) for tag, tensor in enumerate(received)]
        self._pending += [group.send(tensor, self._next, tag) for tag, tensor in enumerate(sent)]
        for work in self._pending:
            await work

    def close(self) -> None:
        self._group.close()
        for work in self._pending:
            # The program does not hear of messages that were given up.
            work.exception()
