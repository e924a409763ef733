"""`SyncBatchNorm`: batch normalization by the statistics of all ranks' samples, on every device. `asyncdist` exports it.

Source: the parallel algorithm of Chan, Golub and LeVeque (1979) for the mean and variance of several sets of samples.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.lazy import LazyModuleMixin

from asyncdist.errors import UsageError
from asyncdist.groups import AnyGroup, Group, resolve_group
from asyncdist.kernel.torch_private import BatchNorm


class SyncBatchNorm(BatchNorm):
    """Batch normalization of the samples of all ranks of a group, on CPUs and accelerators.

    In training each forward makes one all-gather of 2C + 1 numbers and each backward one all-reduce of 2C numbers, for C
    channels. In evaluation, and in a group of one rank, it computes what `torch.nn.BatchNorm2d` computes. All ranks must
    run the layer equally often. Batches may have different sizes; a rank's batch may be empty.

    Parameters, buffers and their names are those of torch's batch norms, so state dicts fit both.

    Args:
        num_features: Number C of channels. Inputs have the shape ``(N, C, ...)``, with any number of further dimensions.
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; None averages all batches.
        affine: Whether the layer has a weight and a bias.
        track_running_stats: Whether the layer keeps running statistics.
        process_group: The group whose ranks share statistics; None is the default group at the time of the forward.

    Raises:
        UsageError: An input has fewer than two dimensions, the batch of all ranks together has one value per channel, or
            the calling thread runs an event loop.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: AnyGroup = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: AnyGroup = None) -> nn.Module:
        """Replace every batch norm of torch in ``module``, also a `torch.nn.SyncBatchNorm`, by a layer of this class.

        Parameters and buffers are the same objects, so an optimizer keeps working, and keys of state dicts stay.

        Args:
            module: The model. It is changed in place.
            process_group: The group whose ranks share statistics; None is the default group at the time of the forward.

        Returns:
            ``module``; a new layer if ``module`` itself is a batch norm.
        """
        converted: dict[nn.Module, nn.Module] = {}
        for parent in list(module.modules()):
            # A layer that occurs several times stays one layer.
            for name, child in parent._modules.items():
                if child is not None and cls._converts(child):
                    if child not in converted:
                        converted[child] = cls._like(child, process_group)
                    parent._modules[name] = converted[child]
        return cls._like(module, process_group) if cls._converts(module) else module

    @classmethod
    def _converts(cls, layer: nn.Module) -> bool:
        # A lazy layer has no channels yet.
        return isinstance(layer, BatchNorm) and not isinstance(layer, cls | LazyModuleMixin)

    @classmethod
    def _like(cls, layer: nn.Module, process_group: AnyGroup) -> SyncBatchNorm:
        assert isinstance(layer, BatchNorm)
        made = cls(layer.num_features, layer.eps, layer.momentum, False, False, process_group, device="meta")
        made.affine, made.track_running_stats = layer.affine, layer.track_running_stats
        for own, of_layer in ((made._parameters, layer._parameters), (made._buffers, layer._buffers)):
            own.update(of_layer)  # type: ignore[arg-type]
        made.training = layer.training
        if hasattr(layer, "qconfig"):
            made.qconfig = layer.qconfig
        return made

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        # A group belongs to this process.
        state.update(process_group=None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(self.__getstate__(), memo))
        made.process_group = self.process_group
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input; in training, all ranks of the group call it together."""
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm takes inputs of the shape (N, C, ...), not {tuple(input.shape)}")
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        group = resolve_group(self.process_group) if uses_batch and self.training else None
        tracked = (
            (self.running_mean, self.running_var) if not self.training or self.track_running_stats else (None, None)
        )
        if group is None or group.size() == 1:
            return batch_norm(input, *tracked, self.weight, self.bias, uses_batch, momentum, self.eps)
        result: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, tracked, momentum, self.eps, _sibling_of(group)
        )
        return result


_siblings: weakref.WeakKeyDictionary[Group, Group] = weakref.WeakKeyDictionary()


def _sibling_of(group: Group) -> Group:
    """Return the group of the layers' own collectives: all-reduces of buckets go on in ``group`` during backward."""
    sibling = _siblings.get(group)
    if sibling is None:
        sibling = _siblings[group] = group._sibling("SyncBatchNorm")
    return sibling


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return one value per channel, in a shape that broadcasts over ``like``."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Normalize(torch.autograd.Function):
    """Normalizes by the statistics of all ranks. Statistics are computed in float32, or float64 for float64 inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        tracked: tuple[torch.Tensor | None, torch.Tensor | None],
        momentum: float,
        eps: float,
        group: Group,
    ) -> torch.Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        data = input.to(wide)
        channels, own_count = input.shape[1], input.numel() // max(input.shape[1], 1)
        own_mean = data.mean(dims) if own_count else data.new_zeros(channels)
        own_squares = (data - _column(own_mean, data)).square().sum(dims)
        own = torch.cat([own_mean, own_squares, own_mean.new_tensor([own_count])])
        gathered = own.new_empty(group.size() * own.numel())
        group.all_gather_single(gathered, own, background=False).wait()
        means, squares, counts = gathered.view(group.size(), -1).split([channels, channels, 1], dim=1)
        count = float(counts.sum())
        if count < 2:
            raise UsageError(
                f"SyncBatchNorm needs more than one value per channel in training; the {group.size()} ranks together "
                f"have {int(count)}: give the ranks larger batches, or call eval()"
            )
        mean = (means * counts).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        scale = (variance + eps).rsqrt()
        running_mean, running_var = tracked
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
        normalized = (data - _column(mean, data)) * _column(scale, data)
        ctx.save_for_backward(input, weight, mean, scale)
        ctx.group, ctx.count = group, count
        if weight is not None:
            normalized = normalized * _column(weight.to(wide), data)
        if bias is not None:
            normalized = normalized + _column(bias.to(wide), data)
        return normalized.to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        input, weight, mean, scale = ctx.saved_tensors
        data, given = input.to(mean.dtype), gradient.to(mean.dtype)
        dims = [dim for dim in range(data.dim()) if dim != 1]
        normalized = (data - _column(mean, data)) * _column(scale, data)
        for_bias, for_weight = given.sum(dims), (given * normalized).sum(dims)
        for_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([for_bias, for_weight])
            ctx.group.all_reduce(sums, background=False).wait()
            sum_given, sum_products = (sums / ctx.count).chunk(2)
            slope = given - _column(sum_given, data) - normalized * _column(sum_products, data)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            for_input = (slope * _column(factor, data)).to(input.dtype)
        has_weight, has_bias = ctx.needs_input_grad[1:3]
        return (
            for_input,
            for_weight.to(weight.dtype) if has_weight else None,
            for_bias.to(mean.dtype if weight is None else weight.dtype) if has_bias else None,
            None,
            None,
            None,
            None,
        )
