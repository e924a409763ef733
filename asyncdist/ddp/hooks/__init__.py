"""Communication hooks: what happens to a full bucket of gradients instead of an all-reduce.

bucket        the bucket that a hook receives, with the methods of torch's ``GradBucket``
running       calls hooks of torch's interface and awaited hooks, and waits for their results
awaited       `average`, `fp16`, `bf16`, `Quantized`, `PowerSGD` and `TopK`

Register one with `DistributedDataParallel.register_async_comm_hook`. Each object of a class belongs to one model.
"""

from asyncdist.ddp.hooks.awaited import PowerSGD, Quantized, TopK, average, bf16, fp16
from asyncdist.ddp.hooks.bucket import GradientBucket

__all__ = ["GradientBucket", "PowerSGD", "Quantized", "TopK", "average", "bf16", "fp16"]
