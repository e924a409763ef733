"""Gradients that one rank lacks or got twice, and the error that all ranks raise for them. Used by `reducer`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from asyncdist.errors import GradientError
from asyncdist.groups import Group


class Fault(Enum):
    """What is wrong with a parameter's gradient on a rank: the text of the error."""

    missing = (
        "backward gave no gradient to {parameters} on {where}, so the ranks' averages lack it; use every "
        "parameter in every forward, freeze it (requires_grad=False) before wrapping the model, or pass "
        "find_unused_parameters=True"
    )
    repeated = (
        "{parameters} got a second gradient in one backward on {where}, after its all-reduce had started, as happens if "
        "several re-entrant checkpoints share a parameter: pass use_reentrant=False to the checkpoints, or "
        "static_graph=True to the model"
    )
    changed = (
        "static_graph=True, but on {where} the number of gradients of {parameters} is not that of the first backward: "
        "leave static_graph out, and pass find_unused_parameters=True if parameters are not used in every forward"
    )
    skipped = (
        "{parameters} got a gradient on {where}, but none in the first backward, so skip_all_reduce_unused_params=True "
        "has excluded it from the averages: leave skip_all_reduce_unused_params out"
    )
    cleared = (
        "a hook set the gradient of {parameters} to None on {where} before it was averaged, as an optimizer does that "
        "steps in backward: call the optimizer's step() after backward(), or use torch.distributed.optim."
        "_apply_optimizer_in_backward, whose steps then follow the averages"
    )
    resized = (
        "the gradient of {parameters} on {where} has not the shape that the parameter had when the model was wrapped: wrap "
        "the model after all changes"
    )
    sparse = (
        "the gradient of {parameters} on {where} is not a dense tensor, and sparse gradients are not averaged; build its "
        "layer with sparse=False"
    )


_FAULTS = list(Fault)
"""The byte that tells the other ranks of a fault is its place here, counted from 1."""


class Faults:
    """The faults of one backward on one rank."""

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self._group, self._names = group, names
        self._found: dict[int, Fault] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, index: int, fault: Fault) -> None:
        """Record a fault of a parameter; its first one counts."""
        self._found.setdefault(index, fault)

    def clear(self) -> None:
        """Forget the faults of the last backward."""
        self._found.clear()

    def raise_on_all_ranks(self) -> None:
        """Raise GradientError with the first kind of fault of the lowest rank that has one. All ranks call it."""
        count, group = len(self._names), self._group
        own = torch.zeros(count, dtype=torch.uint8, device="cpu")
        for index, fault in self._found.items():
            own[index] = 1 + _FAULTS.index(fault)
        everywhere = torch.empty(group.size() * count, dtype=torch.uint8, device="cpu")
        group.all_gather_single(everywhere, own, background=False).wait()
        by_rank = everywhere.view(group.size(), count).tolist()
        first = next(code for codes in by_rank for code in codes if code)
        ranks = [group.ranks[rank] for rank, codes in enumerate(by_rank) if first in codes]
        names = [name for index, name in enumerate(self._names) if any(codes[index] == first for codes in by_rank)]
        where = "this rank" if ranks == [group.ranks[group.rank()]] else f"rank {', '.join(map(str, ranks))}"
        raise GradientError(_FAULTS[first - 1].value.replace("{where}", where), names)
