"""``python -m benchmarks faults``: measure how soon ranks know of a failure and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncdist.cli.option_types import ListOf, Seconds
from benchmarks.faults import benchmark
from benchmarks.faults.plan import FAULTS, JOBS, ON_TWO_HOSTS, FaultsPlan
from benchmarks.faults.table import faults_page
from benchmarks.publication import output_option, parts_that_run, publish

_PARTS = (*FAULTS, *JOBS)
_HEARTBEATS = ListOf("seconds such as 5,0.5", lambda word: float(word) if word.replace(".", "", 1).isdigit() else None)


@click.command()
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
@output_option("faults")
def faults(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure how soon ranks know of a failure, and how soon they go on.

    The ranks wait in an all-reduce for one of them, to which PART happens: kill, stop, hold (a native call sleeps and holds
    the interpreter); between two hosts kill-host, cut (the link goes down) and drop (the packets of a host are dropped).
    PART join measures how long a newcomer takes to become a member of a job, and throughput the training of four members
    of which one is killed and replaced at intervals. The default is all parts; those between hosts need root.

    A run of all parts takes half an hour, and needs an idle machine.

    \b
    python -m benchmarks faults --gloo --output docs/bench
    python -m benchmarks faults kill stop --rounds 5 --heartbeat 0.5
    """
    plan = FaultsPlan(parts=parts_that_run(parts, _PARTS, ON_TWO_HOSTS), **options)
    publish(benchmark.run_faults_benchmark, plan, faults_page, "faults", output)
