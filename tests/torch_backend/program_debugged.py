"""A rank of a job with torch's debug server, which calls all-reduces until the test tells it to stop."""

import os

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server

from asyncdist.torch_backend.debug_tab import debug_handlers


def debugged(test, rank, world_size, store_port, page_port, folder):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port),
    }  # fmt: skip
    dist.init_process_group("asyncdist")
    start_debug_server(
        port=page_port, handlers=debug_handlers(), dump_dir=folder, dump_interval=0.5, enabled_dumps={"asyncdist"}
    )
    for _ in range(3):
        dist.all_reduce(torch.ones(1000))
    test.send("started")
    while test.recv() == "all_reduce":
        dist.all_reduce(torch.ones(1000))
        test.send("done")
    dist.barrier()
    if rank == 0:
        stop_debug_server()
    dist.destroy_process_group()
