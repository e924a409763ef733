"""What a run measures: which collectives, at which sizes, among how many ranks, against whom. No torch here.

Every module of the benchmark uses it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Each = TypeVar("_Each")

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "barrier",
)
ON_DEVICES = ("all_reduce", "broadcast", "send")
"""What is measured on tensors of devices; "send" passes rank 0's tensor on from each rank to the next."""
_SHARED_OUT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
RIVALS = ("gloo", "mpi", "raw")
WAYS = ("torch",)
"""Ways in to our groups beside our own faces: the calls of torch.distributed."""
CONTENDERS = ("asyncdist", "registered", "torch", "idle", "awaited", *RIVALS, "copy")
"""Keys of the results; a further transport's key is its own name. "idle" are torch's calls that do nothing."""

THROUGH_TORCH = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier")
"""The collectives that training with torch.distributed stands on."""

STEPS = ("ddp", "fsdp2", "tensor_parallel")
"""The training steps: see `asyncdist.bench.workloads.models`."""
HEADS = 4
"""Of the transformer: so many ranks, or as divide them, can share a block."""

# Up to so many bytes: (timed calls of each contender, of which so many in a row before the next one's turn).
_CALLS = ((64 << 10, 1000, 100), (1 << 20, 150, 10), (8 << 20, 48, 4), (32 << 20, 24, 2))
_CALLS_BEYOND = (12, 1)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """One run. ``against`` are names from `RIVALS`, ``through`` from `WAYS`, ``steps`` from `STEPS`.

    The first of ``transports`` is that of "asyncdist", "registered", "awaited" and "torch"; each further one is a
    contender. ``repeat`` overrides the number of timed calls and steps. ``pin`` keeps each rank on one core.

    On a ``device`` other than "cpu" collectives are from `ON_DEVICES`, and all compete who can: see `bench.device`.
    """

    collectives: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = (4, 1 << 20)
    ranks: int = 2
    against: tuple[str, ...] = ()
    awaited: bool = False
    registered: bool = False
    through: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("auto",)
    repeat: int | None = None
    pin: bool = False
    device: str = "cpu"

    @property
    def cases(self) -> list[tuple[str, int]]:
        """The (collective, bytes) to measure, in order and each once, as sizes are `rounded`; a barrier has no size."""
        cases = (
            (collective, 0 if collective == "barrier" else rounded(collective, nbytes, self.ranks))
            for collective in self.collectives
            for nbytes in self.sizes
        )
        return list(dict.fromkeys(cases))

    @property
    def contenders(self) -> tuple[str, ...]:
        """The keys of those who take part, in the order in which they are shown."""
        return (
            "asyncdist",
            *(("registered",) if self.registered else ()),
            *self.through,
            *(("idle",) if "torch" in self.through else ()),
            *self.transports[1:],
            *(("awaited",) if self.awaited else ()),
            *(name for name in RIVALS if name in self.against),
            "copy",
        )

    @property
    def parts(self) -> int:
        """The number of cases, training steps included."""
        return len(self.cases) + len(self.steps)

    @property
    def training_steps(self) -> int:
        """How many times each contender takes a training step."""
        return self.repeat or 30

    def calls(self, nbytes: int) -> tuple[int, int]:
        """Return (timed calls of each contender, calls in a row) for a size."""
        calls, block = next((calls for limit, *calls in _CALLS if nbytes <= limit), _CALLS_BEYOND)
        if self.repeat is not None:
            calls = self.repeat
        return calls, min(block, calls)


def rounded(collective: str, nbytes: int, ranks: int) -> int:
    """Return a size as it is measured: in whole float32, one at least, and as many for each rank where all have a part."""
    count = max(1, nbytes // 4)
    return 4 * (-(-count // ranks) * ranks if collective in _SHARED_OUT else count)


def steps_left_out(ranks: int) -> dict[str, str]:
    """Return the training steps that so many ranks cannot take, and why not."""
    reasons = {}
    if HEADS % ranks:
        reasons["tensor_parallel"] = f"{ranks} ranks cannot share {HEADS} heads"
    return reasons


def rounds(calls: int, block: int) -> Iterable[int]:
    """Yield how many calls each contender makes in each round."""
    for start in range(0, calls, block):
        yield min(block, calls - start)


def in_turns(contenders: Sequence[_Each], turn: int) -> list[_Each]:
    """Return in which order contenders go in a round: another one each time, so that none always follows the same one."""
    return random.Random(turn).sample(contenders, len(contenders))
