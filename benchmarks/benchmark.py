"""What a benchmark says: its plan, whose fields are the options of its command, its cases, and the columns of its page."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import click

from asyncdist.cli.console import print_page, screen, write_page
from asyncdist.cli.machine import measured_machine
from asyncdist.cli.option_types import ListOf, NewFolder, reporting_write_errors
from asyncdist.cli.page import Grid, Page
from asyncdist.errors import BenchmarkError
from asyncdist.testing.hosts import Hosts, HostsUnavailableError
from benchmarks.grid import Case, GridReport
from benchmarks.laboratory import Laboratory, Progress
from benchmarks.processes import RankEndedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PlanT = TypeVar("PlanT")

COUNTS = ListOf("positive numbers such as 1,8", lambda word: int(word) if word.isdecimal() and int(word) else None)


def option(default: Any, text: str, kind: Any = None, *, name: str = "") -> Any:
    """Return a field of a plan that is an option of the command.

    Args:
        default: The default; a text for a list.
        kind: The type of the option; by default a positive number, or a flag if the default is False.
        name: The option, if it is not called like the field.
    """
    if kind is None and not isinstance(default, bool):
        kind = click.IntRange(1)
    value = kind.convert(default, None, None) if isinstance(kind, ListOf) else default
    return dataclasses.field(default=value, metadata={"default": default, "help": text, "type": kind, "name": name})


class Benchmark(ABC, Generic[PlanT]):
    """A benchmark. The docstring of a derived class is the help text of its command.

    Attributes:
        title: The title of the page.
        plan_type: The dataclass of the plan. Its field ``parts`` has the chosen `parts`.
        program: The file with the functions of the processes.
        preload: What the process imports that forks the others.
        parts: The names that choose parts as arguments of the command; empty if it has no such arguments.
        parts_on_hosts: Those of them that need several hosts.
        has_picture: Whether --output writes a picture too.
    """

    title: ClassVar[str]
    plan_type: ClassVar[type[Any]]
    program: ClassVar[Path]
    preload: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ()
    parts_on_hosts: ClassVar[tuple[str, ...]] = ()
    has_picture: ClassVar[bool] = False

    def __init__(self, plan: PlanT, laboratory: Laboratory) -> None:
        self.plan, self.laboratory = plan, laboratory

    @abstractmethod
    def measure(self) -> Iterator[Case]:
        """Yield the cases of the plan.

        Raises:
            BenchmarkError: A process fails.
            HostsUnavailableError: A part needs several hosts, and this machine cannot make them.
        """

    @classmethod
    @abstractmethod
    def tables(cls, report: GridReport[PlanT]) -> tuple[list[str], list[Grid]]:
        """Return what the page says about the run, and its tables."""

    @classmethod
    def page(cls, report: GridReport[PlanT]) -> Page:
        return Page(cls.title, *cls.tables(report))

    @classmethod
    def picture(cls, report: GridReport[PlanT]) -> Figure:
        raise NotImplementedError

    @classmethod
    def file_stem(cls, name: str, plan: PlanT) -> str:
        """Return the name of the files of a run, without their endings: by default that of the benchmark."""
        return name

    @classmethod
    def run(cls, plan: PlanT, progress: Progress = lambda doing: None) -> GridReport[PlanT]:
        """Execute a plan in new processes and return the report; raises what `measure` does."""
        report = GridReport(plan, measured_machine())
        with Laboratory(cls.program, cls.preload, progress) as laboratory:
            try:
                report.cases.extend(cls(plan, laboratory).measure())
            except (RankEndedError, TimeoutError, BrokenPipeError) as error:
                raise BenchmarkError(f"a process of the benchmark failed: {error}") from error
        return report

    @classmethod
    def command(cls, name: str) -> click.Command:
        """Return the command, which runs the benchmark, shows its page and writes the files of --output."""

        def run(output: Path | None, **chosen: Any) -> None:
            if cls.parts:
                chosen["parts"] = cls._parts_that_run(chosen["parts"])
            with screen(stderr=True).status("starting") as status:
                report = cls.run(cls.plan_type(**chosen), lambda doing: status.update(doing))
            page = cls.page(report)
            print_page(screen(), page)
            if output is None:
                return
            stem = cls.file_stem(name, report.plan)
            page.picture = f"{stem}.png" if cls.has_picture else ""
            write_page(page, report.as_json(), output, stem)
            if cls.has_picture:
                with reporting_write_errors(output):
                    cls.picture(report).savefig(output / page.picture, dpi=150)

        parameters: list[click.Parameter] = [
            _option_of(field) for field in dataclasses.fields(cls.plan_type) if field.metadata
        ]
        if cls.parts:
            parameters.append(click.Argument(["parts"], nargs=-1, type=click.Choice(cls.parts), metavar="[PART]..."))
        text = "Write the page as Markdown, and all figures as JSON, into this folder."
        parameters.append(click.Option(["--output"], type=NewFolder(), help=text))
        return click.Command(name, params=parameters, callback=run, help=cls.__doc__)

    @classmethod
    def _parts_that_run(cls, chosen: Sequence[str]) -> tuple[str, ...]:
        """Return the chosen parts; by default all of them, without those between hosts where there can be none."""
        if chosen or not cls.parts_on_hosts:
            return tuple(dict.fromkeys(chosen)) or cls.parts
        try:
            Hosts(2).close()
        except HostsUnavailableError as error:
            screen(stderr=True).print(f"left out: {', '.join(cls.parts_on_hosts)}: {error.summary}")
            return tuple(part for part in cls.parts if part not in cls.parts_on_hosts)
        return cls.parts


def _option_of(field: dataclasses.Field[Any]) -> click.Option:
    about = dict(field.metadata)
    names = [about.pop("name") or f"--{field.name.replace('_', '-')}", field.name]
    return click.Option(
        names, show_default=about["default"] not in ("", False, None), is_flag=about["default"] is False, **about
    )
