"""Data-parallel training: `DistributedDataParallel` averages gradients over the ranks during backward.

buckets            assigns parameters to buckets, in order (pure)
model_sync         checks that all ranks hold the same model, and broadcasts rank 0's values
reducer            fills buckets in autograd hooks, starts their all-reduces and waits for them
direct_gradients   linear layers whose gradients are computed directly in the buckets
uneven_inputs      training steps of ranks that have run out of inputs before others
module             the public wrapper of a model
sampler            `DistributedSampler`
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
    # Imported late, because importing the pure module `asyncdist.ddp.buckets` must not import torch.
    if name in __all__:
        home = import_module("asyncdist.ddp.module" if name == "DistributedDataParallel" else "asyncdist.ddp.reducer")
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
