"""Measures the links between the hosts of a job for a profile. Called by `asyncdist.cli.bench`.

A world measures the same at its start, for at most a tenth of a second. This takes more time, and each value is the median
of several measurements.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from asyncdist.cli.console import screen
from asyncdist.cli.machine import machine
from asyncdist.config import DEFAULT_LANES, Config
from asyncdist.errors import BenchmarkError, UsageError
from asyncdist.groups.calibration.measurement import first_of_hosts, measure_links
from asyncdist.groups.calibration.profile import (
    FEW_LANES,
    LANES,
    MANY_LANES,
    MANY_LANES_WITH_THREADS,
    Values,
    combined,
    lanes_of,
    write_profile,
)
from asyncdist.groups.world import World, open_world

_ROUNDS = 10
"""Measurements whose medians count."""
_LIMIT = 3.0
"""Seconds for one of them: enough for 5 MiB at 20 Mbit/s."""
_REPEAT = 20


async def calibrate(path: Path) -> None:
    """Join the other ranks of the job and measure the links between its hosts. Rank 0 writes a profile, and shows it.

    Every rank calls it, as torchrun or another launcher has started it on each host.

    Raises:
        UsageError: All ranks are on one host.
        BenchmarkError: A link failed, or was too slow to be measured.
        RendezvousError: The ranks did not meet.
    """
    config = Config.from_environment().with_(calibrate=False, profile=None)
    world = await open_world(config=config, home=asyncio.get_running_loop(), name="bench")
    try:
        hosts = first_of_hosts(world.endpoint.hosts)
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
        if world.group.rank() == 0:
            _show(path, values, len(hosts))
    finally:
        world.leave()
        await world.close()


async def _measure(world: World, hosts: Sequence[int]) -> list[Values]:
    """Return the values of each round, the same on all ranks."""
    rounds = []
    for number in range(_ROUNDS):
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


def _show(path: Path, values: Values, hosts: int) -> None:
    lines = [
        f"Links between {hosts} hosts, medians of {_ROUNDS} measurements:",
        f"  a round of messages takes {values['alpha'] * 1e6:.1f} µs",
        f"  each message takes {values['overhead'] * 1e6:.1f} µs more",
        f"  each byte takes {values['beta'] * 1e9:.2f} ns more: {8e-9 / values['beta']:.2f} Gbit/s",
        f"  {_lanes_text(values)}",
        f"{path} has them. To use them, set ASYNCDIST_PROFILE={path} for rank 0.",
    ]
    screen().print("\n".join(lines), markup=False)


def _lanes_text(values: Mapping[str, float]) -> str:
    """Say which connections move a large tensor, and how their times compare."""
    if FEW_LANES not in values:
        return f"a large tensor takes {DEFAULT_LANES} connections: the links are too slow to compare them with {LANES}"
    times = [
        f"{values[name] / values[FEW_LANES]:.2f} times as long over {LANES}{text}"
        for name, text in ((MANY_LANES, ""), (MANY_LANES_WITH_THREADS, " with threads"))
        if name in values
    ]
    chosen = lanes_of(values)
    text = f"{chosen.get('lanes', DEFAULT_LANES)} connections{' with threads' if 'tcp_threads' in chosen else ''}"
    return f"a large tensor takes {text}: it takes {' and '.join(times)} as over {DEFAULT_LANES}"
