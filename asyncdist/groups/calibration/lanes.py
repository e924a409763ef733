"""Measures whether more connections between two hosts, or threads that use them, carry a large tensor faster.

Networks may limit the rate of one connection, and one thread may be slower than the network. The first ranks of two
neighbouring hosts all-reduce the same tensor in turns with each of `CANDIDATES`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.config import DEFAULT_LANES
from asyncdist.groups.calibration.profile import FEW_LANES, LANES, MANY_LANES, MANY_LANES_WITH_THREADS, Values
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.endpoint import Endpoint

CANDIDATES: dict[str, dict[str, Any]] = {
    FEW_LANES: {"lanes": DEFAULT_LANES, "tcp_threads": "never"},
    MANY_LANES: {"lanes": LANES, "tcp_threads": "never"},
    MANY_LANES_WITH_THREADS: {"lanes": LANES, "tcp_threads": "always"},
}
"""The settings to compare, by the name of the measured time."""
_CALLS = 4
"""Calls with each candidate. The first one opens connections or starts threads, and does not count."""
_TIMEOUT = 5.0
"""Seconds after which a call fails. The caller gives up earlier."""
_SHARE = 0.6
"""The share of the time left that the calls should take."""
_NBYTES = 1 << 20, 16 << 20
"""Bytes of the smallest and of the largest tensor. A smaller one would not show the rate."""
_THREADS_NBYTES = 8 << 20
"""Bytes of the smallest tensor whose messages are so large that threads move them."""


async def measure_lanes(
    endpoint: Endpoint, pair: Sequence[int], name: str, *, beta: float, until: float, threads: bool
) -> Values:
    """Measure with each candidate; both ranks call this at the same time.

    Args:
        endpoint: This rank's endpoint. Its world has no groups that communicate yet.
        pair: The two ranks.
        name: The first part of the names of the groups that measure.
        beta: Seconds per byte over one connection, as this rank knows it.
        until: Monotonic time at which the measurement should have ended.
        threads: Whether this host has cores left for threads.

    Returns:
        Seconds per byte by the names of `CANDIDATES`; empty if the time is too short for this link.
    """
    before = endpoint.config
    groups: dict[str, Group] = {}
    try:
        for candidate, settings in CANDIDATES.items():
            # Each tensor that is measured is striped, in two messages.
            endpoint.config = before.with_(stripe_nbytes=_NBYTES[0] // 2, **settings)
            groups[candidate] = Group(endpoint, pair, f"{name}, {candidate}", _TIMEOUT)
        endpoint.config = before.with_(**CANDIDATES[FEW_LANES])
        # The slower host decides for both, so that both make the same calls.
        worst = torch.tensor([beta, time.monotonic() - until, float(not threads)], dtype=torch.float64)
        await groups[FEW_LANES].all_reduce(worst, ReduceOp.MAX)
        beta, late, no_threads = worst.tolist()
        nbytes = min(_NBYTES[1], int(_SHARE * -late / (beta * _CALLS * len(CANDIDATES))))
        if no_threads or nbytes < _THREADS_NBYTES:
            del groups[MANY_LANES_WITH_THREADS]
        return {} if nbytes < _NBYTES[0] else await _measure_in_turns(endpoint, groups, nbytes)
    finally:
        endpoint.config = before
        for group in groups.values():
            group.close()


async def _measure_in_turns(endpoint: Endpoint, groups: dict[str, Group], nbytes: int) -> Values:
    before, tensor = endpoint.config, torch.zeros(nbytes // 4)
    taken: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(_CALLS):
        for name, group in groups.items():
            endpoint.config = before.with_(**CANDIDATES[name])
            start = time.perf_counter()
            await group.all_reduce(tensor)
            taken[name].append(time.perf_counter() - start)
    # Another process may delay a call by several times its duration.
    return {name: float(np.median(seconds[1:])) / nbytes for name, seconds in taken.items()}
