"""``asyncdist bench store``: measure asyncdist's store against torch's TCPStore. Registered in `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncdist.bench.plan import STORE_PARTS
from asyncdist.cli.option_types import ListOf, NamesAmong, NewFolder, Seconds

_COUNTS = ListOf("positive numbers such as 1,8", lambda word: int(word) if word.isdecimal() and int(word) else None)


@click.command("bench store")
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
    type=NamesAmong(STORE_PARTS),
    help="Parts to measure: torch (torch's clients), asyncdist (its own client), crowd, memory, restart.",
)
@click.option("--output", type=NewFolder(), help="Write store.json and store.md into this folder.")
def bench_store(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure the store against torch's libuv TCPStore. Servers and clients run in separate processes.

    The parts are: torch's clients on either server; asyncdist's client and torch's, one call at a time and with many
    calls in flight; thousands of clients that connect, authenticate, add and meet at a barrier; the memory per
    connection; and a restart from a log of a million sets. A run takes one to two minutes and needs an idle machine.

    \b
    asyncdist bench store --output docs/bench
    asyncdist bench store --only torch --clients 8
    """
    from asyncdist.bench.report.store_table import store_page
    from asyncdist.bench.store.benchmark import StorePlan, run_store_benchmark
    from asyncdist.cli.console import print_page, screen, write_page

    err = screen(stderr=True)
    report = run_store_benchmark(
        StorePlan(parts=parts or STORE_PARTS, **options), lambda doing: err.print(doing, style="dim")
    )
    page = store_page(report)
    print_page(screen(), page)
    if output is not None:
        write_page(page, report.as_json(), output, "store")
