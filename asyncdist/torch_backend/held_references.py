"""Keep the Python half of a `Work` alive while torch's C++ code holds only its C++ half.

That happens where Python code hands a Work to C++; where C++ calls the process group, it keeps both halves. Without the
Python half ``wait`` would never return.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from asyncdist.torch_backend.torch_work import Work

_c10d: Any = torch._C._distributed_c10d
_of_reducer: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def wait_tensor_waits_for(tensor: torch.Tensor, work: Any) -> None:
    """Register ``work``, of any back end, as the operation that ``wait_tensor(tensor)`` waits for."""
    _c10d._register_work(tensor, work.held() if isinstance(work, Work) else work)


def set_forward_pass_work_handle(theirs: Any, reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """Give DDP's reducer the all-reduce of a step inside ``join()``, and keep it until the next step.

    The reducer waits for the work in the backward pass, then reads its future.
    """
    _of_reducer[reducer] = work
    theirs(reducer, work, use_static_world_size)
