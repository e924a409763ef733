"""Measures the links between the hosts of a job for a profile. Called by `asyncdist.cli.bench`.

A world measures the same at its start, for at most a tenth of a second. This takes more time, and each value is the median
of several measurements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from asyncdist.cli.machine import machine
from asyncdist.config import Config
from asyncdist.errors import BenchmarkError, UsageError
from asyncdist.groups.calibration.measurement import first_of_hosts, measure_links
from asyncdist.groups.calibration.profile import Values, combined, write_profile
from asyncdist.groups.world import World, open_world

ROUNDS = 10
"""Measurements whose medians count."""
_LIMIT = 3.0
"""Seconds for one of them: enough for 5 MiB at 20 Mbit/s."""
_REPEAT = 20


@dataclass(frozen=True)
class Calibration:
    """The result on one rank.

    Attributes:
        values: ``alpha``, ``beta`` and ``overhead`` of `asyncdist.kernel.algorithms.selection.Model`, in seconds.
        hosts: The number of hosts.
        rank: This rank. Rank 0 writes the profile.
    """

    values: Values
    hosts: int
    rank: int


async def calibrate(path: Path) -> Calibration:
    """Join the other ranks of the job, measure the links between its hosts, and write a profile on rank 0.

    Every rank calls it, as torchrun or another launcher has started it on each host.

    Args:
        path: The profile.

    Raises:
        UsageError: All ranks are on one host.
        BenchmarkError: A link failed, or was too slow to be measured.
        RendezvousError: The ranks did not meet.
    """
    config = Config.from_environment().with_(calibrate=False, profile=None)
    world = await open_world(config=config, home=asyncio.get_running_loop(), name="bench")
    try:
        hosts = first_of_hosts(world.endpoint.processes)
        if len(hosts) < 2:
            raise UsageError(
                "all ranks of this job are on one host, where no link is measured: start `asyncdist bench --calibrate` on "
                "several hosts, for example with torchrun --nnodes"
            )
        rounds = await _measure(world, hosts)
        values = {name: median(each[name] for each in rounds if name in each) for name in rounds[0]}
        if world.group.rank() == 0:
            write_profile(path, values, {"hosts": len(hosts), "rounds": len(rounds), "machine": machine()})
        await world.group.barrier()
        return Calibration(values, len(hosts), world.group.rank())
    finally:
        world.leave()
        await world.close()


async def _measure(world: World, hosts: Sequence[int]) -> list[Values]:
    """Return the values of each round, the same on all ranks."""
    rounds = []
    for number in range(ROUNDS):
        own: Values | None = None
        if world.group.rank() in hosts:
            own = await measure_links(world.endpoint, hosts, limit=_LIMIT, repeat=_REPEAT, name=f"calibration {number}")
        every: list[Values | None] = [None] * world.group.size()
        await world.group.all_gather_object(every, own)
        values = combined(every)
        if len(values) < 3:
            raise BenchmarkError(
                "the links between the hosts could not be measured within "
                f"{_LIMIT:g} s: a link failed, or is slower than 20 Mbit/s"
            )
        rounds.append(values)
    return rounds
