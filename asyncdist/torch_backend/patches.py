"""Every function of torch that this package replaces, with the reason.

`torch_backend` applies them when it is imported. Additions to torch are elsewhere: the back end in
`registration`, operators in `kernels`, the init method in `url_handler`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from asyncdist.torch_backend import bucket_memory
from asyncdist.torch_backend.process_group import ProcessGroup

_bindings: Any = torch._C._distributed_c10d

Replacement = Callable[..., Any]
"""Called with the replaced function of torch and with its arguments."""


def _monitored_barrier(
    original: Callable[..., Any], group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    process_group = torch_distributed.group.WORLD if group is None else group
    if isinstance(process_group, ProcessGroup):
        process_group.monitored_barrier(timeout, wait_all_ranks)
    else:
        original(group, timeout, wait_all_ranks)


def _register_builtin_comm_hook(original: Callable[..., Any], model: Any, comm_hook_type: Any) -> None:
    """Register torch's Python version of a built-in communication hook (all-reduce, or compression to float16)."""
    if not isinstance(model.process_group, ProcessGroup):
        original(model, comm_hook_type)
        return
    # Imported late: the module imports every hook of torch.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    types = _bindings.BuiltinCommHookType
    hooks = {types.ALLREDUCE: default_hooks.allreduce_hook, types.FP16_COMPRESS: default_hooks.fp16_compress_hook}
    model.logger._set_comm_hook_name(str(comm_hook_type))
    _bindings._register_comm_hook(model.reducer, model.process_group, hooks[comm_hook_type])


_work_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _set_forward_pass_work_handle(original: Any, reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """Give DDP's reducer the all-reduce of a step inside ``join()``, and keep it until the next step.

    The reducer waits for the work in the backward pass, then reads its future. The Python half of a Work makes both
    calls possible.
    """
    _work_of[reducer] = work
    original(reducer, work, use_static_world_size)


_REPLACEMENTS: list[tuple[Any, str, Replacement]] = [
    # Accepts only gloo's groups.
    (torch_distributed, "monitored_barrier", _monitored_barrier),
    (distributed_c10d, "monitored_barrier", _monitored_barrier),
    # torch's built-in hooks are written in C++ and read only futures of C++ back ends.
    (DistributedDataParallel, "_register_builtin_comm_hook", _register_builtin_comm_hook),
    # Keeps only the C++ half of a Work.
    (_bindings.Reducer, "_set_forward_pass_work_handle", _set_forward_pass_work_handle),
    # Allocate buckets in ordinary memory, unless the back end is written in C++.
    (_bindings.Reducer, "__init__", bucket_memory.make_reducer),
    (_bindings.Reducer, "_rebuild_buckets", bucket_memory.rebuild_buckets),
]


@functools.cache
def apply_patches() -> None:
    """Install all replacements. Idempotent."""
    for owner, name, replacement in _REPLACEMENTS:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(_bound(replacement, original)))


def _bound(replacement: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
    # Unlike a functools.partial, a function becomes a method when it is called on an instance.
    return lambda *args, **kwargs: replacement(original, *args, **kwargs)
