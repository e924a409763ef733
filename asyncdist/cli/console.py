"""The console and the output files of the commands. Every command uses it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from asyncdist.cli.option_types import reporting_write_errors

if TYPE_CHECKING:
    from rich.console import Console

    from asyncdist.cli.page import Page
    from asyncdist.kernel.tracing.stacks import Stack

_WIDTH = 150
"""Columns of output that does not go to a terminal. No table is wider."""


def screen(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or `_WIDTH` columns wide without a terminal."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDTH)


def print_stacks(stacks: Sequence[Stack], console: Console) -> None:
    """Print Python stacks, without the threads of the library that run no code of the program."""
    for stack in stacks:
        if not stack.is_of_library:
            console.print("\n".join(stack.lines()), markup=False, soft_wrap=True)


def print_page(console: Console, page: Page) -> None:
    """Print a page's lines about the run and its tables."""
    for line in page.about:
        console.print(line, style="dim", soft_wrap=True, markup=False)
    for grid in page.grids:
        console.print(grid.table())


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Write figures as JSON; the path "-" is the standard output."""
    with reporting_write_errors(path), click.open_file(str(path), "w", encoding="utf-8") as file:
        file.write(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


def write_page(page: Page, figures: dict[str, Any], folder: Path, stem: str) -> None:
    """Write a page as Markdown and its figures as JSON into a folder."""
    with reporting_write_errors(folder):
        (folder / f"{stem}.md").write_text(page.markdown(), encoding="utf-8")
    write_json(figures, folder / f"{stem}.json")
