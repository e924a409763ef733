"""The grid of every benchmark: cases × contenders × quantities, with one sample from each round.

Figures are medians of the samples, and comparisons are ratios of medians. A benchmark yields `Case`s, and says with which
columns its page shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Generic, TypeVar

from asyncdist.cli.page import Column, Grid, about_machine, duration, times

PlanT = TypeVar("PlanT")

FIGURE = "figure"
"""The quantity by which contenders are compared. Others have names of their own."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a case should reach.

    Attributes:
        limit: The least or largest accepted value.
        of: Returns the value of a case.
        write: Writes such a value.
        at_least: Whether ``limit`` is the least value.
        allowance: The factor by which a value may miss the limit.
    """

    limit: float
    of: Callable[[Case], float]
    write: Callable[[float], str]
    at_least: bool = False
    allowance: float = 1.0

    def reached(self, case: Case) -> bool:
        value = self.of(case)
        return value >= self.limit / self.allowance if self.at_least else value <= self.limit * self.allowance

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.write(self.limit)}"


@dataclass(slots=True)
class Case:
    """What all contenders did in one case.

    Attributes:
        part: The part of the benchmark.
        name: What was measured.
        unit: The unit of `FIGURE`: "s" for seconds, "/s" for a rate, of which more is better, or another one.
        facts: Further values that define the case, and notes.
        samples: By contender, the samples of each quantity.
        targets: What the case should reach.
    """

    part: str
    name: str
    unit: str = "s"
    facts: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def add(self, contender: str, figure: float, **further: float) -> None:
        """Add the samples of a round."""
        for quantity, value in {FIGURE: figure, **further}.items():
            self.samples.setdefault(contender, {}).setdefault(quantity, []).append(value)

    def of(self, contender: str, quantity: str = FIGURE) -> list[float]:
        """Return the samples of a quantity; an empty list if it was not measured."""
        return self.samples.get(contender, {}).get(quantity, [])

    def median(self, contender: str, quantity: str = FIGURE) -> float:
        return median(self.of(contender, quantity))

    def ratios(self, contender: str, to: str, quantity: str = FIGURE) -> list[float]:
        """Return the ratio of a contender's sample to that of another for each round."""
        pairs = zip(self.of(contender, quantity), self.of(to, quantity), strict=True)
        return [one / other for one, other in pairs]

    def times_better(self, contender: str, than: str) -> float | None:
        """Return how many times better the median of a contender is; None if one of them was not measured."""
        if not (self.of(contender) and self.of(than)):
            return None
        ratio = self.median(contender) / self.median(than)
        return ratio if self.unit == "/s" else 1 / ratio

    @property
    def reached(self) -> bool:
        return all(target.reached(self) for target in self.targets)

    def as_json(self) -> dict[str, Any]:
        """Return plain data. Times are in seconds."""
        return {
            "part": self.part,
            "name": self.name,
            "unit": self.unit,
            "facts": self.facts,
            "samples": self.samples,
            "medians": {
                who: {quantity: median(samples) for quantity, samples in measured.items()}
                for who, measured in self.samples.items()
            },
            "targets": [
                {"target": str(target), "value": target.of(self), "reached": target.reached(self)}
                for target in self.targets
            ],
        }


@dataclass(slots=True)
class GridReport(Generic[PlanT]):
    """All results of a run."""

    plan: PlanT
    machine: dict[str, str]
    cases: list[Case] = field(default_factory=list)

    def of(self, *parts: str) -> list[Case]:
        """Return the cases of some parts, in the order in which they were measured."""
        return [case for case in self.cases if case.part in parts]

    def about(self, run: str) -> str:
        """Return one line about the machine and the run."""
        return f"{about_machine(self.machine)}; {run}"

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        plan: Any = self.plan
        return {"machine": self.machine, "plan": asdict(plan), "cases": [case.as_json() for case in self.cases]}


# -- tables ------------------------------------------------------------------------------------------

Line = tuple[Case, str]
"""A case and one of its contenders: a row of a table with contenders below each other."""


def lines(cases: Sequence[Case]) -> Iterator[Line]:
    """Yield every contender of every case."""
    return ((case, who) for case in cases for who in case.samples)


def side_by_side(title: str, cases: Sequence[Case], contenders: Mapping[str, str], compared: Sequence[str]) -> Grid:
    """Return a table with a row for each case, its contenders next to each other, their ratio, and the target.

    Args:
        contenders: The headings of the contenders. Those that were not measured are left out.
        compared: Two contenders, of which the first is compared with the second.
    """
    first, second = compared

    def figure_of(who: str) -> Callable[[Case], str]:
        return lambda case: figure(case.median(who), case.unit) if case.of(who) else "—"

    columns: list[Column[Case]] = [("case", lambda case: case.name)]
    columns += [(text, figure_of(who)) for who, text in contenders.items() if any(case.of(who) for case in cases)]
    columns += [
        (f"vs {contenders[second]}", lambda case: times(case.times_better(first, second))),
        ("target", lambda case: ", ".join(map(str, case.targets))),
        ("reached", yes_or_no),
    ]
    return Grid.of(title, columns, cases)


def yes_or_no(case: Case) -> str:
    """Write whether a case has reached its targets."""
    return "yes" if case.reached else "no"


def figure(value: float, unit: str) -> str:
    return duration(value) if unit == "s" else f"{value:,.0f}/s" if unit == "/s" else f"{value:.3g} {unit}"


def mib(nbytes: float, sign: str = "") -> str:
    return f"{nbytes / (1 << 20):{sign}.1f} MiB"


def times_at_least(limit: float, contender: str, than: str) -> Target:
    """Return the target of a contender that should be so many times better than another."""
    return Target(limit, lambda case: case.times_better(contender, than) or 0.0, lambda ratio: f"{ratio:g}×", True)


def figure_within(limit: float, contender: str, unit: str = "s") -> Target:
    """Return the target of a contender's median: the largest one, or the least rate."""
    return Target(limit, lambda case: case.median(contender), lambda value: figure(value, unit), unit == "/s")


def spread(samples: Sequence[float]) -> str:
    """Write the range of ratios."""
    return f"{min(samples):.2f} to {max(samples):.2f}"
