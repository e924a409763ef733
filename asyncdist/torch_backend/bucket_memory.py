"""Memory of stock DDP's buckets: registered, where the ranks share memory, so that their all-reduces stage nothing.

torch's reducer makes its buckets in C++ with ``at::empty``: when it is made, and when it deals the parameters anew in the
order in which their gradients came. A back end written in C++ may offer it memory (``Backend::allocateTensor``), one in
Python may not. So while it is at that, we answer for ``empty`` in its thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncdist.errors import SharedMemoryError
from asyncdist.memory import registered
from asyncdist.torch_backend.process_group import ProcessGroup

LEAST_NBYTES = 32 << 10
"""Smaller tensors are not worth pages of their own; small messages are staged wherever they lie."""

_EMPTY = torch.ops.aten.empty.memory_format
_to_be_rebuilt: WeakSet[Any] = WeakSet()


class _Registered(TorchDispatchMode):
    """While this is entered, large flat tensors that are made on the processor lie in registered memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is _EMPTY:
            tensor = _registered(*args, **kwargs or {})
            if tensor is not None:
                return tensor
        return function(*args, **kwargs or {})


def _registered(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    layout: torch.layout | None = None,  # torch 2.15 says which, others do not
    **others: Any,
) -> torch.Tensor | None:
    """Return a registered tensor if one of this kind can be, and there is room; else None."""
    if layout not in (None, torch.strided):
        return None
    if len(size) != 1 or dtype is None or device is None or device.type != "cpu" or any(others.values()):
        return None
    if size[0] * dtype.itemsize < LEAST_NBYTES:
        return None
    try:
        return registered.empty(size[0], dtype=dtype)
    except SharedMemoryError:  # slower is better than not at all
        return None


def make_reducer(theirs: Any, reducer: Any, *args: Any, **kwargs: Any) -> None:
    """Make a reducer of DDP, and with it its first buckets."""
    group = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, ProcessGroup)), None)
    if group is None or not group.group.shares_memory:
        theirs(reducer, *args, **kwargs)
        return
    with _Registered():
        theirs(reducer, *args, **kwargs)
    _to_be_rebuilt.add(reducer)


def rebuild_buckets(theirs: Any, reducer: Any) -> bool:
    """Deal the parameters anew if it is time to, which it is once; return whether that was done.

    For a reducer that looks for unused parameters it never is, and every forward asks: 3 µs, which its step does not feel.
    """
    if reducer not in _to_be_rebuilt:
        return bool(theirs(reducer))
    with _Registered():
        done = bool(theirs(reducer))
    if done:
        _to_be_rebuilt.discard(reducer)
    return done
