"""``asyncdist bench store``: measure asyncdist's store against torch's TCPStore. Registered in `cli`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from asyncdist.cli import list_options
from asyncdist.cli.option_types import NewFolder, Seconds, reporting_write_errors


def _parts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Read the parts to measure; the default is all parts."""
    from asyncdist.bench.store.benchmark import PARTS

    return list_options.names_among(PARTS)(ctx, param, value) or PARTS


@click.command("bench store")
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(1), help="Rounds in which all contenders take turns."
)
@click.option("--seconds", default=0.4, show_default=True, type=Seconds(0.01), help="Duration of each turn.")
@click.option(
    "--crowd", default=8192, show_default=True, type=click.IntRange(4), help="Number of simultaneous connections."
)
@click.option(
    "--in-flight", default=1000, show_default=True, type=click.IntRange(1), help="Concurrent calls of one client."
)
@click.option(
    "--clients",
    default="1,8",
    show_default=True,
    callback=list_options.counts,
    help="Numbers of torch clients, separated by commas.",
)
@click.option(
    "--only",
    "parts",
    default="",
    callback=_parts,
    help="Parts to measure: theirs (torch clients), ours, crowd, memory, restart.",
)
@click.option("--output", type=NewFolder(), help="Write store.json and store.md into this folder.")
def bench_store(
    rounds: int,
    seconds: float,
    crowd: int,
    in_flight: int,
    clients: tuple[int, ...],
    parts: tuple[str, ...],
    output: Path | None,
) -> None:
    """Measure the store against torch's libuv TCPStore. Servers and clients run in separate processes.

    The parts are: torch clients on either server; asyncdist's client and torch's, one call at a time and with many
    calls in flight; thousands of clients that connect, authenticate, add and meet at a barrier; the memory of a
    connection; and a restart from a log of a million sets. A run takes one to two minutes and needs an idle machine.

    \b
    asyncdist bench store --output docs/bench
    asyncdist bench store --only theirs --clients 8
    """
    from asyncdist.bench.report.store_table import about_store, store_markdown, store_results_table
    from asyncdist.bench.store.benchmark import StorePlan, run_store_benchmark
    from asyncdist.cli.console import screen

    err = screen(stderr=True)
    plan = StorePlan(
        rounds=rounds,
        seconds=seconds,
        crowd=crowd,
        in_flight=in_flight,
        clients=clients,
        parts=parts,
    )
    report = run_store_benchmark(plan, lambda doing: err.print(doing, style="dim"))
    console = screen()
    console.print(about_store(report), style="dim", soft_wrap=True, markup=False)
    console.print(store_results_table(report))
    if output is not None:
        figures = json.dumps(report.as_json(), indent=1, ensure_ascii=False)
        with reporting_write_errors(output):
            (output / "store.md").write_text(store_markdown(report), encoding="utf-8")
            (output / "store.json").write_text(figures + "\n", encoding="utf-8")
