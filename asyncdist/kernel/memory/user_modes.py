"""Leaves the modes and transforms of the user's code, so that they do not see this package's own tensor work.

A dispatch mode sees, and may replace, every operation on tensors in its thread: under ``FakeTensorMode`` a view of staging
memory would have no memory. A transform of ``torch.func`` wraps the results of operations. Groups leave both when a call
starts, and the engine in each turn, because the thread that waits for one operation also drives all others.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch.autograd.forward_ad import unpack_dual

from asyncdist.kernel.torch_private import (
    LEAVING_GUARDS,
    count_dispatch_modes,
    forward_ad_level,
    innermost_transform,
    is_transform_wrapper,
)


def leave_user_modes() -> ExitStack | None:
    """Leave the modes and transforms of the calling thread until the returned stack is closed; None if there are none.

    In forward mode AD, in which tensors may have tangents, it returns a stack too.
    """
    if not count_dispatch_modes() and forward_ad_level() < 0 and innermost_transform() is None:
        return None
    left = ExitStack()
    for guard in LEAVING_GUARDS:
        left.enter_context(guard())
    return left


def _lacks_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that has elements has no memory of its own."""
    try:
        # Asked first, because data_ptr() of a FakeTensor warns.
        return tensor.numel() > 0 and (tensor.untyped_storage().device.type == "meta" or not tensor.data_ptr())
    # A wrapper of torch.func, or of a subclass, has no storage.
    except RuntimeError:
        return True


def why_not_communicated(tensor: torch.Tensor) -> str | None:
    """Return why a tensor on the host or a CUDA device cannot be communicated, and what to do; None if it can."""
    if forward_ad_level() >= 0 and not is_transform_wrapper(tensor) and unpack_dual(tensor).tangent is not None:
        return (
            "a dual tensor of forward-mode AD cannot be communicated, because its tangent would keep its value: pass "
            "torch.autograd.forward_ad.unpack_dual(tensor).primal and tangent one after the other"
        )
    if not _lacks_memory(tensor):
        return None
    if is_transform_wrapper(tensor):
        return (
            "a tensor inside a transform of torch.func (grad, jvp, vmap, functionalize) cannot be communicated: call the "
            "operation outside of the transform"
        )
    if tensor._is_zerotensor():
        return "a tensor of torch._efficientzerotensor has no memory: pass torch.zeros_like(tensor)"
    if type(tensor) is torch.Tensor:
        return "the storage of this tensor has been freed or resized to 0 bytes: restore it before the call"
    name = type(tensor).__name__
    if name == "FakeTensor":
        return "a FakeTensor has no memory: pass a tensor that was made outside of FakeTensorMode"
    inner = "the tensor in it, which to_local() and full_tensor() of a DTensor return"
    return f"a {name} has no memory of its own: pass {inner}"
