"""Shared by the benchmarks: their processes, parts that need several hosts, a run with its progress, and the page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click

from asyncdist.cli.console import print_page, screen, write_page
from asyncdist.cli.option_types import NewFolder
from asyncdist.cli.page import Page
from asyncdist.testing.hosts import Hosts, HostsUnavailableError


class Figures(Protocol):
    """The figures of a run."""

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""


ReportT = TypeVar("ReportT", bound=Figures)
PlanT = TypeVar("PlanT")


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the benchmarks with this interpreter, in the folder of the sources."""
    return [sys.executable, "-m", module, *arguments]


def output_option(stem: str) -> Callable[[click.decorators.FC], click.decorators.FC]:
    """Return the option of a command for the folder into which it writes its results."""
    return click.option("--output", type=NewFolder(), help=f"Write {stem}.json and {stem}.md into this folder.")


def parts_that_run(chosen: Sequence[str], all_parts: Sequence[str], on_hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the chosen parts; by default all of them, without those between hosts where there can be none."""
    if chosen:
        return tuple(dict.fromkeys(chosen))
    try:
        Hosts(2).close()
    except HostsUnavailableError as error:
        screen(stderr=True).print(f"left out: {', '.join(on_hosts)}: {error.summary}")
        return tuple(part for part in all_parts if part not in on_hosts)
    return tuple(all_parts)


def publish(
    run: Callable[[PlanT, Callable[[str], None]], ReportT],
    plan: PlanT,
    page_of: Callable[[ReportT], Page],
    stem: str,
    output: Path | None,
) -> None:
    """Run a benchmark, say on stderr what it does, print its page, and write page and figures into a folder."""
    with screen(stderr=True).status("starting") as status:
        report = run(plan, lambda doing: status.update(doing))
    page = page_of(report)
    print_page(screen(), page)
    if output is not None:
        write_page(page, report.as_json(), output, stem)
