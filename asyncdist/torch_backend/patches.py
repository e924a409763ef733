"""Everything in torch that we replace, and why.

What is only added to torch is where it is made: the back end in `registration`, operators in `kernels`, an init method in
`init_method`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from asyncdist.torch_backend import bucket_memory, held_references
from asyncdist.torch_backend.process_group import ProcessGroup

_bindings: Any = torch._C._distributed_c10d

Instead = Callable[..., Any]
"""What is called instead of something in torch: with that, and the arguments."""


def for_our_groups(group_of: Callable[..., Any], ours: Callable[..., Any]) -> Instead:
    """Return what calls ``ours`` where ``group_of`` finds a group of ours in the arguments, and torch's otherwise."""

    def instead(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = ours if isinstance(group_of(*args, **kwargs), ProcessGroup) else theirs
        return call(*args, **kwargs)

    return instead


def _group_or_world(group: Any = None, *_: Any, **others: Any) -> Any:
    return torch_distributed.group.WORLD if group is None else group


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    _group_or_world(group).monitored_barrier(timeout, wait_all_ranks)


def _group_of_model(model: Any, comm_hook_type: Any) -> Any:
    return model.process_group


def _register_twin(model: Any, comm_hook_type: Any) -> None:
    """Have a model's buckets averaged as ``comm_hook_type`` says, in whole or as float16, with the same arithmetic."""
    # Only now: with them come all the hooks that torch has, which hardly a program uses.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    types = _bindings.BuiltinCommHookType
    twin = {types.ALLREDUCE: default_hooks.allreduce_hook, types.FP16_COMPRESS: default_hooks.fp16_compress_hook}
    model.logger._set_comm_hook_name(str(comm_hook_type))
    _bindings._register_comm_hook(model.reducer, model.process_group, twin[comm_hook_type])


def _itself(group: Any) -> Any:
    return group


_barrier = for_our_groups(_group_or_world, _monitored_barrier)
_hook = for_our_groups(_group_of_model, _register_twin)
_ends = {
    "_shutdown_backend": for_our_groups(_itself, ProcessGroup.shutdown),
    "_abort_backend": for_our_groups(_itself, ProcessGroup.abort),
}

_REPLACED: list[tuple[Any, str, Instead]] = [
    # Lets through no groups but gloo's.
    (torch_distributed, "monitored_barrier", _barrier),
    (distributed_c10d, "monitored_barrier", _barrier),
    # These hooks are written in C++, and read the futures of C++ back ends only; torch has both in Python too.
    (DistributedDataParallel, "_register_builtin_comm_hook", _hook),
    # Keeps the C++ half of a Work only.
    (_bindings.Reducer, "_set_forward_pass_work_handle", held_references.set_forward_pass_work_handle),
    # Make buckets in ordinary memory, unless the back end is written in C++.
    (_bindings.Reducer, "__init__", bucket_memory.make_reducer),
    (_bindings.Reducer, "_rebuild_buckets", bucket_memory.rebuild_buckets),
    # End NCCL's groups only, and forget the others. Of torch 2.6: later releases call the group itself.
    *((distributed_c10d, name, end) for name, end in _ends.items() if hasattr(distributed_c10d, name)),
]


@functools.cache
def apply_patches() -> None:
    """Replace it all. Idempotent."""
    for owner, name, instead in _REPLACED:
        theirs = getattr(owner, name)
        setattr(owner, name, functools.wraps(theirs)(_calls(instead, theirs)))


def _calls(instead: Instead, theirs: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: instead(theirs, *args, **kwargs)
