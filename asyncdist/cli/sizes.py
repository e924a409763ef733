"""Options that take several values after one another: sizes in bytes, and names."""

from __future__ import annotations

from collections.abc import Sequence

import click

from asyncdist.config import whole_number


class Sizes(click.ParamType["tuple[int, ...]"]):
    """Bytes with commas between them; K, M and G are powers of 1024."""

    name = "SIZE,…"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)  # type: ignore[arg-type]
        try:
            return tuple(whole_number(part.strip()) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is no list of sizes such as 4,64K,25M", param, ctx)


class Names(click.ParamType["tuple[str, ...]"]):
    """Some of the given names, with commas between them."""

    name = "NAME,…"

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if not isinstance(value, str):
            return tuple(value)  # type: ignore[arg-type]
        names = tuple(part.strip() for part in value.split(",") if part.strip())
        for name in names:
            if name not in self.known:
                self.fail(f"{name!r} is not one of {', '.join(self.known)}", param, ctx)
        return names
