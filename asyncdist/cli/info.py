"""``asyncdist info``: show versions, transports, devices and settings, and explain the choice of algorithms.

Registered in `cli`.
"""

from __future__ import annotations

import json

import click
from click.core import ParameterSource

from asyncdist.cli.option_types import ListOf
from asyncdist.config import whole_number
from asyncdist.kernel.algorithms.selection import CANDIDATES

_SIZES = "4,1K,16K,64K,256K,1M,4M,25M,100M"


@click.command(short_help="Show versions, transports, devices, addresses and settings; explain the algorithms.")
@click.option(
    "--collective", type=click.Choice(list(CANDIDATES)), help="Explain which algorithm this collective runs, and why."
)
@click.option(
    "--ranks", default=2, show_default=True, type=click.IntRange(1), help="Number of ranks to explain it for."
)
@click.option(
    "--sizes",
    default=_SIZES,
    show_default=True,
    type=ListOf("sizes such as 4,64K,25M", whole_number),
    help="Tensor sizes in bytes to explain it for.",
)
@click.option("--settings", "every_setting", is_flag=True, help="Show all settings, also those with their defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all settings.")
@click.pass_context
def info(
    ctx: click.Context, collective: str | None, ranks: int, sizes: tuple[int, ...], every_setting: bool, as_json: bool
) -> None:
    """Show versions, transports, device back ends, addresses and settings; or explain the choice of algorithms.

    \b
    asyncdist info
    asyncdist info --settings                 # all, with their meanings
    asyncdist info --json | jq '.transports[] | select(.usable)'
    asyncdist info --collective all_reduce --ranks 4

    ASYNCDIST_ALGORITHM forces algorithms, for example all_reduce=ring,broadcast=tree. Every rank needs the same value.
    """
    from asyncdist.cli import tables
    from asyncdist.cli.console import screen
    from asyncdist.cli.machine import machine
    from asyncdist.config import Config
    from asyncdist.kernel.transport import registry

    config, console = Config.from_environment(), screen()
    if collective is not None:
        if as_json:
            raise click.UsageError("--json shows what this machine has, and does not explain a --collective")
        tables.show_choice(console, config, collective, ranks, sizes)
        return
    for option in ("ranks", "sizes"):
        if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{option} needs --collective: name the collective to explain")
    if as_json:
        click.echo(json.dumps(tables.facts(config)))
        return
    tables.show_facts(console, "This machine", machine())
    tables.show_waiting(console, config)
    tables.show_registered(console, "Transports (the preferred first)", registry.TRANSPORTS)
    tables.show_model(console, config)
    tables.show_devices(console)
    tables.show_addresses(console, config)
    tables.show_settings(console, config, every=every_setting)
    console.print(
        "To see which algorithm runs at which size: [bold]asyncdist info --collective all_reduce --ranks 4[/]"
    )
