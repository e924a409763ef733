"""A back end of torch.distributed: stock PyTorch code runs on our groups, unchanged.

    import asyncdist.torch_backend
    torch.distributed.init_process_group("asyncdist")

DDP, FSDP2, DTensor, DeviceMesh, tensor and pipeline parallel, checkpointing, functional collectives and `torch.compile`
then use shared memory between the ranks of a host and TCP between hosts. An asynchronous operation may be awaited:
``await torch.distributed.all_reduce(tensor, async_op=True)``.

Read in this order: `process_group` (torch's methods, and what they are here), `work` (what they return), `reductions`,
`registration` (how a group comes about), `kernels` (two operators that torch's own code cannot bring to us), `patches`
(everything in torch that we replace), `keep_alive` (what C++ would forget), `bucket_memory` and `memory_pool` (where
buckets lie), `store`, `init_method` and `torchrun` (how a job finds a store daemon).
"""

from asyncdist.torch_backend import kernels, patches, registration, url_handler
from asyncdist.torch_backend.process_group import ProcessGroup
from asyncdist.torch_backend.torch_store import Store
from asyncdist.torch_backend.torch_work import Work

__all__ = ["ProcessGroup", "Store", "Work"]

registration.register_backend()
kernels.register_kernels()
patches.apply_patches()
url_handler.register_url_scheme()
