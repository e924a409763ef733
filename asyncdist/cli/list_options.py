"""Options that hold several values with commas between them: sizes in bytes, and names."""

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
        raise click.BadParameter(f"{value!r} is no list of sizes such as 4,64K,25M")
    return read


def counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Read ``1,8`` as numbers from 1 up; a callback for `click.option`."""
    read = tuple(int(word) if word.isdecimal() else 0 for word in words(value))
    if not read or 0 in read:
        raise click.BadParameter(f"{value!r} is no list of numbers from 1 up such as 1,8")
    return read


def read_sizes(value: str) -> tuple[int, ...]:
    """Read ``4,64K,25M`` as bytes; ValueError if that cannot be."""
    return tuple(whole_number(part) for part in words(value))


def names_among(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    """Return a callback that reads some of the known names."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        for name in words(value):
            if name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
        return words(value)

    return read


def words(value: str) -> tuple[str, ...]:
    """Read words with commas between them, each once."""
    return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
