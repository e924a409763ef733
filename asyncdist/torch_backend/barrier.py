"""``torch.distributed.monitored_barrier`` for our groups: torch lets only those of gloo through."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as torch_distributed
import torch.distributed.distributed_c10d as c10d

from asyncdist.torch_backend.process_group import ProcessGroup

_theirs: Any = c10d.monitored_barrier


@functools.wraps(_theirs)
def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    of = torch_distributed.group.WORLD if group is None else group
    if isinstance(of, ProcessGroup):
        of.monitored_barrier(timeout, wait_all_ranks)
    else:
        _theirs(group, timeout, wait_all_ranks)


def register() -> None:
    """Put ours in the place of torch's, which it calls for groups that are not ours. Idempotent."""
    torch_distributed.monitored_barrier = c10d.monitored_barrier = monitored_barrier
