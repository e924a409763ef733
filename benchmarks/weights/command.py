"""``python -m benchmarks weights``: measure how fast published weights reach their readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from asyncdist.cli.option_types import ListOf
from asyncdist.config import whole_number
from benchmarks.publication import output_option, parts_that_run, publish
from benchmarks.weights import benchmark
from benchmarks.weights.plan import WEIGHTS_PARTS, WeightsPlan
from benchmarks.weights.table import weights_page

_COUNTS = ListOf("positive numbers such as 1,4", lambda word: int(word) if word.isdecimal() and int(word) else None)
_SIZES = ListOf("sizes such as 100M,1G", lambda word: whole_number(word) or None)


@click.command()
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
@output_option("weights")
def weights(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure how fast published weights reach their readers, and how late the readers' answers are.

    PART host: readers on the publisher's host, which answer requests while each version arrives, compared with a copy of
    the same bytes by one thread. PART hosts: one reader on each of several hosts, which are network namespaces with links
    of a limited rate, compared with one plain transfer over such a link; it needs root. The default is both.

    A run takes two minutes, and needs an idle machine with as much free memory as six versions.

    \b
    python -m benchmarks weights --output docs/bench
    python -m benchmarks weights host --sizes 100M --readers 8
    """
    plan = WeightsPlan(parts=parts_that_run(parts, WEIGHTS_PARTS, ("hosts",)), **options)
    publish(benchmark.run_weights_benchmark, plan, weights_page, "weights", output)
