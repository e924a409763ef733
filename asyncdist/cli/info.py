"""``asyncdist info``: what there is on this machine, and what the cost model thinks."""

from __future__ import annotations

import click
from click.core import ParameterSource

from asyncdist.algorithms.selection import CANDIDATES
from asyncdist.cli import list_options

_SIZES = "4,1K,16K,64K,256K,1M,4M,25M,100M"


@click.command(short_help="Show versions, transports, devices, addresses, settings; explain the choice of schedules.")
@click.option(
    "--collective", type=click.Choice(list(CANDIDATES)), help="Explain which schedule this collective runs, and why."
)
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1), help="Ranks to explain it for.")
@click.option(
    "--sizes", default=_SIZES, show_default=True, callback=list_options.sizes, help="Bytes to explain it for."
)
@click.pass_context
def info(ctx: click.Context, collective: str | None, ranks: int, sizes: tuple[int, ...]) -> None:
    """Show versions, transports, ways between devices, addresses and settings; or explain the choice of schedules.

    \b
    asyncdist info
    asyncdist info --collective all_reduce --ranks 4

    ASYNCDIST_ALGORITHM forces schedules, for instance all_reduce=ring,broadcast=tree: give it to every rank alike.
    """
    from asyncdist.cli import tables
    from asyncdist.cli.console import configured, screen

    config, console = configured(), screen()
    if collective is not None:
        tables.show_choice(console, config, collective, ranks, sizes)
        return
    for option in ("ranks", "sizes"):
        if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{option} is for --collective: name the one to explain")
    tables.show_versions(console)
    tables.show_transports(console)
    tables.show_devices(console)
    tables.show_addresses(console, config)
    tables.show_settings(console, config)
    console.print("Which schedule runs at which size: [bold]asyncdist info --collective all_reduce --ranks 4[/]")
