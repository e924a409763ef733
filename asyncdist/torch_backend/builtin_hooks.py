"""Stock DDP's hooks that are written in C++: they read the futures of C++ back ends only, so our groups get their twins.

torch has both of them in Python as well, with the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from asyncdist.torch_backend.process_group import ProcessGroup

_c10d: Any = torch._C._distributed_c10d
_model: Any = DistributedDataParallel
_theirs: Any = _model._register_builtin_comm_hook


def _register_builtin_comm_hook(model: Any, comm_hook_type: Any) -> None:
    """Have a model's buckets averaged as ``comm_hook_type`` says: in whole, or as float16."""
    if not isinstance(model.process_group, ProcessGroup):
        _theirs(model, comm_hook_type)
        return
    # Only now: with them come all the hooks that torch has, which hardly a program uses.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    types = _c10d.BuiltinCommHookType
    twin = {types.ALLREDUCE: default_hooks.allreduce_hook, types.FP16_COMPRESS: default_hooks.fp16_compress_hook}
    model.logger._set_comm_hook_name(str(comm_hook_type))
    _c10d._register_comm_hook(model.reducer, model.process_group, twin[comm_hook_type])


def register() -> None:
    """Put ours in the place of DDP's method. Idempotent."""
    _model._register_builtin_comm_hook = _register_builtin_comm_hook
