"""``asyncdist bench faults``: measure how soon ranks know of a failure and go on. Registered in `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncdist.bench.faults.plan import FAULTS, JOBS, ON_TWO_HOSTS, FaultsPlan
from asyncdist.cli.option_types import ListOf, NewFolder, Seconds

_PARTS = (*FAULTS, *JOBS)
_HEARTBEATS = ListOf("seconds such as 5,0.5", lambda word: float(word) if word.replace(".", "", 1).isdigit() else None)


@click.command("bench faults")
@click.argument("parts", nargs=-1, type=click.Choice(_PARTS), metavar="[PART]...")
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(3, 64), help="Number of ranks.")
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1), help="How often each fault happens.")
@click.option(
    "--transport",
    "transports",
    default="shm,tcp",
    show_default=True,
    type=ListOf("transports such as shm,tcp", str),
    help="Transports between the ranks of one host, each a contender.",
)
@click.option(
    "--heartbeat",
    "heartbeats",
    default="5,0.5",
    show_default=True,
    type=_HEARTBEATS,
    help="Values of ASYNCDIST_HEARTBEAT to measure with.",
)
@click.option("--gloo", is_flag=True, help="Also measure torch's gloo.")
@click.option(
    "--limit", default=60.0, show_default=True, type=Seconds(1), help="Seconds after which a fault counts as unnoticed."
)
@click.option("--output", type=NewFolder(), help="Write faults.json and faults.md into this folder.")
def bench_faults(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure how soon ranks know of a failure, and how soon they go on.

    The ranks wait in an all-reduce for one of them, to which PART happens: kill, stop, hold (a native call sleeps and holds
    the interpreter); between two hosts kill-host, cut (the link goes down) and drop (the packets of a host are dropped).
    PART join measures how long a newcomer takes to become a member of a job, and throughput the training of four members
    of which one is killed and replaced at intervals. The default is all parts; those between hosts need root.

    A run of all parts takes half an hour, and needs an idle machine.

    \b
    asyncdist bench faults --gloo --output docs/bench
    asyncdist bench faults kill stop --rounds 5 --heartbeat 0.5
    """
    from asyncdist.bench.faults.benchmark import run_faults_benchmark
    from asyncdist.bench.report.faults_table import faults_page
    from asyncdist.cli.console import print_page, screen, write_page
    from asyncdist.testing.hosts import Hosts, HostsUnavailableError

    err = screen(stderr=True)
    if not parts:
        parts = _PARTS
        try:
            Hosts(2).close()
        except HostsUnavailableError as error:
            err.print(f"{', '.join(ON_TWO_HOSTS)} are left out: {error.summary}")
            parts = tuple(part for part in parts if part not in ON_TWO_HOSTS)
    plan = FaultsPlan(parts=tuple(dict.fromkeys(parts)), **options)
    with err.status("starting") as status:
        report = run_faults_benchmark(plan, lambda doing: status.update(doing))
    page = faults_page(report)
    print_page(screen(), page)
    if output is not None:
        write_page(page, report.as_json(), output, "faults")
