"""Communication hooks that send gradients as they are, or in 16 bits.

A bucket of n gradients of four bytes is sent as 4n bytes by `average` and as 2n bytes by the others.
"""

from __future__ import annotations

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.groups import Group


async def average(bucket: GradientBucket, group: Group) -> torch.Tensor:
    """Average the gradients, as a model without a hook does.

    Args:
        bucket: The gradients of this rank.
        group: The ranks to average over.

    Returns:
        ``bucket.buffer()`` with the averages.
    """
    await group.all_reduce(bucket.buffer(), ReduceOp.AVG)
    return bucket.buffer()


async def fp16(bucket: GradientBucket, group: Group) -> torch.Tensor:
    """Average the gradients in float16, and return them so: half the bytes of float32, and a range of 6e-8 to 65504."""
    return await _average_as(torch.float16, bucket, group)


async def bf16(bucket: GradientBucket, group: Group) -> torch.Tensor:
    """Average the gradients in bfloat16, and return them so: half the bytes, the range of float32, 8 significant bits.

    Example:
        >>> model.register_async_comm_hook(asyncdist.ddp.hooks.bf16)
    """
    return await _average_as(torch.bfloat16, bucket, group)


async def _average_as(dtype: torch.dtype, bucket: GradientBucket, group: Group) -> torch.Tensor:
    # Divided before the sum, which could exceed the range.
    sent = bucket.real_buffer().to(dtype).div_(group.size())
    await group.all_reduce(sent, ReduceOp.SUM)
    return sent
