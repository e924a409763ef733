"""A collective at one size, with its tensors: how to fill them, how to call it on a face, what must come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from asyncdist.bench.plan import rounded
from asyncdist.errors import BenchmarkError

Empty = Callable[[int], torch.Tensor]
"""Makes a float32 tensor of so many elements, with whatever in it."""


class Traffic(ABC):
    """One collective among ``ranks`` at ``nbytes`` (`rounded`).

    ``call`` goes to any face that has torch.distributed's names: ours, the awaited one, or torch's own. ``empty`` makes
    the tensors.
    """

    name: ClassVar[str]
    # Which of the two holds a rank's part only; the other one holds all ranks' parts.
    parts_in: ClassVar[bool] = False
    parts_out: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, ranks: int, nbytes: int, empty: Empty = torch.empty) -> None:
        self.rank, self.ranks = rank, ranks
        self.nbytes = rounded(self.name, nbytes, ranks)
        self.count = self.nbytes // 4
        self.input = empty(self.count // ranks if self.parts_in else self.count)
        self.output = self.input if self.in_place else empty(self.count // ranks if self.parts_out else self.count)
        # Ranks that outnumber cores wait while others look at their results: not by indexing tensors, which takes longer
        # than a small collective.
        result: Any = self.output.numpy()
        self._result: Any = memoryview(result)

    @abstractmethod
    def call(self, face: Any, group: Any = None) -> Any:
        """Start the collective on ``face``; what it returns."""

    @abstractmethod
    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        """Return what ``output`` must hold, given every rank's input; None where this rank gets nothing."""

    def contribution(self, rank: int) -> torch.Tensor:
        """Return a rank's input for a checked call: small whole numbers, so that sums are exact."""
        return torch.arange(self.input.numel()).remainder_(7).add_(rank + 1).float()

    def load(self) -> None:
        """Fill the tensors for a checked call."""
        self.output.fill_(-1)
        self.input.copy_(self.contribution(self.rank))

    def check(self, contender: str) -> None:
        """Compare every element with plain arithmetic; BenchmarkError if one differs."""
        expected = self.expected([self.contribution(rank) for rank in range(self.ranks)])
        if expected is not None and not torch.equal(self.output, expected):
            wrong = int((self.output != expected).sum())
            raise BenchmarkError(
                f"{contender}: {self.name} of {self.nbytes} bytes gave a wrong result on rank {self.rank}: "
                f"{wrong} of {expected.numel()} elements differ; nothing was timed"
            )

    def settle(self) -> None:
        """Fill the tensors for timed calls, and learn what their first and last elements will be."""
        inputs = [torch.full((self.ranks,), rank + 1.0) for rank in range(self.ranks)]
        self._ends = self._ends_of(inputs)
        self.input.fill_(self.rank + 1.0)

    def _ends_of(self, inputs: list[torch.Tensor]) -> tuple[float, float] | None:
        whole = [tensor[:1] if self.parts_in else tensor for tensor in inputs]
        expected = self.expected(whole)
        return None if expected is None else (expected[0].item(), expected[-1].item())

    def restore(self) -> None:
        """Undo what the last timed call has done to the input; erase its result."""
        if self.in_place:
            self.input.fill_(self.rank + 1.0)
        else:
            self._result[0] = self._result[-1] = -1.0

    def glance(self, contender: str) -> None:
        """Look at the ends of a timed call's result; BenchmarkError if they are wrong."""
        found = self._result[0], self._result[-1]
        if self._ends is not None and found != self._ends:
            raise BenchmarkError(
                f"{contender}: a timed {self.name} of {self.nbytes} bytes gave {found[0]:g} … {found[1]:g} on rank "
                f"{self.rank} instead of {self._ends[0]:g} … {self._ends[1]:g}"
            )

    def _part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.chunk(self.ranks)[rank]


class AllReduce(Traffic):
    name = "all_reduce"
    in_place = True

    def call(self, face: Any, group: Any = None) -> Any:
        return face.all_reduce(self.input, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return torch.stack(contributions).sum(0)


class ReduceTraffic(AllReduce):
    name = "reduce"

    def call(self, face: Any, group: Any = None) -> Any:
        return face.reduce(self.input, 0, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return super().expected(contributions) if self.rank == 0 else None


class Broadcast(Traffic):
    name = "broadcast"
    in_place = True

    def call(self, face: Any, group: Any = None) -> Any:
        return face.broadcast(self.input, 0, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return contributions[0]

    def restore(self) -> None:
        self._result[0] = self._result[-1] = self.rank + 1.0


class AllGather(Traffic):
    name = "all_gather"
    parts_in = True

    def call(self, face: Any, group: Any = None) -> Any:
        return face.all_gather_single(self.output, self.input, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return torch.cat(contributions)


class Gather(AllGather):
    name = "gather"

    def call(self, face: Any, group: Any = None) -> Any:
        parts = list(self.output.chunk(self.ranks)) if self.rank == 0 else None
        return face.gather(self.input, parts, 0, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return super().expected(contributions) if self.rank == 0 else None


class ReduceScatter(Traffic):
    name = "reduce_scatter"
    parts_out = True

    def call(self, face: Any, group: Any = None) -> Any:
        return face.reduce_scatter_single(self.output, self.input, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return self._part(torch.stack(contributions).sum(0), self.rank)


class Scatter(Traffic):
    name = "scatter"
    parts_out = True

    def call(self, face: Any, group: Any = None) -> Any:
        parts = list(self.input.chunk(self.ranks)) if self.rank == 0 else None
        return face.scatter(self.output, parts, 0, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return self._part(contributions[0], self.rank)


class AllToAll(Traffic):
    name = "all_to_all"

    def call(self, face: Any, group: Any = None) -> Any:
        return face.all_to_all_single(self.output, self.input, group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return torch.cat([self._part(each, self.rank) for each in contributions])


class Barrier(Traffic):
    name = "barrier"
    in_place = True

    def call(self, face: Any, group: Any = None) -> Any:
        return face.barrier(group=group)

    def expected(self, contributions: list[torch.Tensor]) -> torch.Tensor | None:
        return None


_KINDS: dict[str, type[Traffic]] = {
    kind.name: kind
    for kind in (AllReduce, ReduceTraffic, Broadcast, AllGather, ReduceScatter, AllToAll, Gather, Scatter, Barrier)
}


def traffic(collective: str, rank: int, ranks: int, nbytes: int, empty: Empty = torch.empty) -> Traffic:
    """Make the traffic of a collective by its name in `plan.COLLECTIVES`."""
    return _KINDS[collective](rank, ranks, nbytes, empty)
