"""The tables of ``asyncdist info``, one function per table. Called by `info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asyncdist.cli.machine import machine
from asyncdist.cli.page import size
from asyncdist.config import DEFAULT_LANES, Config, settings
from asyncdist.errors import AddressError, TransportUnavailableError, UsageError
from asyncdist.kernel.algorithms import selection
from asyncdist.kernel.transport import registry
from asyncdist.net.network import interface_addresses
from asyncdist.rendezvous.addresses import outward

_LOOK_SECONDS = 0.05
"""Seconds for which `show_waiting` polls."""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show_facts(console: Console, title: str, facts: Mapping[str, str]) -> None:
    """Show a table of two columns without headings."""
    table = _table(title, "", "")
    table.show_header = False
    for name, value in facts.items():
        table.add_row(name, escape(value))
    console.print(table)


def show_waiting(console: Console, config: Config) -> None:
    """Show how a rank that starts on this machine now waits for its peers: it polls them, or sleeps at once."""
    from asyncdist.base.cores import allowed_cores
    from asyncdist.kernel.engine.drivers.wait_policy import WaitMode
    from asyncdist.kernel.engine.drivers.waiting import mode_here

    cores, polls = allowed_cores(), f"it polls for {config.spin_us:g} µs"
    if not config.spin_us:
        text = "it sleeps at once, because ASYNCDIST_SPIN_US is 0"
    elif (found := mode_here(_LOOK_SECONDS)) is None:
        text = f"{polls}; this system does not say whether other threads compete for its core"
    elif found[0] is WaitMode.SLEEP:
        text = f"it sleeps at once: other threads kept this command from its core for {found[1]:.0%} of the time"
    else:
        text = f"{polls} and then sleeps: no other thread competes for its core"
    shared = f"{cores}; more than {cores} ranks share cores, and yield to each other while they poll"
    show_facts(console, "Waiting of a rank on this machine at the moment", {"waiting": text, "cores": shared})


def _model_of(config: Config) -> tuple[selection.Model, Mapping[str, float]]:
    """Return the model of a world that starts with these settings, as far as it is known now, and its profile.

    Raises:
        UsageError: ASYNCDIST_PROFILE does not name a profile.
    """
    from asyncdist.groups.calibration.profile import MODEL_FROM_PROFILE, model_of, read_profile

    profile = {} if config.profile is None else read_profile(config.profile)
    return model_of(selection.Model(segment_nbytes=config.segment_nbytes), profile, MODEL_FROM_PROFILE), profile


def show_model(console: Console, config: Config) -> None:
    """Show the values by which schedules between hosts are selected, and the connections of a large tensor."""
    from asyncdist.groups.calibration.profile import LANES, lanes_of

    try:
        model, profile = _model_of(config)
    except UsageError as error:
        console.print(str(error), style="red", markup=False)
        return
    measures = config.profile is None and config.calibrate
    chosen = config if config.lanes else config.with_(**{"lanes": DEFAULT_LANES, **lanes_of(profile)})
    or_more = (
        f", or {LANES} if the hosts find at the start that these are faster," if measures and not config.lanes else ""
    )
    threads = "where other programs compete for the cores" if chosen.tcp_threads == "auto" else chosen.tcp_threads
    facts = {
        "from": model.source + "; a world on several hosts measures its links when it starts" * measures,
        "a round": f"{model.alpha * 1e6:.3g} µs",
        "a message": f"{model.overhead * 1e6:.3g} µs",
        "a byte moved": f"{model.beta * 1e9:.3g} ns",
        "a byte reduced": f"{model.gamma * 1e9:.3g} ns",
        "TCP connections": f"{chosen.lanes}{or_more} for messages of {size(chosen.stripe_nbytes)} and more; with threads: "
        f"{threads}",
    }
    show_facts(console, "Time of a schedule between hosts", facts)


def show_devices(console: Console) -> None:
    """Show every device back end and whether this machine can use it, and the devices that torch sees."""
    import torch

    from asyncdist.kernel.transport.device_streams import cuda_missing

    title = "Device back ends (in order of preference; ranks use the first one that all of them support)"
    show_registered(console, title, registry.DEVICE_BACKENDS)
    if cuda_missing() is not None:
        return
    table = _table(f"CUDA devices (CUDA {torch.version.cuda})", "device", "name", "UUID", "memory")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = f"{device.total_memory / (1 << 30):.1f} GiB"
        table.add_row(f"cuda:{index}", escape(device.name), str(device.uuid), memory)
    console.print(table)


def show_registered(console: Console, title: str, group: str) -> None:
    """Show the transports or back ends of an entry point group, in order of preference, and whether they are usable."""
    table = _table(title, "name", "usable here", "from")
    for row in _registered(group):
        colour = "yellow" if row["from"] else "red"
        usable = "[green]yes[/]" if row["usable"] else f"[{colour}]no[/]: {escape(row['reason'])}"
        table.add_row(row["name"], usable, row["from"])
    console.print(table)


def _registered(group: str) -> list[dict[str, Any]]:
    """Return the transports or back ends of an entry point group, in order of preference."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for name in registry.names(group):
        try:
            kind = registry.load_class(name, group)
        except TransportUnavailableError as error:
            rows.append((0, {"name": name, "usable": False, "reason": error.summary, "from": ""}))
            continue
        reason, place = kind.probe(), f"{kind.__module__}.{kind.__qualname__}"
        rows.append((kind.preference, {"name": name, "usable": reason is None, "reason": reason or "", "from": place}))
    return [row for _, row in sorted(rows, key=lambda row: -row[0])]


