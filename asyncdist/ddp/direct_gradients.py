"""Gradients of linear layers, written by backward where they will be averaged: into their buckets.

Autograd has a weight's gradient written into new memory, from where it would be copied into its bucket: as many bytes again
as the model has, out of memory that is cold by then. A `Linear` of ours computes as torch's does, but has the product that
is its weight's gradient written into the bucket at once. Autograd then takes over what it is given. (Megatron-LM does the
same on GPUs, as "gradient accumulation fusion".)

What is not quite ordinary goes torch's way, and is copied: autocast, compiled or traced programs, tensor subclasses,
functorch, second derivatives, gradients that accumulate, weights that are used twice, hooks that are shown a gradient and
may keep it. Hooks of autograd's own nodes, and those after the accumulation, cannot be told: let them copy what they keep.
"""

from __future__ import annotations

import copyreg
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import linear

LEAST_NBYTES = 256 << 10
"""Smaller weights are copied in less time than our way through Python takes."""


class Places(Protocol):
    """Who knows where gradients are to be."""

    def place(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return where a parameter's gradient may be written now, None if nowhere."""


class Linear(nn.Linear):
    """A linear layer that asks `Places` where to write its weight's gradient. Copies and pickles of it are torch's."""

    if TYPE_CHECKING:  # TorchScript reads annotations, and does not know this one
        _places: weakref.ref[Places]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return what torch's layer returns."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return linear(input, self.weight, self.bias)
        else:
            return self._product(input)

    @torch.jit.unused
    def _product(self, data: torch.Tensor) -> torch.Tensor:
        shown = self._backward_hooks and not self._is_full_backward_hook  # these see all gradients of an operation
        if shown or torch.compiler.is_compiling() or not _is_ordinary(data, self.weight):
            return linear(data, self.weight, self.bias)
        rows = data.flatten(0, -2)
        result: torch.Tensor = _Product.apply(rows, self.weight, self.bias, self._places)  # type: ignore[no-untyped-call]
        # Not a view: what follows may change it in place.
        return result if rows is data else torch.ops.aten._unsafe_view(result, (*data.shape[:-1], self.out_features))

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != "_places"}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


def adopt(module: nn.Module, places: Places) -> None:
    """Have ``module``'s linear layers ask ``places``, which is not kept alive."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and _is_worth_it(layer):
            layer.__class__ = Linear
            vars(layer)["_places"] = weakref.ref(places)


def _is_worth_it(layer: nn.Linear) -> bool:
    is_torchs = type(layer) in (nn.Linear, Linear) and "forward" not in vars(layer)
    return is_torchs and layer.weight.requires_grad and layer.weight.nbytes >= LEAST_NBYTES


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
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, places: weakref.ref[Places]
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.parameter, ctx.places = weight, places  # what was saved may come back as another tensor
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad[:3]
        return (
            gradient @ weight if for_rows else None,
            _of_weight(gradient.t(), rows, _place(ctx)) if for_weight else None,
            gradient.sum(0) if for_bias else None,
            None,
        )


def _of_weight(columns: torch.Tensor, rows: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    return columns @ rows if place is None else torch.mm(columns, rows, out=place)


def _place(ctx: Any) -> torch.Tensor | None:
    """Return where to write the weight's gradient: nowhere if it has derivatives, does not go to ``grad``, or is shown."""
    places, shown = ctx.places(), ctx.parameter._backward_hooks
    if places is None or shown or torch.is_grad_enabled() or not _accumulates(ctx.next_functions[1][0]):
        return None
    place: torch.Tensor | None = places.place(ctx.parameter)
    return place


def _accumulates(node: Any) -> bool:
    """Return whether this backward adds to ``grad`` what reaches a node; `torch.autograd.grad` takes it away instead."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # so it says of leaves in `torch.autograd.grad`
        return False
