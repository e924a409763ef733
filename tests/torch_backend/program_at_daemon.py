"""Ranks that rendezvous at a store daemon by ``asyncdist://``, and a torchrun agent without workers."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

import asyncdist.torch_backend  # noqa: F401
from asyncdist.store import TCPStore
from asyncdist.torchrun import handler


def meet(test, url, rank, world_size, backends):
    """Create one world after the other and send each one's sum."""
    for backend in backends:
        options = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=30)}
        try:
            dist.init_process_group(backend, init_method=url, **options)
        except RuntimeError as error:
            test.send(str(error))
            return
        total = torch.ones(1)
        dist.all_reduce(total)
        test.send((backend, total.item()))
        dist.destroy_process_group()


def stay(test, url, rank, world_size):
    """Create a world and stay in it."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1))
    test.send("there")
    test.recv()


def compute(test, url, rank, world_size):
    """Create a world, set a key, call nothing until the test asks, then send whether all keys exist."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"of {rank}", "kept")
    dist.barrier()
    test.send("there")
    test.recv()
    test.send(store.check([f"of {each}" for each in range(world_size)]))


def agent(test, endpoint, run_id, agents):
    """Run one rendezvous after another until the test ends it; the workers of each round meet too."""
    rendezvous = handler()(RendezvousParameters("asyncdist", endpoint, run_id, agents, agents))
    while True:
        joined = rendezvous.next_rendezvous()
        workers = joined.bootstrap_store_info
        with TCPStore(workers.master_addr, workers.master_port) as store:
            store.set(f"rank {joined.rank}", "there")
            test.send([store.get(f"rank {rank}") for rank in range(joined.world_size)])
            if test.recv() == "shut down":
                break
    test.send(rendezvous.shutdown())
