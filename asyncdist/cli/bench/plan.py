"""What a run measures: collectives, sizes, number of ranks, and contenders. Every module of the benchmark uses it.

This module does not import torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Each = TypeVar("_Each")

COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
_SHARED_OUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
RIVALS = ("gloo", "mpi", "raw")
EARLIER = "earlier"
"""The key of asyncdist's figures of an earlier run on the same machine."""
THROUGH = ("torch",)
"""Other APIs through which asyncdist is measured: "torch" means the functions of torch.distributed."""
CONTENDERS = ("asyncdist", "registered", "torch", "idle", "awaited", *RIVALS, EARLIER, "copy")
"""Keys of the results. The key of a further transport is its name. "idle" is torch.distributed on a null back end."""

THROUGH_TORCH = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
"""The collectives that training with torch.distributed uses."""

# (largest size in bytes, timed calls of each contender, calls in each turn)
_CALLS = ((64 << 10, 1000, 100), (1 << 20, 150, 10), (8 << 20, 48, 4), (32 << 20, 24, 2))
_CALLS_BEYOND = (12, 1)
_BETWEEN_HOSTS = 6
"""By how much fewer calls are made between hosts, where all ranks share the processors of one machine."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """One run.

    Attributes:
        sizes: Of the tensors, in bytes.
        transports: The contenders "asyncdist", "registered", "awaited" and "torch" use the first one. Each further one is
            another contender.
        repeat: The number of timed calls; None for a number that depends on the size.
        busy: The number of processes that compute on the same cores.
        hosts: The number of hosts: 1 for this machine, more for a test bed of `asyncdist.testing.hosts`.
        link: The rate of each host's link in the words of ``tc``; no limit if empty.
        than: The file with the figures of an earlier run to compare with; empty for none.
    """

    collectives: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (4, 1 << 20)
    ranks: int = 2
    against: tuple[str, ...] = ()
    awaited: bool = False
    registered: bool = False
    through: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("auto",)
    repeat: int | None = None
    busy: int = 0
    hosts: int = 1
    link: str = ""
    than: str = ""

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host. Neighbouring ranks share a host."""
        return self.ranks // self.hosts

    @property
    def shares_cores(self) -> bool:
        """Whether ranks compete for the cores with each other or with busy processes, and so must not spin."""
        return self.busy > 0 or self.hosts > 1

    @property
    def cases(self) -> list[tuple[str, int]]:
        """The pairs (collective, bytes) to measure, without duplicates. Sizes are `rounded`; a barrier has size 0."""
        cases = (
            (collective, 0 if collective == "barrier" else rounded(collective, nbytes, self.ranks))
            for collective in self.collectives
            for nbytes in self.sizes
        )
        return list(dict.fromkeys(cases))

    @property
    def contenders(self) -> tuple[str, ...]:
        """The keys of the contenders, in the order in which they are shown."""
        return (
            "asyncdist",
            *(("registered",) if self.registered else ()),
            *self.through,
            *(("idle",) if "torch" in self.through else ()),
            *self.transports[1:],
            *(("awaited",) if self.awaited else ()),
            *(name for name in RIVALS if name in self.against),
            *((EARLIER,) if self.than else ()),
            *(("copy",) if self.hosts == 1 else ()),
        )

    def calls(self, nbytes: int) -> tuple[int, int]:
        """Return (timed calls of each contender, calls in each turn) for a size."""
        calls, block = next((calls for limit, *calls in _CALLS if nbytes <= limit), _CALLS_BEYOND)
        if self.hosts > 1:
            calls //= _BETWEEN_HOSTS
        if self.repeat is not None:
            calls = self.repeat
        return calls, min(block, calls)


def rounded(collective: str, nbytes: int, ranks: int) -> int:
    """Return the measured size in bytes: at least one float32, and a multiple of the ranks if each rank has one part."""
    count = max(1, nbytes // 4)
    return 4 * (-(-count // ranks) * ranks if collective in _SHARED_OUT else count)


def rounds(calls: int, block: int) -> Iterable[int]:
    """Yield the number of calls that each contender makes in each round."""
    for start in range(0, calls, block):
        yield min(block, calls - start)


def in_turns(contenders: Sequence[_Each], turn: int) -> list[_Each]:
    """Return the contenders in the order of a round. The order changes, so that none always follows the same one."""
    return random.Random(turn).sample(contenders, len(contenders))
