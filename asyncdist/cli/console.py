"""The console that commands write to, and the settings that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdist.config import Config
from asyncdist.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 150  # of what is piped somewhere: a table is not folded then


def screen(*, stderr: bool = False) -> Console:
    """Return a console: as wide as the terminal, or wide enough for every table where there is none."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


def configured() -> Config:
    """Return the settings; UsageError names the variable that cannot be read."""
    try:
        return Config.from_environment()
    except ValueError as error:
        raise UsageError(f"{error}; correct it, or unset it") from error
