"""Communication hooks: what happens to a full bucket of gradients instead of an all-reduce.

bucket        the bucket that a hook receives, with the methods of torch's ``GradBucket``
running       calls hooks of torch's interface and awaited hooks, and waits for their results
casts         `average`, `fp16`, `bf16`
quantized     `Quantized`: integers by blocks
powersgd      `PowerSGD`: products of thin matrices
top_k         `TopK`: the largest gradients

Register one with `DistributedDataParallel.register_async_comm_hook`. Each object of a class belongs to one model.
"""

from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.ddp.hooks.casts import average, bf16, fp16
from asyncdist.ddp.hooks.powersgd import PowerSGD
from asyncdist.ddp.hooks.quantized import Quantized
from asyncdist.ddp.hooks.top_k import TopK

__all__ = ["GradientBucket", "PowerSGD", "Quantized", "TopK", "average", "bf16", "fp16"]
