"""Traffic: a collective at one size with its tensors, its call and its expected result. Used by the contenders."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from asyncdist.cli.bench.plan import rounded
from asyncdist.errors import BenchmarkError

Empty = Callable[[int], torch.Tensor]
"""Makes an uninitialized float32 tensor with the given number of elements."""
Contribution = Callable[[int], torch.Tensor]
"""Returns the input of a rank."""


class Traffic(ABC):
    """One collective among ``ranks`` ranks.

    Args:
        rank: This rank.
        ranks: The number of ranks.
        nbytes: The size in bytes, which is then `rounded`.
        empty: Makes the tensors.
    """

    name: ClassVar[str]
    # Whether the input or the output is the part of one rank. The other one then has the parts of all ranks.
    parts_in: ClassVar[bool] = False
    parts_out: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    def __init__(self, rank: int, ranks: int, nbytes: int, empty: Empty = torch.empty) -> None:
        self.rank, self.ranks = rank, ranks
        self.nbytes = rounded(self.name, nbytes, ranks)
        self.count = self.nbytes // 4
        self.input = empty(self.count // ranks if self.parts_in else self.count)
        self.output = self.input if self.in_place else empty(self.count // ranks if self.parts_out else self.count)
        self.on_device = self.output.is_cuda
        # Indexing a tensor takes longer than a small collective, and would delay other ranks on the same core.
        memory: Any = None if self.on_device else self.output.numpy()
        self._result: Any = self.output if self.on_device else memoryview(memory)

    @abstractmethod
    def call(self, api: Any, group: Any = None) -> Any:
        """Call the collective through an API with torch.distributed's names, and return the result."""

    def start(self, api: Any, group: Any = None) -> Any:
        """Call the collective through an awaited API, and return an awaitable."""
        return self.call(api, group)

    @abstractmethod
    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        """Return the expected ``output`` for the inputs of all ranks; None if this rank has no output."""

    def contribution(self, rank: int) -> torch.Tensor:
        """Return a rank's input for a checked call: small integers, so that sums are exact."""
        numbers = torch.arange(self.input.numel(), dtype=torch.int32, device=self.input.device)
        return numbers.remainder_(7).add_(rank + 1).float()

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
        parts = 1 if self.parts_in else self.ranks
        expected = self.expected(lambda rank: torch.full((parts,), rank + 1.0))
        self._ends = None if expected is None else (expected[0].item(), expected[-1].item())
        self.input.fill_(self.rank + 1.0)

    def restore(self) -> None:
        """Undo the effect of the last timed call on the input, and erase its result."""
        if self.in_place:
            self.input.fill_(self.rank + 1.0)
        else:
            self._result[0] = self._result[-1] = -1.0
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

    def _sum(self, contribution: Contribution) -> torch.Tensor:
        return functools.reduce(torch.add, map(contribution, range(self.ranks)))

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.ranks)[self.rank]


class AllReduce(Traffic):
    name = "all_reduce"
    in_place = True

    def call(self, api: Any, group: Any = None) -> Any:
        return api.all_reduce(self.input, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return self._sum(contribution)


class ReduceTraffic(AllReduce):
    name = "reduce"

    def call(self, api: Any, group: Any = None) -> Any:
        return api.reduce(self.input, 0, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return super().expected(contribution) if self.rank == 0 else None


class Broadcast(Traffic):
    name = "broadcast"
    in_place = True

    def call(self, api: Any, group: Any = None) -> Any:
        return api.broadcast(self.input, 0, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return contribution(0)

    def restore(self) -> None:
        if self.on_device:
            super().restore()
        else:
            self._result[0] = self._result[-1] = self.rank + 1.0


class SendTraffic(Broadcast):
    """Each rank receives rank 0's tensor from the previous rank and sends it to the next one; on devices only."""

    name = "send"

    def call(self, api: Any, group: Any = None) -> Any:
        self._forward(api, group, self.input)

    def call_through_host(self, api: Any, group: Any = None) -> None:
        """Do the same as `call` for an API that cannot send device tensors: copy through host memory."""
        on_host = self.input.cpu()
        self._forward(api, group, on_host)
        if self.rank:
            self.input.copy_(on_host)

    async def start(self, api: Any, group: Any = None) -> None:
        if self.rank:
            await api.recv(self.input, self.rank - 1, group=group)
        if self.rank + 1 < self.ranks:
            await api.send(self.input, self.rank + 1, group=group)

    def _forward(self, api: Any, group: Any, tensor: torch.Tensor) -> None:
        if self.rank:
            api.recv(tensor, self.rank - 1, group=group)
        if self.rank + 1 < self.ranks:
            api.send(tensor, self.rank + 1, group=group)


class AllGather(Traffic):
    name = "all_gather"
    parts_in = True

    def call(self, api: Any, group: Any = None) -> Any:
        return api.all_gather_single(self.output, self.input, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return torch.cat([contribution(rank) for rank in range(self.ranks)])


class Gather(AllGather):
    name = "gather"

    def call(self, api: Any, group: Any = None) -> Any:
        parts = list(self.output.chunk(self.ranks)) if self.rank == 0 else None
        return api.gather(self.input, parts, 0, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return super().expected(contribution) if self.rank == 0 else None


class ReduceScatter(Traffic):
    name = "reduce_scatter"
    parts_out = True

    def call(self, api: Any, group: Any = None) -> Any:
        return api.reduce_scatter_single(self.output, self.input, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return self._part(self._sum(contribution))


class Scatter(Traffic):
    name = "scatter"
    parts_out = True

    def call(self, api: Any, group: Any = None) -> Any:
        parts = list(self.input.chunk(self.ranks)) if self.rank == 0 else None
        return api.scatter(self.output, parts, 0, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return self._part(contribution(0))


class AllToAll(Traffic):
    name = "all_to_all"

    def call(self, api: Any, group: Any = None) -> Any:
        return api.all_to_all_single(self.output, self.input, group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return torch.cat([self._part(contribution(rank)) for rank in range(self.ranks)])


class Barrier(Traffic):
    name = "barrier"
    in_place = True

    def call(self, api: Any, group: Any = None) -> Any:
        return api.barrier(group=group)

    def expected(self, contribution: Contribution) -> torch.Tensor | None:
        return None


_KINDS: dict[str, type[Traffic]] = {
    kind.name: kind
    for kind in (
        AllReduce,
        ReduceTraffic,
        Broadcast,
        SendTraffic,
        AllGather,
        ReduceScatter,
        AllToAll,
        Gather,
        Scatter,
        Barrier,
    )
}


def traffic(collective: str, rank: int, ranks: int, nbytes: int, empty: Empty = torch.empty) -> Traffic:
    """Make the traffic of a collective from `plan.COLLECTIVES` or `plan.ON_DEVICES`."""
    return _KINDS[collective](rank, ranks, nbytes, empty)
