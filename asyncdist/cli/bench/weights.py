"""``asyncdist bench weights``: measure how fast published weights reach their readers. Registered in `cli`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncdist.bench.weights.plan import WEIGHTS_PARTS, WeightsPlan
from asyncdist.cli.option_types import ListOf, NewFolder
from asyncdist.config import whole_number

_COUNTS = ListOf("positive numbers such as 1,4", lambda word: int(word) if word.isdecimal() and int(word) else None)
_SIZES = ListOf("sizes such as 100M,1G", lambda word: whole_number(word) or None)


@click.command("bench weights")
@click.argument("parts", nargs=-1, type=click.Choice(WEIGHTS_PARTS), metavar="[PART]...")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(1), help="Versions of each case.")
@click.option("--sizes", default="1G", show_default=True, type=_SIZES, help="Bytes of a version on one host.")
@click.option(
    "--readers", default="1,4", show_default=True, type=_COUNTS, help="Numbers of readers on one host, each a case."
)
@click.option(
    "--remote-sizes", default="100M", show_default=True, type=_SIZES, help="Bytes of a version for other hosts."
)
@click.option("--hosts", default="1,8", show_default=True, type=_COUNTS, help="Numbers of other hosts, each a case.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of each host's link, in the words of tc.")
@click.option("--output", type=NewFolder(), help="Write weights.json and weights.md into this folder.")
def bench_weights(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure how fast published weights reach their readers, and how late the readers' answers are.

    PART host: readers on the publisher's host, which answer requests while each version arrives, compared with a copy of
    the same bytes by one thread. PART hosts: one reader on each of several hosts, which are network namespaces with links
    of a limited rate, compared with one plain transfer over such a link; it needs root. The default is both.

    A run takes two minutes, and needs an idle machine with as much free memory as six versions.

    \b
    asyncdist bench weights --output docs/bench
    asyncdist bench weights host --sizes 100M --readers 8
    """
    from asyncdist.bench.report.weights_table import weights_page
    from asyncdist.bench.weights.benchmark import run_weights_benchmark
    from asyncdist.cli.console import print_page, screen, write_page
    from asyncdist.testing.hosts import Hosts, HostsUnavailableError

    err = screen(stderr=True)
    if not parts:
        parts = WEIGHTS_PARTS
        try:
            Hosts(2).close()
        except HostsUnavailableError as error:
            err.print(f"hosts is left out: {error.summary}")
            parts = tuple(part for part in parts if part != "hosts")
    plan = WeightsPlan(parts=tuple(dict.fromkeys(parts)), **options)
    with err.status("starting") as status:
        report = run_weights_benchmark(plan, lambda doing: status.update(doing))
    page = weights_page(report)
    print_page(screen(), page)
    if output is not None:
        write_page(page, report.as_json(), output, "weights")
