"""Communication hooks that send gradients as they are, in 16 bits, as integers, as thin matrices, or the largest only.

Sources: those of `asyncdist.ddp.compression`; Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization" (arXiv 1905.13727), algorithms 1 and 2; Stich, Cordonnier and Jaggi, "Sparsified
SGD with Memory" (arXiv 1809.07599), algorithm 1, for `TopK`.
"""

from __future__ import annotations

import math

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.ddp.averaging import average_of
from asyncdist.ddp.compression import Compress, ErrorFeedback, codec_of
from asyncdist.ddp.hooks.running import GradientBucket
from asyncdist.errors import UsageError
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


class Quantized:
    """Averages gradients that are encoded by a codec, by default as 8-bit integers with one scale for 256 of them.

    Two ranks exchange their encoded gradients. Of more ranks, each averages a part of the gradients and encodes it again
    for all others (see `asyncdist.ddp.averaging`). What a rank loses by encoding it adds to the gradients of its next step.

    Cost: for n gradients of float32 a rank sends about 1.016 n bytes twice, times (P - 1) / P for P ranks, where an
    all-reduce sends 4 n bytes twice: 0.25 times the bytes. It keeps 4 n bytes of errors.

    Args:
        compress: A codec or its name: ``"int8"``, ``"int4"`` or ``"bf16"``.

    Raises:
        UsageError: No codec has this name.

    Example:
        >>> model.register_async_comm_hook(asyncdist.ddp.hooks.Quantized())
    """

    def __init__(self, compress: Compress = "int8") -> None:
        codec = codec_of(compress)
        if codec is None:
            raise UsageError(
                "Quantized needs a codec: pass 'int8', 'int4' or 'bf16'; hooks.average sends values as they are"
            )
        self._codec = codec
        self._feedback: dict[tuple[int, ...], ErrorFeedback] = {}

    async def __call__(self, bucket: GradientBucket, group: Group) -> torch.Tensor:
        """Average a bucket."""
        feedback = self._feedback.setdefault(bucket.key(), ErrorFeedback())
        average = await average_of(group, bucket.real_buffer().float(), self._codec, feedback)
        feedback.residual = average.lost
        return average.values


class PowerSGD:
    """Averages the gradients of matrices as products of rank ``rank``, with error feedback; others as they are.

    A gradient with two or more dimensions is a matrix of n rows and m columns. Where that is at least twice as small, ranks
    average ``rank`` times (n + m) numbers instead of n m. One iteration of the power method, started with the last step's
    result, finds the product. The difference from the gradient is added to the gradient of the next step. The first
    ``start`` steps average gradients as they are.

    Cost: three all-reduces for a bucket (the small gradients and two factors), and for each matrix three products with a
    thin matrix and one QR decomposition. It keeps 4 n m bytes of errors.

    Args:
        rank: Columns of the thin matrices; more lose less and send more.
        start: Steps that send gradients as they are, because gradients change fastest at first; at least 1.
        seed: Seed of the first thin matrices, equal on all ranks.

    Raises:
        UsageError: ``rank`` or ``start`` is less than 1.

    Example:
        >>> model.register_async_comm_hook(asyncdist.ddp.hooks.PowerSGD(rank=2, start=100))
    """

    def __init__(self, rank: int = 1, start: int = 10, seed: int = 0) -> None:
        if rank < 1 or start < 1:
            raise UsageError(f"PowerSGD needs rank and start of at least 1, not {rank} and {start}")
        self._rank, self._start = rank, start
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._factors: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._errors: dict[torch.nn.Parameter, ErrorFeedback] = {}

    async def __call__(self, bucket: GradientBucket, group: Group) -> torch.Tensor:
        """Average a bucket."""
        flat = bucket.buffer()
        compresses = self._steps >= self._start
        self._steps += bucket.is_last()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        matrices = [(each, gradient) for each, gradient in pairs if compresses and self._is_compressed(gradient)]
        if group.size() == 1:
            return flat
        if not matrices:
            await group.all_reduce(flat, ReduceOp.AVG)
            return flat
        chosen = {parameter for parameter, _ in matrices}
        rest = [gradient for parameter, gradient in pairs if parameter not in chosen]
        await self._average(rest, group)
        await self._average_products(matrices, group)
        return flat

    def _is_compressed(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or gradient.is_complex() or not gradient.numel():
            return False
        rows, columns = gradient.shape[0], gradient.numel() // max(gradient.shape[0], 1)
        return 2 * self._rank * (rows + columns) <= rows * columns

    @staticmethod
    async def _average(tensors: list[torch.Tensor], group: Group) -> None:
        if tensors:
            joined = torch.cat([tensor.flatten() for tensor in tensors])
            await group.all_reduce(joined, ReduceOp.AVG)
            for tensor, part in zip(tensors, joined.split([each.numel() for each in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    async def _average_products(self, matrices: list[tuple[torch.nn.Parameter, torch.Tensor]], group: Group) -> None:
        targets, lefts, rights = [], [], []
        for parameter, gradient in matrices:
            target = gradient.float().reshape(gradient.shape[0], -1).clone()
            self._errors.setdefault(parameter, ErrorFeedback()).add_to(target.view(-1))
            targets.append(target)
            rights.append(self._factor(parameter, target))
            lefts.append(target @ rights[-1])
        await self._average(lefts, group)
        for left, right, target in zip(lefts, rights, targets, strict=True):
            left.copy_(torch.linalg.qr(left).Q)
            torch.mm(target.t(), left, out=right)
        await self._average(rights, group)
        for (parameter, gradient), target, left, right in zip(matrices, targets, lefts, rights, strict=True):
            product = left @ right.t()
            self._errors[parameter].keep(target.view(-1), product.view(-1))
            gradient.copy_(product.view(gradient.shape))

    def _factor(self, parameter: torch.nn.Parameter, target: torch.Tensor) -> torch.Tensor:
        """Return the thin matrix of the last step; a random one, equal on all ranks, at first."""
        factor = self._factors.get(parameter)
        if factor is None:
            drawn = torch.randn(target.shape[1], self._rank, generator=self._generator, device="cpu")
            factor = self._factors[parameter] = torch.linalg.qr(drawn).Q.contiguous().to(target.device)
        return factor


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
