"""``asyncdist bench store``: measure our store beside torch's TCPStore."""

from __future__ import annotations

import json
from pathlib import Path

import click

from asyncdist.cli import list_options
from asyncdist.cli.option_types import NewFolder, Seconds, reporting_write_errors


def _parts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Read what is to be measured; all of it where nothing is named."""
    from asyncdist.bench.store.benchmark import PARTS

    return list_options.names_among(PARTS)(ctx, param, value) or PARTS


@click.command("bench store")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Rounds in which all take turns.")
@click.option("--seconds", default=0.4, show_default=True, type=Seconds(0.01), help="Of each turn.")
@click.option("--crowd", default=8192, show_default=True, type=click.IntRange(4), help="Connections at a time.")
@click.option("--in-flight", default=1000, show_default=True, type=click.IntRange(1), help="Calls of one client.")
@click.option(
    "--clients", default="1,8", show_default=True, callback=list_options.counts, help="Numbers of torch's clients."
)
@click.option("--only", "parts", default="", callback=_parts, help="Some of theirs, ours, crowd, memory, restart.")
@click.option("--output", type=NewFolder(), help="Write store.json and store.md there.")
def bench_store(
    rounds: int,
    seconds: float,
    crowd: int,
    in_flight: int,
    clients: tuple[int, ...],
    parts: tuple[str, ...],
    output: Path | None,
) -> None:
    """Measure the store beside torch's libuv TCPStore, servers and clients in processes of their own.

    Torch's clients, one and eight of them, on either server; our client against torch's, one call at a time and many
    in flight; a crowd that connects, authenticates, adds and meets at a barrier; what a connection costs in memory; and a
    restart from a log of a million sets. It takes a minute or two, and wants a machine with nothing else to do.

    \b
    asyncdist bench store --output docs/bench
    asyncdist bench store --only theirs --clients 8
    """
    from asyncdist.bench.report.store_table import about_store, cases_left_out, store_markdown, store_results_table
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
    for line in (about_store(report), *cases_left_out(report)):
        console.print(line, style="dim", soft_wrap=True, markup=False)
    console.print(store_results_table(report))
    if output is not None:
        figures = json.dumps(report.as_json(), indent=1, ensure_ascii=False)
        with reporting_write_errors(output):
            (output / "store.md").write_text(store_markdown(report), encoding="utf-8")
            (output / "store.json").write_text(figures + "\n", encoding="utf-8")
