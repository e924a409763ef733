"""Linear layers whose backward writes the weight's gradient directly into its bucket.

Autograd writes a weight's gradient into new memory, from which DDP copies it into its bucket: as many bytes again as the
model has, out of cold memory. The autograd function of this module computes the same product straight into the bucket,
and autograd adopts that tensor as ``grad``. Megatron-LM does the same on GPUs ("gradient accumulation fusion").

While the wrapper's forward runs, large `torch.nn.Linear` layers have an attribute ``forward`` that calls this function.
Before and after, the user's module has neither an attribute nor a hook of this module, and its classes never change.

These cases use torch's own path and a copy: autocast, checkpointed layers, compiled or traced programs, tensor
subclasses, functorch, second derivatives, accumulated gradients, weights that are used twice, layers whose ``forward``
the user has replaced, and hooks that see a gradient and may keep it. Hooks on autograd nodes and post-accumulation hooks
cannot be detected; they must copy a gradient that they keep.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from asyncdist.ddp.backward.graph import accumulates
from asyncdist.ddp.reducer import Reducer
from asyncdist.kernel import torch_private

LEAST_NBYTES = 256 << 10
"""Copying a smaller weight's gradient takes less time than the Python code of this module."""


class DirectGradients:
    """A context in which ``module``'s large linear layers compute gradients in buckets of ``reducer``."""

    def __init__(self, module: nn.Module, reducer: Reducer) -> None:
        self._layers: list[tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]] = [
            (layer, functools.partial(_forward, layer, weakref.ref(reducer)))
            for layer in module.modules()
            if type(layer) is nn.Linear and layer.weight.requires_grad and layer.weight.nbytes >= LEAST_NBYTES
        ]

    def __enter__(self) -> None:
        if not self._layers or not _is_torchs_own(nn.Linear.forward):
            return
        for layer, forward in self._layers:
            attributes = vars(layer)
            if type(layer) is nn.Linear and "forward" not in attributes:
                attributes["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for layer, forward in self._layers:
            attributes = vars(layer)
            if attributes.get("forward") is forward:
                del attributes["forward"]


def _is_torchs_own(forward: Any) -> bool:
    """Return whether no library has replaced the method of `torch.nn.Linear`."""
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_filename == nn.modules.linear.__file__


def _forward(layer: nn.Linear, reducer: weakref.ref[Reducer], input: torch.Tensor) -> torch.Tensor:
    """Return the same as `nn.Linear.forward`."""
    weight, bias = layer.weight, layer.bias
    # Backward hooks that are not "full" see every gradient of the operation.
    hooked = layer._backward_hooks and not layer._is_full_backward_hook
    if hooked or torch.compiler.is_compiling() or not _is_ordinary(input, weight):
        return linear(input, weight, bias)
    rows = input.flatten(0, -2)
    result: torch.Tensor = _Product.apply(rows, weight, bias, reducer)  # type: ignore[no-untyped-call]
    # Not a view, because the caller may change the result in place.
    return result if rows is input else torch_private.unsafe_view(result, (*input.shape[:-1], layer.out_features))


def _is_ordinary(data: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        type(data) is torch.Tensor
        and type(weight) is nn.Parameter
        and torch.is_grad_enabled()
        and weight.requires_grad
        and data.dim() > 1
        and data.dtype is weight.dtype
        and not data.is_meta
        and not torch.is_autocast_enabled(data.device.type)
        and not torch_private.are_transforms_active()
        and torch_private.forward_ad_level() < 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        # A checkpoint repeats this forward later, outside the wrapper's, and must save the same tensors again.
        and torch_private.top_saved_tensors_hooks(False) is None
    )


class _Product(torch.autograd.Function):
    """`torch.nn.functional.linear` of rows, and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reducer: weakref.ref[Reducer]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        # The parameter itself too: a saved tensor may be unpacked as another object.
        ctx.parameter, ctx.reducer = weight, reducer
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        return (
            gradient @ weight if for_rows else None,
            torch.mm(gradient.t(), rows, out=_bucket_memory(ctx)) if for_weight else None,
            gradient.sum(0) if for_bias else None,
            None,
        )


def _bucket_memory(ctx: Any) -> torch.Tensor | None:
    """Return where to write the weight's gradient; None if it is differentiated, not accumulated, or seen by hooks."""
    reducer, hooked = ctx.reducer(), ctx.parameter._backward_hooks
    if reducer is None or hooked or torch.is_grad_enabled() or not accumulates(ctx.next_functions[1][0]):
        return None
    memory: torch.Tensor | None = reducer.bucket_memory(ctx.parameter)
    return memory
