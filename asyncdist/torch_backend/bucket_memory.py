"""Registered memory for the buckets of torch's DDP, so that all-reduces over shared memory need no staging copy.

torch's reducer allocates its buckets in C++ with ``at::empty``: at construction, and when it rebuilds the buckets in the
order in which gradients arrived. A C++ back end can provide that memory (``Backend::allocateTensor``). A Python back end
cannot, also with torch 2.15, which fails to convert the arguments of that call. `patches` therefore replaces both functions
of the reducer, and a dispatch mode intercepts ``empty`` while they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as torch_distributed

from asyncdist.errors import SharedMemoryError
from asyncdist.kernel.memory import registered
from asyncdist.kernel.torch_private import TorchDispatchMode
from asyncdist.torch_backend.process_group import group_of

LEAST_NBYTES = 32 << 10
"""Smaller tensors stay in ordinary memory: small messages are staged in any case."""

_EMPTY = torch.ops.aten.empty.memory_format
_to_be_rebuilt: WeakSet[Any] = WeakSet()


class _RegisteredAllocation(TorchDispatchMode):
    """While active, allocates large one-dimensional CPU tensors in registered memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is _EMPTY:
            tensor = _registered_empty(*args, **kwargs or {})
            if tensor is not None:
                return tensor
        return function(*args, **kwargs or {})


def _registered_empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    layout: torch.layout | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return a registered tensor, or None if the request does not qualify or registered memory is full."""
    # torch 2.15 passes a layout, torch 2.13 does not.
    if layout not in (None, torch.strided):
        return None
    if len(size) != 1 or dtype is None or device is None or device.type != "cpu" or any(options.values()):
        return None
    if size[0] * dtype.itemsize < LEAST_NBYTES:
        return None
    try:
        return registered.empty(size[0], dtype=dtype)
    except SharedMemoryError:
        return None


def make_reducer(original: Any, reducer: Any, *args: Any, **kwargs: Any) -> None:
    """Construct DDP's reducer, which allocates its first buckets. ``original`` is torch's constructor."""
    groups = (group_of(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, torch_distributed.ProcessGroup))
    group = next(groups, None)
    if group is None or not group.shares_memory:
        original(reducer, *args, **kwargs)
        return
    with _RegisteredAllocation():
        original(reducer, *args, **kwargs)
    _to_be_rebuilt.add(reducer)


def rebuild_buckets(original: Any, reducer: Any) -> bool:
    """Rebuild the buckets, which torch does once; return whether it did. Every forward calls it.

    A reducer that looks for unused parameters never rebuilds. The extra 3 µs in each of its forwards are negligible.
    """
    if reducer not in _to_be_rebuilt:
        return bool(original(reducer))
    with _RegisteredAllocation():
        done = bool(original(reducer))
    if done:
        _to_be_rebuilt.discard(reducer)
    return done
