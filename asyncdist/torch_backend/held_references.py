"""Works that Python hands to torch's C++ code, which keeps their C++ half only: here the half with the methods is kept.

Where C++ calls our group itself it keeps both. Without the Python half its ``wait`` would never return.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from asyncdist.torch_backend.torch_work import Work

_c10d: Any = torch._C._distributed_c10d
_of_reducer: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def wait_tensor_waits_for(tensor: torch.Tensor, work: Any) -> None:
    """Have the next ``wait_tensor`` of ``tensor`` wait for ``work``, of whatever back end."""
    _c10d._register_work(tensor, work.held() if isinstance(work, Work) else work)


def set_forward_pass_work_handle(theirs: Any, reducer: Any, work: Any, use_static_world_size: bool) -> None:
    """Hand DDP's reducer the all-reduce of a joined step: it waits for it in the backward pass, then takes its future."""
    _of_reducer[reducer] = work
    theirs(reducer, work, use_static_world_size)
