"""The private names of torch that this package uses, without those of torch.distributed, which `c10d_private` holds.

These two modules and `asyncdist.torch_backend.patches` list what may break with the next torch: no other module names
private parts of torch, but for the attributes of its objects in `ATTRIBUTES`. Every name is in torch 2.13 to 2.15. The
comments say why no public name serves. `tests/torch_backend/test_private_names.py` looks every name up in the installed
torch; ``make test-next-torch`` runs it with the newest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.autograd.profiler
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_item: Any = operator.getitem

# -- autograd ---------------------------------------------------------------------------------------

# Runs a function when the backward ends; torch's DDP does the same.
queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
# Negative outside a backward: tells a checkpoint's repeated forward from the first one.
current_graph_task_id = torch._C._current_graph_task_id
# Tells gradients that are accumulated from those that `torch.autograd.grad` returns.
will_execute_node = torch._C._will_engine_execute_node
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# Not None inside a checkpoint and in `saved_tensors_hooks`.
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
# `torch.autograd.graph.increment_version` takes twice the time, because it checks the type of its argument.
increment_version: Callable[[Any], None] = torch._C._increment_version
# Lets a hook change buffers between a forward and its backward.
preserve_versions = torch.autograd.grad_mode._unsafe_preserve_version_counter
# Unlike `view`, it returns what the caller may change in place.
unsafe_view: Any = torch.ops.aten._unsafe_view
# One call for all tensors of a bucket.
foreach_copy = torch._foreach_copy_
# Negative outside forward-mode AD. Read for each call, so without a frame of Python.
forward_ad_level: Callable[[], int] = functools.partial(_item, vars(torch.autograd.forward_ad), "_current_level")

# -- modes and transforms ---------------------------------------------------------------------------

# How many dispatch modes are on, and which transform of torch.func: asked for each call.
count_dispatch_modes = torch._C._len_torch_dispatch_stack
innermost_transform = torch._C._functorch.peek_interpreter_stack
are_transforms_active = torch._C._are_functorch_transforms_active
is_transform_wrapper = torch._C._functorch.is_functorch_wrapped_tensor
# Contexts that leave them.
LEAVING_GUARDS: tuple[Any, ...] = (
    torch._C._DisableTorchDispatch, torch._C._DisableFuncTorch, torch._C.DisableTorchFunction,
)  # fmt: skip

# -- torch.compile and the profiler -----------------------------------------------------------------

# Exclude a function from the compiler; `torch.compiler.disable` would import the whole compiler.
compiled_frames: Any = torch._C._dynamo.eval_frame
FrameAction, FrameExecStrategy = compiled_frames._FrameAction, compiled_frames._FrameExecStrategy
# A span that may end on another thread; `record_function` is a context of one thread.
enter_span: Any = torch.ops.profiler._record_function_enter_new
exit_span: Any = torch.ops.profiler._record_function_exit._RecordFunction
is_profiler_enabled: Callable[[], bool] = functools.partial(
    _item, vars(torch.autograd.profiler), "_is_profiler_enabled"
)

# -- further classes and functions ------------------------------------------------------------------

# The class of the futures that `then` and `collect_all` return, from which `torch.futures.Future` derives.
AnyFuture: Any = torch._C.Future
# The handle as a number, without an object; builds without CUDA lack it.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)

# Whether another object shares the memory of a tensor.
storage_use_count: Any = torch._C._storage_Use_Count

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    # Whether hooks see a gradient.
    "torch.nn.Module": ("_backward_hooks", "_is_full_backward_hook"),
    # Hooks of a leaf, in their order; whether it has memory; elements of a sparse tensor without coalescing it.
    "torch.Tensor": ("_backward_hooks", "_is_zerotensor", "_use_count", "_nnz", "_post_accumulate_grad_hooks"),
    "torch.UntypedStorage": ("_cdata",),
    # Written for torch: the compiler reads why it may not inline a function.
    "torch._dynamo.decorators": ("_torchdynamo_disable", "_torchdynamo_disable_msg"),
}
"""Private attributes of torch's objects that other modules read or write: by class, or by the module that reads them."""

__all__ = ["BatchNorm", "TorchDispatchMode", "pytree"]
