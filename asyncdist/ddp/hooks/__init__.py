"""Communication hooks: what happens to a full bucket of gradients instead of an all-reduce.

running       calls hooks of torch's interface and awaited hooks with a bucket like torch's ``GradBucket``
awaited       `average`, `fp16`, `bf16`, `Quantized`, `PowerSGD` and `TopK`

Register one with `DistributedDataParallel.register_async_comm_hook`. Each object of a class belongs to one model.
"""

from asyncdist.ddp.hooks.awaited import PowerSGD, Quantized, TopK, average, bf16, fp16
from asyncdist.ddp.hooks.running import GradientBucket

__all__ = ["GradientBucket", "PowerSGD", "Quantized", "TopK", "average", "bf16", "fp16"]
