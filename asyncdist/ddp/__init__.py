"""Data-parallel training: `DistributedDataParallel` averages gradients over the ranks while backward goes on.

buckets     which parameters travel together, in which order (pure)
agreement   that all ranks hold the same model, and that they start from the same values
reducer     the machine behind the hooks: fills buckets, starts their all-reduces, waits for them
module      what a user wraps a model in
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncdist.ddp.module import DistributedDataParallel as DistributedDataParallel

__all__ = ["DistributedDataParallel"]


def __getattr__(name: str) -> object:
    # Late, because `asyncdist.ddp.buckets` is pure and must not bring torch with it.
    if name == "DistributedDataParallel":
        from asyncdist.ddp.module import DistributedDataParallel

        return DistributedDataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
