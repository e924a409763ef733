"""The console that commands write to, and the configuration that they read. Every command uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdist.config import Config
from asyncdist.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 150
"""Columns of output that does not go to a terminal: wide enough that no table is folded."""


def screen(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or `_WIDTH` columns wide without a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


def configured() -> Config:
    """Return the configuration from the environment; UsageError names the variable that cannot be read."""
    try:
        return Config.from_environment()
    except ValueError as error:
        raise UsageError(f"{error}; correct it, or unset it") from error
