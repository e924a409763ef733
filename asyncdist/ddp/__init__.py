"""Data-parallel training: `DistributedDataParallel` averages gradients over the ranks during backward.

buckets            assigns parameters to buckets, and finds the best size (pure)
model_sync         checks that all ranks hold the same model, and broadcasts rank 0's values
model_watch        notices parameters that a model gets later
reducer            fills buckets in autograd hooks, starts their all-reduces and waits for them
backward           what the reducer keeps and finds during one backward
hooks              communication hooks, which replace the all-reduces
direct_gradients   linear layers whose gradients are computed directly in the buckets
compression        values as fewer bytes, and what that loses (pure)
uneven_inputs      training steps of ranks that have run out of inputs before others
torch_class        arguments, methods and attributes of torch's class
module             the public wrapper of a model
timeline           times of one step, and a picture of them
sync_batchnorm     `SyncBatchNorm`
sampler            `DistributedSampler`
sharded_optimizer  `ZeroRedundancyOptimizer`
low_communication  `DiLoCo` and `LocalSGD`, without the reducer; `averaging` is their exchange
"""

from asyncdist.ddp.module import DistributedDataParallel
from asyncdist.ddp.timeline import BucketTimes, StepTimes

__all__ = ["BucketTimes", "DistributedDataParallel", "StepTimes"]
