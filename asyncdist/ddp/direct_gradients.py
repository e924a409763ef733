"""Linear layers whose backward writes the weight's gradient directly into its bucket.

Autograd writes a weight's gradient into new memory, from which DDP copies it into its bucket: as many bytes again as the
model has, out of cold memory. The `Linear` of this module computes the same product straight into the bucket, and
autograd adopts that tensor as ``grad``. Megatron-LM does the same on GPUs ("gradient accumulation fusion").

These cases use torch's own path and a copy: autocast, compiled or traced programs, tensor subclasses, functorch, second
derivatives, accumulated gradients, weights that are used twice, and hooks that see a gradient and may keep it. Hooks on
autograd nodes and post-accumulation hooks cannot be detected; they must copy a gradient that they keep.
"""

from __future__ import annotations

import copyreg
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import linear

from asyncdist.ddp.reducer import Reducer

LEAST_NBYTES = 256 << 10
"""Copying a smaller weight's gradient takes less time than the Python code of this module."""


class Linear(nn.Linear):
    """A linear layer that writes its weight's gradient into a bucket. Its copies and pickles are plain `nn.Linear`."""

    # TorchScript reads annotations and cannot resolve this one.
    if TYPE_CHECKING:
        _reducer: weakref.ref[Reducer]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the same as `nn.Linear.forward`."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return linear(input, self.weight, self.bias)
        else:
            return self._product(input)

    @torch.jit.unused
    def _product(self, data: torch.Tensor) -> torch.Tensor:
        # Backward hooks that are not "full" see every gradient of the operation.
        hooked = self._backward_hooks and not self._is_full_backward_hook
        if hooked or torch.compiler.is_compiling() or not _is_ordinary(data, self.weight):
            return linear(data, self.weight, self.bias)
        rows = data.flatten(0, -2)
        result: torch.Tensor = _Product.apply(rows, self.weight, self.bias, self._reducer)  # type: ignore[no-untyped-call]
        # Not a view, because the caller may change the result in place.
        return result if rows is data else torch.ops.aten._unsafe_view(result, (*data.shape[:-1], self.out_features))

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != "_reducer"}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


def adopt(module: nn.Module, reducer: Reducer) -> None:
    """Make ``module``'s linear layers write their gradients into buckets of ``reducer``, which they reference weakly."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and _is_replaceable(layer):
            layer.__class__ = Linear
            vars(layer)["_reducer"] = weakref.ref(reducer)


def _is_replaceable(layer: nn.Linear) -> bool:
    # A class derived by the user, or a replaced `forward`, computes something else.
    is_plain = type(layer) in (nn.Linear, Linear) and "forward" not in vars(layer)
    return is_plain and layer.weight.requires_grad and layer.weight.nbytes >= LEAST_NBYTES


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
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
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
    if reducer is None or hooked or torch.is_grad_enabled() or not _accumulates(ctx.next_functions[1][0]):
        return None
    memory: torch.Tensor | None = reducer.bucket_memory(ctx.parameter)
    return memory


def _accumulates(node: Any) -> bool:
    """Return whether this backward accumulates a node's gradient into ``grad``, as `torch.autograd.grad` does not."""
    # torch raises RuntimeError for leaves inside `torch.autograd.grad`.
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False
