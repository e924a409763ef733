"""Callbacks of options with several values, separated by commas: sizes in bytes, numbers and names.

Used by `bench`, `bench_store` and `info`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from asyncdist.config import whole_number


def sizes(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Read ``4,64K,25M`` as bytes (K, M and G are powers of 1024); a callback for `click.option`."""
    try:
        read = read_sizes(value)
    except ValueError:
        read = ()
    if not read:
        raise click.BadParameter(f"{value!r} is not a list of sizes such as 4,64K,25M")
    return read


def counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Read ``1,8`` as positive numbers; a callback for `click.option`."""
    read = tuple(int(word) if word.isdecimal() else 0 for word in words(value))
    if not read or 0 in read:
        raise click.BadParameter(f"{value!r} is not a list of positive numbers such as 1,8")
    return read


def read_sizes(value: str) -> tuple[int, ...]:
    """Read ``4,64K,25M`` as bytes; raise ValueError if a size cannot be read."""
    return tuple(whole_number(part) for part in words(value))


def names_among(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """Return a callback that reads names and refuses those that are not in ``known``."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        for name in words(value):
            if name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
        return words(value)

    return read


def words(value: str) -> tuple[str, ...]:
    """Split ``value`` at commas; drop empty and repeated words."""
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
