"""Data-parallel training: `DistributedDataParallel` averages gradients over the ranks while backward goes on.

buckets     which parameters travel together, in which order (pure)
agreement   that all ranks hold the same model, and that they start from the same values
reducer     the machine behind the hooks: fills buckets, starts their all-reduces, waits for them
in_place    linear layers whose gradients are written into buckets instead of copied
uneven      what ranks do that have run out of inputs before others
module      what a user wraps a model in
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncdist.ddp.module import DistributedDataParallel as DistributedDataParallel
    from asyncdist.ddp.reducer import BucketTimes as BucketTimes
    from asyncdist.ddp.reducer import StepTimes as StepTimes

__all__ = ["BucketTimes", "DistributedDataParallel", "StepTimes"]


def __getattr__(name: str) -> object:
    # Late, because `asyncdist.ddp.buckets` is pure and must not bring torch with it.
    if name in __all__:
        room = import_module("asyncdist.ddp.module" if name == "DistributedDataParallel" else "asyncdist.ddp.reducer")
        return getattr(room, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
