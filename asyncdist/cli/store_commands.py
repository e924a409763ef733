"""``asyncdist store status|get|set|watch|keys``: query a running store. Registered in `store`."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from asyncdist.base.callables import AnyFunction
from asyncdist.cli.option_types import Seconds, SocketFile

if TYPE_CHECKING:
    from asyncdist.store import AsyncStore


class StoreTarget(NamedTuple):
    """Address and TLS files of the store to query."""

    host: str
    port: int
    unix: Path | None
    tls: dict[str, str]


def _asks_store(ask: AnyFunction) -> AnyFunction:
    """Make the callback of a command from ``ask(store, **options)``: it connects, asks, and disconnects.

    The options with the address may stand after the command as well as before it.
    """

    @functools.wraps(ask)
    def run(
        ctx: click.Context, host: str | None, port: int | None, unix: Path | None, timeout: float, **options: Any
    ) -> None:
        from asyncdist.config import Config
        from asyncdist.store import AsyncStore

        target: StoreTarget = ctx.obj
        unix = unix or (None if host or port else target.unix)
        at = (str(unix), 0) if unix is not None else (host or target.host, port or target.port)
        config = Config.from_environment().with_(**target.tls)

        async def connect_and_ask() -> None:
            async with await AsyncStore.connect(*at, token=config.token, timeout=timeout, config=config) as store:
                await ask(store, **options)

        asyncio.run(connect_and_ask())

    command: AnyFunction = click.pass_context(run)
    for option in (
        click.option(
            "--timeout", default=10.0, type=Seconds(), show_default=True, help="Seconds to wait for the store."
        ),
        click.option("--unix", type=SocketFile(), help="Unix socket file of the store."),
        click.option("--port", type=click.IntRange(1, 65535), help="Port of the store.  [default: 29500]"),
        click.option("--host", help="Host of the store.  [default: 127.0.0.1]"),
    ):
        command = option(command)
    return command


def _read() -> bytes:
    """Return all of the standard input."""
    if sys.stdin is None:
        raise click.ClickException("the standard input is closed: give the value on the command line, or pipe it in")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise click.ClickException(f"cannot read the standard input: {error.strerror}") from error


def _shown(value: bytes) -> str:
    """Return a value as text, or as a Python literal if it is not UTF-8."""
    try:
        return _line(value.decode(), value)
    except UnicodeDecodeError:
        return repr(value)


def _line(text: str, value: object) -> str:
    """Return ``text`` if a terminal shows it unchanged on one line, else ``value`` as a Python literal."""
    return text if text.isprintable() else repr(value)


@click.command("status", short_help="Show the store's state.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_asks_store
async def show_status(store: AsyncStore, as_json: bool) -> None:
    """Show the store's state: connections, keys, bytes, and counters of its operations."""
    import json

    from asyncdist.store.protocol.operations import Op, command

    found = await store.request(command(Op.STATUS))
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, value in found.items():
        is_figure = name != "pid" and isinstance(value, int | float)
        click.echo(f"{name:20} {f'{value:,.0f}' if is_figure else value or 'none'}")


@click.command("get", short_help="Print a value.")
@click.argument("key")
@click.option("--wait", is_flag=True, help="Wait for the key until the timeout.")
@click.option("--raw", is_flag=True, help="Print the bytes unchanged, without a trailing newline.")
@_asks_store
async def print_value(store: AsyncStore, key: str, wait: bool, raw: bool) -> None:
    """Print the value of KEY. Exits with 1 if the key does not exist."""
    if not wait and key not in await store.list_keys(key):
        raise click.ClickException(f"the store has no key {key!r}; --wait waits for it")
    value = await store.get(key)
    click.echo(value if raw else _shown(value), nl=not raw)


@click.command("set", short_help="Store a value.")
@click.argument("key")
@click.argument("value", callback=lambda ctx, param, value: _read() if value == "-" else os.fsencode(value))
@_asks_store
async def store_value(store: AsyncStore, key: str, value: bytes) -> None:
    """Store VALUE under KEY; "-" reads it from the standard input."""
    await store.set(key, value)


@click.command("keys", short_help="List keys.")
@click.argument("prefix", default="")
@_asks_store
async def print_keys(store: AsyncStore, prefix: str) -> None:
    """List the keys that begin with PREFIX, sorted, one per line."""
    for key in sorted(await store.list_keys(prefix)):
        click.echo(_line(key, key))


@click.command("watch", short_help="Print values when they change.")
@click.argument("prefix")
@click.option("--channel", is_flag=True, help="Treat PREFIX as a channel and print its messages.")
@_asks_store
async def print_changes(store: AsyncStore, prefix: str, channel: bool) -> None:
    """Print the keys that begin with PREFIX and their values, then every change, until Ctrl-C.

    The command reconnects if the connection breaks.
    """
    from asyncdist.errors import StoreConnectionError

    if not channel:
        async for key, value in store.watch_keys(prefix):
            shown = _line(key, key)
            click.echo(f"{shown} is gone" if value is None else f"{shown} = {_shown(value)}")
    while channel:
        async with store.subscribe(prefix) as published:
            try:
                async for message in published:
                    click.echo(_shown(message))
            except StoreConnectionError as error:
                # Subscribing again raises an error if the store cannot be reached.
                click.echo(error, err=True)


STORE_COMMANDS = (show_status, print_value, store_value, print_keys, print_changes)
