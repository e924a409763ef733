"""A report as a page of rich tables in a terminal and of Markdown in a file, and the format of figures.

Used by the other reports and `asyncdist.cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

RowT = TypeVar("RowT")
Column = tuple[str, Callable[[RowT], str]]
"""A heading, and a function that returns the text of a row."""

_EMPHASISED = frozenset(("asyncdist", "median", "vs gloo"))
_TEXT_COLUMNS = frozenset(("who", "unit", "reached"))


@dataclass
class Grid:
    """A table.

    Attributes:
        title: What was measured.
        columns: Headings, which may have two lines.
        rows: The texts of each row.
        caption: The table's own title, if several tables have the same title.
        group_rows: Whether an empty first cell means the same as the cell above. Markdown repeats its text.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    group_rows: bool = False

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[Column[RowT]],
        rows: Iterable[RowT],
        caption: str = "",
        group_rows: bool = False,
    ) -> Grid:
        """Return the table that has the texts of the columns for each of ``rows``."""
        headings = [heading for heading, _ in columns]
        return cls(title, headings, [[text(row) for _, text in columns] for row in rows], caption, group_rows)

    def table(self) -> Table:
        from rich import box
        from rich.table import Table

        title = f"{self.title}: {self.caption}" if self.caption else self.title or None
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for position, name in enumerate(self.columns):
            emphasis = "bold" if name in _EMPHASISED or name.startswith("registered") or "vs " in name else ""
            table.add_column(name, justify=self._justify(position), style=emphasis, no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return a Markdown table without its title."""
        rows, first = [], ""
        for row in self.rows:
            first = row[0] or first
            rows.append([first if self.group_rows else row[0], *row[1:]])
        marks = [":--" if self._justify(position) == "left" else "--:" for position in range(len(self.columns))]
        lines = [[name.replace("\n", " ") for name in self.columns], marks, *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def _justify(self, position: int) -> Literal["left", "right"]:
        return "left" if position == 0 or self.columns[position] in _TEXT_COLUMNS else "right"


@dataclass
class Page:
    """A report.

    Attributes:
        title: The title of the Markdown page.
        about: The machine, the run, and what was not measured, one line each.
        grids: All tables.
        introduction: Paragraphs before the tables; only in Markdown.
        picture: The file name of a picture; only in Markdown.
    """

    title: str
    about: list[str]
    grids: list[Grid]
    introduction: list[str] = field(default_factory=list)
    picture: str = ""

    def markdown(self) -> str:
        parts = [f"# {self.title}", *self.about, *self.introduction]
        last = ""
        for grid in self.grids:
            if grid.title != last:
                parts.append(f"## {grid.title}")
            last = grid.title
            if grid.caption:
                parts.append(f"{grid.caption[0].upper()}{grid.caption[1:]}:")
            parts.append(grid.markdown())
        if self.picture:
            parts.append(f"![time against size]({self.picture})")
        return "\n\n".join(parts) + "\n"


def about_machine(machine: Mapping[str, str]) -> str:
    """Return the processor, its cores and caches, the rate of memory, the system and its load, and the versions."""
    memory = f"copies {machine['memory']}, " if "memory" in machine else ""
    mpi = f", {machine['mpi']}" if "mpi" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['caches']}, {memory}{machine['system']}, "
        f"load {machine['load']} before the run; "
        f"Python {machine['python']}, torch {machine['torch']}, uvloop {machine['uvloop']}, "
        f"asyncdist {machine['asyncdist']}{mpi}"
    )


def size(nbytes: int) -> str:
    """Write a number of bytes: ``64 KiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % (unit // 2) == 0:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Write a time with three digits: ``14.2 µs``, ``3.06 ms``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{_three(seconds / unit)} {name}"
    return f"{_three(seconds * 1e6)} µs"


def bandwidth(nbytes_per_second: float) -> str:
    """Write a bandwidth in GB/s (10^9), or in MB/s below a tenth of that."""
    if nbytes_per_second >= 1e8:
        return f"{_three(nbytes_per_second / 1e9)} GB/s"
    return f"{_three(nbytes_per_second / 1e6)} MB/s"


def times(ratio: float | None) -> str:
    """Write a ratio with three digits: ``4.83×``; a dash for None."""
    return "—" if ratio is None else f"{_three(ratio)}×"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
