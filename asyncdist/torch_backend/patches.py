"""Every function of torch that this package replaces, with the reason. Without this back end it replaces none.

`torch_backend` applies them when it is imported. A program without it may save a model in a checkpoint of torch, so
`asyncdist.ddp.torch_class.names` sets a name there when torch first meets a wrapped model. Additions to
torch are elsewhere: the back end in `registration`, operators in `kernels`, the init method in `rendezvous`.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as torch_distributed
from torch.nn.parallel import DistributedDataParallel

from asyncdist.base.callables import AnyFunction
from asyncdist.kernel import c10d_private, torch_private
from asyncdist.torch_backend import bucket_memory, callback_order
from asyncdist.torch_backend.process_group import ObservedProcessGroup, ProcessGroup, group_of
from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS

Replacement = AnyFunction
"""Called with the replaced function of torch and with its arguments."""


def _monitored_barrier(
    original: AnyFunction, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    process_group = torch_distributed.group.WORLD if group is None else group
    if isinstance(process_group, ProcessGroup):
        process_group.monitored_barrier(timeout, wait_all_ranks)
    else:
        original(group, timeout, wait_all_ranks)


def _register_builtin_comm_hook(original: AnyFunction, model: Any, comm_hook_type: Any) -> None:
    """Register torch's Python version of a built-in communication hook (all-reduce, or compression to float16)."""
    if group_of(model.process_group, model.device) is None:
        original(model, comm_hook_type)
        return
    # Imported late: the module imports every hook of torch.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    types = c10d_private.BuiltinCommHookType
    hooks = {types.ALLREDUCE: default_hooks.allreduce_hook, types.FP16_COMPRESS: default_hooks.fp16_compress_hook}
    model.logger._set_comm_hook_name(str(comm_hook_type))
    c10d_private.register_comm_hook(model.reducer, model.process_group, hooks[comm_hook_type])


_work_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _set_forward_pass_work_handle(original: Any, reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """Give DDP's reducer the all-reduce of a step inside ``join()``, and keep it until the next step.

    The reducer waits for the work in the backward pass, then reads its future. The Python half of a Work makes both
    calls possible.
    """
    _work_of[reducer] = work
    original(reducer, work, use_static_world_size)


def _attach(original: AnyFunction, process_group: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(process_group, ProcessGroup):
        process_group.__class__ = ObservedProcessGroup
    return original(process_group, *args, **kwargs)


def _create_shrunk_process_group(
    original: Any, made: Any, remaining_ranks: Any, metadata: Any, is_default_group: bool
) -> Any:
    """Let ``shrink_group`` return the process group that `ProcessGroup.shrink` has made."""
    if not isinstance(made, ProcessGroup):
        return original(made, remaining_ranks, metadata, is_default_group)
    made._set_group_name(metadata["new_group_name"])
    made._set_group_desc("default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk")
    return made


REPLACEMENTS: list[tuple[Any, str, Replacement]] = [
    # torch's built-in hooks are written in C++ and read only futures that C++ code has made.
    (DistributedDataParallel, "_register_builtin_comm_hook", _register_builtin_comm_hook),
    # Keeps only the C++ half of a Work.
    (c10d_private.Reducer, "_set_forward_pass_work_handle", _set_forward_pass_work_handle),
    # Allocate buckets in ordinary memory, unless the back end is written in C++.
    (c10d_private.Reducer, "__init__", bucket_memory.make_reducer),
    (c10d_private.Reducer, "_rebuild_buckets", bucket_memory.rebuild_buckets),
    # Run a callback in the thread that completes the future, or that attaches it, at any time.
    (torch_private.AnyFuture, "then", callback_order.attach),
    (torch_private.AnyFuture, "add_done_callback", callback_order.attach),
    # The same for works together.
    (torch.futures, "collect_all", callback_order.collect_all),
    # Has no limit, also in a callback for which that what it waits for waits.
    (torch_private.AnyFuture, "wait", callback_order.wait),
    # Makes a process group in C++ around a back end in C++.
    (c10d_private.distributed_c10d, "_create_shrunk_process_group", _create_shrunk_process_group),
]
# They register their hooks in C++, without the method of the process group that lets hooks see its operations.
REPLACEMENTS += [
    (hook, "attach", _attach)
    for hook in (c10d_private.FlightRecorderHook, c10d_private.NanCheckHook)
    if hook is not None
]
if not HAS_PYTHON_BACKENDS:
    # Accepts only gloo's groups.
    REPLACEMENTS += [
        (owner, "monitored_barrier", _monitored_barrier) for owner in (torch_distributed, c10d_private.distributed_c10d)
    ]


@functools.cache
def apply_patches() -> None:
    """Install all replacements. Idempotent."""
    for owner, name, replacement in REPLACEMENTS:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(_bound(replacement, original)))


def _bound(replacement: Replacement, original: AnyFunction) -> AnyFunction:
    # Unlike a functools.partial, a function becomes a method when it is called on an instance.
    return lambda *args, **kwargs: replacement(original, *args, **kwargs)