def show_addresses(console: Console, config: Config) -> None:
    """Show the addresses of this machine, and the one that it advertises to other hosts."""
    addresses, problem = _addresses(config)
    table = _table("Addresses", "interface", "address", "advertised")
    for each in addresses:
        table.add_row(escape(each["interface"]), each["address"], "[green]yes[/]" if each["advertised"] else "")
    console.print(table)
    if problem:
        console.print(problem, style="red", markup=False)


def _addresses(config: Config) -> tuple[list[dict[str, Any]], str]:
    """Return the addresses of this machine, and why none of them can be advertised."""
    try:
        advertised, problem = outward(config), ""
    except AddressError as error:
        advertised, problem = "", str(error)
    found = interface_addresses()
    return [{"interface": a.interface, "address": a.host, "advertised": a.host == advertised} for a in found], problem


def show_settings(console: Console, config: Config, *, every: bool) -> None:
    """Show the settings that differ from their defaults, or all, and the errors for those with unknown names."""
    table = _table("Settings", "variable", "value", "default", "meaning")
    known = list(settings(config))
    for variable, meaning, value, default in known:
        if every or value != default:
            style = "" if value == default else "bold"
            table.add_row(variable, Text(_text(value), style), Text(_text(default)), escape(meaning))
    if table.row_count:
        console.print(table)
    if table.row_count < len(known):
        left = f"{len(known) - table.row_count} of {len(known)} settings have their defaults"
        console.print(f"{left}; to see all: [bold]asyncdist info --settings[/]")
    for problem in _problems(config):
        console.print(problem, style="red", markup=False)


def _problems(config: Config) -> list[str]:
    """Return the errors that init_process_group would raise for settings with unknown names."""
    found = []
    for resolve in (selection.forced_by, registry.set_by):
        try:
            resolve(config)
        except (UsageError, TransportUnavailableError) as error:
            found.append(str(error))
    return found


def facts(config: Config) -> dict[str, Any]:
    """Return what the tables show as JSON values, except predictions."""
    addresses, problem = _addresses(config)
    return {
        "machine": machine(),
        "transports": _registered(registry.TRANSPORTS),
        "device_backends": _registered(registry.DEVICE_BACKENDS),
        "addresses": addresses,
        "settings": {
            variable: {"value": value, "default": default, "meaning": meaning}
            for variable, meaning, value, default in settings(config)
        },
        "problems": [*([problem] if problem else []), *_problems(config)],
    }


def _text(value: object) -> str:
    if value is None or value == "":
        return "—"
    return str(int(value)) if isinstance(value, bool) else str(value)


def show_choice(console: Console, config: Config, collective: str, ranks: int, sizes: Sequence[int]) -> None:
    """Show the cost model's prediction for every algorithm of a collective.

    Raises:
        UsageError: ASYNCDIST_ALGORITHM or ASYNCDIST_PROFILE is not valid.
    """
    forced = selection.forced_by(config)
    model, _ = _model_of(config)
    rows = selection.explain(collective, ranks, sizes, model=model, forced=forced)
    names = [candidate.name for candidate in selection.candidates(collective)]
    table = _table(f"{collective} among {ranks} ranks: predicted time", "size", "runs", *names)
    for row in rows:
        table.add_row(size(row.nbytes), f"[bold]{row.chosen}[/]", *(_predicted(row, name) for name in names))
    for column in table.columns[2:]:
        column.justify = "right"
    console.print(table)
    console.print(
        f"time = {model.alpha * 1e6:g} µs × rounds + {model.overhead * 1e6:g} µs × messages "
        f"+ {model.beta * 1e9:g} ns × bytes moved + {model.gamma * 1e9:g} ns × bytes reduced"
    )
    reason = f"forced by ASYNCDIST_ALGORITHM={config.algorithm}" if collective in forced else "the cheapest one runs"
    console.print(f"{reason}; to force one on every rank: ASYNCDIST_ALGORITHM={collective}={names[-1]}", markup=False)
    console.print(
        "A forced algorithm also runs between ranks that share memory."
        if collective in forced
        else "Ranks that share memory use shared-memory collectives instead, unless an algorithm is forced."
    )


def _predicted(row: selection.SelectionRow, name: str) -> str:
    microseconds = row.microseconds[name]
    if microseconds is None:
        return "[dim]cannot run[/]"
    text = f"{microseconds:,.1f} µs"
    return f"[bold]{text}[/]" if name == row.chosen else text
