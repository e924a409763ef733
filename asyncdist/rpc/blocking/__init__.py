"""Remote calls with torch's names, for blocking programs: ``import asyncdist.rpc.blocking as rpc``.

It replaces ``import torch.distributed.rpc as rpc``: `init_rpc`, `rpc_sync`, `rpc_async`, `remote`, `RRef`, `shutdown` and
what belongs to them. The calls run on the background loop. There is no distributed autograd: `RemoteModule` and
`DistributedOptimizer` of this module train modules of workers without it.

A worker runs any function that another worker names, and reads its pickles, as torch's does. Only processes with the job's
token can call it.
"""

from __future__ import annotations

from asyncdist.rpc.blocking import functions
from asyncdist.rpc.blocking.agent import TensorPipeRpcBackendOptions, WorkerInfo
from asyncdist.rpc.blocking.calls import RRef, remote, rpc_async, rpc_sync
from asyncdist.rpc.blocking.startup import BackendType, get_worker_info, init_rpc, is_available, shutdown
from asyncdist.rpc.blocking.training import BlockingRemoteModule as RemoteModule
from asyncdist.rpc.blocking.training import DistributedOptimizer

__all__ = [
    "BackendType", "DistributedOptimizer", "RRef", "RemoteModule", "TensorPipeRpcBackendOptions", "WorkerInfo",
    "functions", "get_worker_info", "init_rpc", "is_available", "remote", "rpc_async", "rpc_sync", "shutdown",
]  # fmt: skip
