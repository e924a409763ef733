"""A communication hook that sends the largest gradients only, with error feedback.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (arXiv 1809.07599), algorithm 1.
"""

from __future__ import annotations

import math

import torch

from asyncdist.ddp.compression import ErrorFeedback
from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.errors import UsageError
from asyncdist.groups import Group


class TopK:
    """Sends a share of each bucket: the gradients of largest magnitude, and their indices.

    Each rank adds what it has not sent in earlier steps to its gradients, and sends the k largest. The average of a
    parameter's element is the sum of what ranks have sent of it, divided by the number of ranks.

    Cost: an all-gather of 8 k bytes from each rank for buckets of float32. A rank receives 8 k (P - 1) bytes for P ranks,
    where an all-reduce of n gradients receives 8 n (P - 1) / P: P k / n times as many, which is 0.02 for two ranks and a
    share of 0.01. It keeps 4 n bytes of errors.

    Args:
        share: The share of the gradients that each rank sends, above 0 and at most 1; at least one for each bucket.

    Raises:
        UsageError: ``share`` is outside this range.

    Example:
        >>> model.register_async_comm_hook(asyncdist.ddp.hooks.TopK(share=0.01))
    """

    def __init__(self, share: float = 0.01) -> None:
        if not 0 < share <= 1:
            raise UsageError(f"TopK sends a share above 0 and at most 1 of the gradients, not {share!r}")
        self._share = share
        self._errors: dict[tuple[int, ...], ErrorFeedback] = {}

    async def __call__(self, bucket: GradientBucket, group: Group) -> torch.Tensor:
        """Average a bucket."""
        flat, ranks = bucket.real_buffer(), group.size()
        if ranks == 1:
            return flat
        values = flat.float().clone()
        feedback = self._errors.setdefault(bucket.key(), ErrorFeedback())
        feedback.add_to(values)
        count = math.ceil(self._share * values.numel())
        indices = values.abs().topk(count, sorted=False).indices
        own = torch.cat([values[indices].view(torch.int32), indices.to(torch.int32)])
        gathered = own.new_empty(ranks * own.numel())
        await group.all_gather_single(gathered, own)
        sums = torch.zeros_like(values)
        for part in gathered.view(ranks, 2, count):
            # A rank's indices differ, so the order of the ranks decides the sums, equally on all ranks.
            sums.index_add_(0, part[1].to(torch.int64), part[0].view(torch.float32))
        sent = torch.zeros_like(values)
        sent[indices] = values[indices]
        feedback.keep(values, sent)
        return sums.div_(ranks)
