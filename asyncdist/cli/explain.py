"""``asyncdist explain``: show what docs/errors.md says about an error, also where only the wheel is installed."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import click

_PACKAGED = Path(__file__).with_name("errors.md")
_IN_CHECKOUT = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
_CHAPTER = re.compile(r"^## (.+)\n", re.MULTILINE)
_SECTION = re.compile(r"^### (\w+)\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


@click.command(short_help="Show what an error means and what to do.")
@click.argument("error", required=False)
def explain(error: str | None) -> None:
    """Show what happened if ERROR was raised, and what to do. Without ERROR, list all errors.

    \b
    asyncdist explain PeerLostError
    """
    sections = _sections()
    if error is None:
        click.echo("\n".join(sections))
        return
    by_name = {name.lower(): name for name in sections}
    wanted = error.rpartition(".")[2].rstrip(":").lower()
    if wanted not in by_name:
        similar = difflib.get_close_matches(wanted, by_name, n=3)
        hint = f"do you mean {' or '.join(by_name[name] for name in similar)}?" if similar else ""
        raise click.UsageError(f"there is no error {error!r}: {hint or 'without an argument the command lists all'}")
    _print(sections[by_name[wanted]])


def _sections() -> dict[str, str]:
    """Return the section of each error, followed by what the page says about all errors of its chapter."""
    page = (_PACKAGED if _PACKAGED.exists() else _IN_CHECKOUT).read_text(encoding="utf-8")
    _, *chapters = _CHAPTER.split(page)
    found = {}
    for title, chapter in zip(chapters[::2], chapters[1::2], strict=True):
        introduction, *sections = _SECTION.split(chapter)
        common = f"\n\n**{title}:** {introduction.strip()}" if introduction.strip() else ""
        for name, text in zip(sections[::2], sections[1::2], strict=True):
            found[name] = _LINK.sub(r"\1", f"## {name}\n\n{text.strip()}{common}")
    return found


def _print(section: str) -> None:
    from asyncdist.cli.console import screen

    console = screen()
    if not console.is_terminal:
        click.echo(section)
        return
    from rich.markdown import Markdown

    console.print(Markdown(section))
