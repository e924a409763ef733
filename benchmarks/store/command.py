"""``python -m benchmarks store``: measure asyncdist's store against torch's TCPStore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncdist.cli.option_types import ListOf, NamesAmong, Seconds
from benchmarks.publication import output_option, publish
from benchmarks.store import benchmark
from benchmarks.store.table import store_page

_COUNTS = ListOf("positive numbers such as 1,8", lambda word: int(word) if word.isdecimal() and int(word) else None)


@click.command()
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(1), help="Rounds in which all contenders take turns."
)
@click.option("--seconds", default=0.4, show_default=True, type=Seconds(0.01), help="Duration of each turn in seconds.")
@click.option(
    "--crowd", default=8192, show_default=True, type=click.IntRange(4), help="Number of simultaneous connections."
)
@click.option(
    "--in-flight",
    default=1000,
    show_default=True,
    type=click.IntRange(1),
    help="Number of concurrent calls of one asyncdist client.",
)
@click.option(
    "--clients",
    default="1,8",
    show_default=True,
    type=_COUNTS,
    help="Numbers of torch's clients to measure with, separated by commas.",
)
@click.option(
    "--only",
    "parts",
    default="",
    type=NamesAmong(benchmark.PARTS),
    help="Parts to measure: torch (torch's clients), asyncdist (its own client), crowd, memory, restart.",
)
@output_option("store")
def store(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure the store against torch's libuv TCPStore. Servers and clients run in separate processes.

    The parts are: torch's clients on either server; asyncdist's client and torch's, one call at a time and with many
    calls in flight; thousands of clients that connect, authenticate, add and meet at a barrier; the memory per
    connection; and a restart from a log of a million sets. A run takes one to two minutes and needs an idle machine.

    \b
    python -m benchmarks store --output docs/bench
    python -m benchmarks store --only torch --clients 8
    """
    plan = benchmark.StorePlan(parts=parts or benchmark.PARTS, **options)
    publish(benchmark.run_store_benchmark, plan, store_page, "store", output)
