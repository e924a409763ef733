"""Traffic: a collective at one size with its tensors, its call and its expected result. Used by the contenders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from asyncdist.cli.bench.plan import rounded
from asyncdist.errors import BenchmarkError

Empty = Callable[[int], torch.Tensor]
"""Makes an uninitialized float32 tensor with the given number of elements."""
Contribution = Callable[[int], torch.Tensor]
"""Returns the input of a rank."""


class CollectiveKind(NamedTuple):
    """A collective.

    Attributes:
        call: ``call(traffic, api, group)`` calls it through an API with torch.distributed's names, and returns the result.
        expected: ``expected(traffic, contribution)`` returns this rank's output for the inputs of all ranks; None without
            an output.
        parts_in: Whether the input is the part of one rank. The output then has the parts of all ranks.
        parts_out: The same with the output.
        in_place: Whether the output is the input.
    """

    call: Callable[[Traffic, Any, Any], Any]
    expected: Callable[[Traffic, Contribution], torch.Tensor | None]
    parts_in: bool = False
    parts_out: bool = False
    in_place: bool = False


class Traffic:
    """One collective among ``ranks`` ranks: from `KINDS`, or another ``kind``. The size in bytes is `rounded`."""

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: int,
        nbytes: int,
        empty: Empty = torch.empty,
        kind: CollectiveKind | None = None,
    ) -> None:
        self.name, self.rank, self.ranks = name, rank, ranks
        self.kind = kind or KINDS[name]
        self.nbytes = rounded(name, nbytes, ranks)
        self.count = self.nbytes // 4
        self.input: torch.Tensor = empty(self.count // ranks if self.kind.parts_in else self.count)
        self.output: torch.Tensor = self.input
        if not self.kind.in_place:
            self.output = empty(self.count // ranks if self.kind.parts_out else self.count)
        self.on_device = self.output.is_cuda
        # Indexing a tensor takes longer than a small collective, and would delay other ranks on the same core.
        memory: Any = None if self.on_device else self.output.numpy()
        self._result: Any = self.output if self.on_device else memoryview(memory)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        """Return the expected ``output`` for the inputs of all ranks; None without an output."""
        return self.kind.expected(self, contribution)

    def contribution(self, rank: int) -> torch.Tensor:
        """Return a rank's input for a checked call: small integers, so that sums are exact."""
        numbers = torch.arange(self.input.numel(), dtype=torch.int32, device=self.input.device)
        return numbers.remainder_(7).add_(rank + 1).float()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor with those of all ranks."""
        return whole.chunk(self.ranks)[self.rank]

    def parts_at_root(self, whole: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the parts of all ranks at the root, as `gather` and `scatter` take them; None on other ranks."""
        return list(whole.chunk(self.ranks)) if self.rank == 0 else None

    def load(self) -> None:
        """Fill the tensors for a checked call."""
        self.output.fill_(-1)
        self.input.copy_(self.contribution(self.rank))

    def check(self, contender: str) -> None:
        """Compare every element of the output with the expected one; raise BenchmarkError if one differs."""
        expected = self.expected(self.contribution)
        if expected is not None and not torch.equal(self.output, expected):
            wrong = int((self.output != expected).sum())
            raise BenchmarkError(
                f"{contender}: {self.name} of {self.nbytes} bytes gave a wrong result on rank {self.rank}: "
                f"{wrong} of {expected.numel()} elements differ; nothing was timed"
            )

    def prepare_timed_calls(self) -> None:
        """Fill the tensors for timed calls, and compute the first and last element of the expected result."""
        parts = 1 if self.kind.parts_in else self.ranks
        expected = self.expected(lambda rank: torch.full((parts,), rank + 1.0))
        self._ends = None if expected is None else (expected[0].item(), expected[-1].item())
        self.input.fill_(self.rank + 1.0)

    def restore(self) -> None:
        """Undo the effect of the last timed call on the input, and erase its result."""
        if self.kind.in_place and (self.on_device or self.name != "broadcast"):
            self.input.fill_(self.rank + 1.0)
        else:
            self._result[0] = self._result[-1] = self.rank + 1.0 if self.kind.in_place else -1.0
        if self.on_device:
            torch.cuda.synchronize()

    def check_ends(self, contender: str) -> None:
        """Check the first and last element of a timed call's result; raise BenchmarkError if one is wrong."""
        found = float(self._result[0]), float(self._result[-1])
        if self._ends is not None and found != self._ends:
            raise BenchmarkError(
                f"{contender}: a timed {self.name} of {self.nbytes} bytes gave {found[0]:g} … {found[1]:g} on rank "
                f"{self.rank} instead of {self._ends[0]:g} … {self._ends[1]:g}"
            )


def _sum(case: Traffic, contribution: Contribution) -> torch.Tensor:
    return functools.reduce(torch.add, map(contribution, range(case.ranks)))


KINDS = {
    "all_reduce": CollectiveKind(lambda case, api, group: api.all_reduce(case.input, group=group), _sum, in_place=True),
    "reduce": CollectiveKind(
        lambda case, api, group: api.reduce(case.input, 0, group=group),
        lambda case, of: None if case.rank else _sum(case, of),
        in_place=True,
    ),
    "broadcast": CollectiveKind(
        lambda case, api, group: api.broadcast(case.input, 0, group=group), lambda case, of: of(0), in_place=True
    ),
    "all_gather": CollectiveKind(
        lambda case, api, group: api.all_gather_single(case.output, case.input, group=group),
        lambda case, of: torch.cat([of(rank) for rank in range(case.ranks)]),
        parts_in=True,
    ),
    "reduce_scatter": CollectiveKind(
        lambda case, api, group: api.reduce_scatter_single(case.output, case.input, group=group),
        lambda case, of: case.part(_sum(case, of)),
        parts_out=True,
    ),
    "all_to_all": CollectiveKind(
        lambda case, api, group: api.all_to_all_single(case.output, case.input, group=group),
        lambda case, of: torch.cat([case.part(of(rank)) for rank in range(case.ranks)]),
    ),
    "gather": CollectiveKind(
        lambda case, api, group: api.gather(case.input, case.parts_at_root(case.output), 0, group=group),
        lambda case, of: None if case.rank else torch.cat([of(rank) for rank in range(case.ranks)]),
        parts_in=True,
    ),
    "scatter": CollectiveKind(
        lambda case, api, group: api.scatter(case.output, case.parts_at_root(case.input), 0, group=group),
        lambda case, of: case.part(of(0)),
        parts_out=True,
    ),
    "barrier": CollectiveKind(lambda case, api, group: api.barrier(group=group), lambda case, of: None, in_place=True),
}
"""The collectives of `plan.COLLECTIVES`."""
