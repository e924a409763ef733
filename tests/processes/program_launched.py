"""The program that torchrun starts. Each rank writes its results into its own file in the given folder."""

import asyncio
import os
import sys
import time
from pathlib import Path

import torch

import asyncdist
import asyncdist.sync as dist
from asyncdist.errors import GroupError

mode, folder = sys.argv[1], Path(sys.argv[2])
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)


def write(line):
    with open(folder / f"rank{rank}", "a") as file:
        file.write(f"{line}\n")


def blocking():
    dist.init_process_group("gloo")
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, os.getpid())
    assert gathered[dist.get_rank()] == os.getpid()
    write(f"blocking: rank {dist.get_rank()} of {dist.get_world_size()}, sum {tensor[0].item():g}")
    dist.destroy_process_group()


async def awaiting():
    async with asyncdist.process_group(group_name="apart") as apart:
        await asyncdist.init_process_group()
        tensor = torch.full((1000,), asyncdist.get_rank() + 1.0)
        await asyncdist.all_reduce(tensor)
        await apart.all_reduce(tensor)
        write(f"awaiting: rank {asyncdist.get_rank()} of {asyncdist.get_world_size()}, sum {tensor[0].item():g}")
        await asyncdist.destroy_process_group()


def first_generation_fails():
    dist.init_process_group()
    if generation == 0 and rank == 1:
        dist.all_reduce(torch.ones(10))
        write("fails")
        raise RuntimeError("the first generation fails")
    for _ in range(1 if generation else 3):
        try:
            dist.all_reduce(torch.ones(10))
        except GroupError as error:
            write(f"generation {generation}: {type(error).__name__}")
            raise
    write(f"generation {generation} has met")
    dist.destroy_process_group()


def one_crashes():
    dist.init_process_group()
    dist.barrier()
    if rank == 1:
        write(time.monotonic())
        raise RuntimeError("rank 1 crashes")
    dist.barrier()


if mode == "both":
    blocking()
    asyncio.run(awaiting())
elif mode == "blocking":
    blocking()
elif mode == "restart":
    first_generation_fails()
else:
    one_crashes()
