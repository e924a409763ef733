"""A communication hook that sends gradients of matrices as products of two thin matrices (PowerSGD).

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv 1905.13727), algorithms 1 and 2.
"""

from __future__ import annotations

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.ddp.compression import ErrorFeedback
from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.errors import UsageError
from asyncdist.groups import Group


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
