"""A back end of torch.distributed: unmodified PyTorch code communicates over asyncdist's groups.

    import asyncdist.torch_backend  # not needed with torch 2.14 and later, which find the back end by its entry point
    torch.distributed.init_process_group("asyncdist")

DDP, FSDP2, DTensor, DeviceMesh, tensor and pipeline parallel, checkpointing, functional collectives and `torch.compile`
then use shared memory between the ranks of a host and TCP between hosts. An asynchronous operation may be awaited:
``await torch.distributed.all_reduce(tensor, async_op=True)``.

Each module implements one hook of torch:

torch_group          the methods that the next two have in common: the collectives, by torch's names
process_group        `torch.distributed.ProcessGroup`, for groups that asyncdist serves as a whole
backend              ``c10d::Backend``, for a part of a group and for callers in C++, from torch 2.14 on
call_forms           `torch.distributed.ReduceOp`, and the forms in which torch's methods can be called
torch_work           `torch.distributed.Work`: the handle that a collective returns
callback_order       the order of the callbacks of futures, and the groups on which they communicate
registration         `Backend.register_backend`: creates a process group; operators that below torch 2.14 require C++
patches              every function of torch that this package replaces
bucket_memory        registered memory for the buckets of `torch.nn.parallel.DistributedDataParallel`
memory_pool          registered memory for ``ProcessGroup.allocate_tensor``
torch_store          `torch.distributed.Store`
one_sided            one-sided transfers: ``torch.distributed._transport``, from torch 2.15 on
rendezvous           ``init_method="asyncdist://..."`` and ``torchrun --rdzv-backend=asyncdist``
debug_tab            a tab of torch's debug server (``torch.distributed.debug``)

Importing the package registers the back end. The package may use every layer except `bench` and `cli`.
"""

from asyncdist.torch_backend import patches, registration
from asyncdist.torch_backend.backend import Backend
from asyncdist.torch_backend.process_group import ProcessGroup
from asyncdist.torch_backend.rendezvous import url_handler
from asyncdist.torch_backend.torch_store import Store
from asyncdist.torch_backend.torch_work import Work

__all__ = ["Backend", "ProcessGroup", "Store", "Work"]

registration.register_backend()
registration.serve_recorders()
registration.register_kernels()
patches.apply_patches()
url_handler.register_url_scheme()
