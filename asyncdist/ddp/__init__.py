"""Data-parallel training: `DistributedDataParallel` averages gradients over the ranks during backward.

buckets            assigns parameters to buckets, in order (pure)
model_sync         checks that all ranks hold the same model, and broadcasts rank 0's values
reducer            fills buckets in autograd hooks, starts their all-reduces and waits for them
direct_gradients   linear layers whose gradients are computed directly in the buckets
uneven_inputs      training steps of ranks that have run out of inputs before others
module             the public wrapper of a model
sampler            `DistributedSampler`
"""

from asyncdist.ddp.module import DistributedDataParallel
from asyncdist.ddp.reducer import BucketTimes, StepTimes

__all__ = ["BucketTimes", "DistributedDataParallel", "StepTimes"]
