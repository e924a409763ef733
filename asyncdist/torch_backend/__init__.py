"""A back end of torch.distributed: stock PyTorch code runs on our groups, unchanged.

    import asyncdist.torch_backend
    torch.distributed.init_process_group("asyncdist")

DDP, FSDP2, DTensor, DeviceMesh, tensor and pipeline parallel, checkpointing, functional collectives and `torch.compile`
then use shared memory between the ranks of a host and TCP between hosts. An asynchronous operation may be awaited:
``await torch.distributed.all_reduce(tensor, async_op=True)``.

Read in this order: `process_group` (torch's methods, and what they are here), `work` (what they return), `reductions`,
`making` (how a group comes about), `kernels` (two operators that torch's own code cannot bring to us), `handing` (what
C++ would forget), `bucket_memory` and `lending` (where buckets lie), `builtin_hooks`, `barrier`, `ending`,
`store`, `init_method` and `torchrun` (how a job finds a store daemon).
"""

from asyncdist.torch_backend import (
    barrier,
    bucket_memory,
    builtin_hooks,
    ending,
    handing,
    init_method,
    kernels,
    making,
)
from asyncdist.torch_backend.process_group import ProcessGroup
from asyncdist.torch_backend.store import Store
from asyncdist.torch_backend.work import Work

__all__ = ["ProcessGroup", "Store", "Work"]

making.register()
kernels.register()
handing.register()
bucket_memory.register()
builtin_hooks.register()
barrier.register()
ending.register()
init_method.register()
