"""``asyncdist info``: what there is on this machine, and what the cost model thinks."""

from __future__ import annotations

import click

from asyncdist.cli.sizes import Sizes
from asyncdist.collectives.choose import CANDIDATES

_SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20)


@click.command(short_help="Show versions, transports, addresses, settings; explain the choice of schedules.")
@click.option(
    "--collective", type=click.Choice(list(CANDIDATES)), help="Explain which schedule this collective runs, and why."
)
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1), help="Ranks to explain it for.")
@click.option("--sizes", default=_SIZES, type=Sizes(), help="Bytes to explain it for; K, M, G allowed.")
def info(collective: str | None, ranks: int, sizes: tuple[int, ...]) -> None:
    """Show versions, transports, addresses and settings; or explain the choice of schedules.

    \b
    asyncdist info
    asyncdist info --collective all_reduce --ranks 4

    ASYNCDIST_ALGORITHM forces schedules, for instance all_reduce=ring,broadcast=tree: give it to every rank alike.
    """
    from asyncdist.cli import show
    from asyncdist.cli.screen import configured, screen

    config, console = configured(), screen()
    if collective is not None:
        show.choice(console, config, collective, ranks, sizes)
        return
    show.versions(console)
    show.transports(console)
    show.addresses(console, config)
    show.settings(console, config)
    console.print("Which schedule runs at which size: [bold]asyncdist info --collective all_reduce --ranks 4[/]")
