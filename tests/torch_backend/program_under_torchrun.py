"""A job under torchrun: prints its world and ends as its argument says."""

import os
import sys
import time

import torch
import torch.distributed as dist

import asyncdist.torch_backend  # noqa: F401


def main(backend, ending):
    dist.init_process_group(backend)
    total = torch.ones(1)
    dist.all_reduce(total)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    identity = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    # One write, because all ranks write to the same pipe.
    os.write(1, f"{backend}: {identity}, attempt {attempt}, sum {total.item():g}\n".encode())
    if ending == "fails once" and attempt == 0 and dist.get_rank() == 1:
        os._exit(3)
    # Loop until the agent restarts this rank, because another agent has joined or was lost.
    while ending == "needs two" and dist.get_world_size() < 2:
        time.sleep(0.05)
    while ending == "loses one" and dist.get_world_size() + attempt < 2:
        time.sleep(0.05)
    while ending == "loses one" and dist.get_world_size() > 1:
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()


main(*sys.argv[1:])
