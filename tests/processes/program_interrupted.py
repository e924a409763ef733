"""A plain program that waits for its peers at the start, or for a message, until Ctrl-C ends it: ``FACE start|message``."""

import asyncio
import sys

import torch

import asyncdist
import asyncdist.sync


def in_blocking(dist, waits):
    if waits == "start":
        print("ready", flush=True)
        dist.init_process_group()  # here it waits
    dist.init_process_group()
    dist.barrier()
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    print("ready", flush=True)
    dist.recv(torch.ones(4), src=peer)  # here it waits


async def in_asyncio(dist, waits):
    if waits == "start":
        print("ready", flush=True)
        await dist.init_process_group()  # here it waits
    await dist.init_process_group()
    await dist.barrier()
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    print("ready", flush=True)
    await dist.recv(torch.ones(4), src=peer)  # here it waits


face, waits = sys.argv[1:]
if face == "blocking":
    in_blocking(asyncdist.sync, waits)
else:
    asyncio.run(in_asyncio(asyncdist, waits))
