"""What a row of docs/differences.md is: a program that says in a few words what came out.

A row runs on two ranks, and each returns its words. `record.py` keeps them, and writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import asyncdist.sync
from asyncdist import store


@dataclass(frozen=True)
class Side:
    """One rank of two, on asyncdist or on another."""

    ours: bool
    rank: int
    group: Any
    own_group: Any = None

    @property
    def stores(self) -> Any:
        return store if self.ours else dist

    def ddp(self, model: torch.nn.Module) -> Any:
        """Wrap a model in the class of this side."""
        if self.ours:
            return asyncdist.sync.DistributedDataParallel(model, process_group=self.own_group)
        return DistributedDataParallel(model, process_group=self.group)


@dataclass(frozen=True)
class Row:
    """A row of the page. ``program`` returns the words of a rank; it may spoil them for others, or kill one."""

    area: str
    given: str
    program: Callable[[Side], str]
    spoils_ranks: bool

    @property
    def name(self) -> str:
        return self.program.__name__


ROWS: dict[str, Row] = {}


def row(
    area: str, given: str, *, spoils_ranks: bool = False
) -> Callable[[Callable[[Side], str]], Callable[[Side], str]]:
    """Add a row to a table of the page."""

    def add(program: Callable[[Side], str]) -> Callable[[Side], str]:
        ROWS[program.__name__] = Row(area, given, program, spoils_ranks)
        return program

    return add


def run(name: str, side: Side) -> str:
    """Return the words of a rank."""
    return ROWS[name].program(side)


def raised(call: Callable[[], Any]) -> str:
    """Return what a call has raised, in words; "carried" if nothing."""
    try:
        call()
    except Exception as error:
        return f"`{type(error).__name__}`"
    return "carried"
