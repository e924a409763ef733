"""``python -m benchmarks ddp``: measure data-parallel training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.ddp import benchmark
from benchmarks.ddp.plan import ON_TWO_HOSTS, PARTS, DdpPlan, nbytes_per_second
from benchmarks.ddp.table import ddp_page
from benchmarks.publication import output_option, parts_that_run, publish


def _rate(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        nbytes_per_second(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(tuple(PARTS)), metavar="[PART]...")
@click.option(
    "--rounds",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Rounds of steps and small, each with new processes; hosts has half, memory a fifth, diloco a tenth of them.",
)
@click.option("--steps", default=10, show_default=True, type=click.IntRange(1), help="Steps of a contender in a round.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(2, 64), help="Number of ranks on one host.")
@click.option("--rate", default="1gbit", show_default=True, callback=_rate, help="Link between the hosts of `hosts`.")
@click.option(
    "--slow-rate", default="100mbit", show_default=True, callback=_rate, help="Link between the hosts of `diloco`."
)
@click.option(
    "--every", default=100, show_default=True, type=click.IntRange(5), help="Inner steps between two outer steps."
)
@click.option("--outer-steps", default=10, show_default=True, type=click.IntRange(1), help="Outer steps of `diloco`.")
@output_option("ddp")
def ddp(parts: tuple[str, ...], output: Path | None, **options: Any) -> None:
    """Measure data-parallel training against stock PyTorch and against training without communication.

    PART is steps (training steps on one host), small (a model of 1,000 small parameters, in a world of one), hosts
    (training steps between two hosts, whose link is limited), memory (above model, gradients and optimizer) or diloco
    (training with few exchanges over a slow link). The default is all parts; those with two hosts need root. Contenders
    take turns step by step, and must end with the same weights.

    A run of all parts needs an idle machine with a core for each rank, and takes about half an hour there.

    \b
    python -m benchmarks ddp --output docs/bench
    python -m benchmarks ddp steps small --rounds 3
    """
    plan = DdpPlan(parts=parts_that_run(parts, tuple(PARTS), ON_TWO_HOSTS), **options)
    publish(benchmark.run_ddp_benchmark, plan, ddp_page, "ddp", output)
