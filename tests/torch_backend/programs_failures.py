"""Ranks that lose peers, wait in vain or make mistakes; forked by test_failures.py.

The first argument is the rank's end of the pipe to the test. A rank sends what it observes, then exits like any program;
the test checks the exit status."""

import functools
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functions
from torch import nn
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import asyncdist.torch_backend  # noqa: F401
from tests.torch_backend.toys import failure_of, start


def dies_in_backward(test, rank, world, meeting, options):
    """The last rank is killed in its third backward, between two buckets."""
    start(rank, world, meeting)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
    for step in range(3):
        loss = model(torch.ones(2, 64)).sum()
        if step < 2:
            loss.backward()
        elif rank == world - 1:
            model.module[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
        else:
            test.send(failure_of(loss.backward))
    test.send(failure_of(dist.barrier))
    dist.destroy_process_group()


def dies_in_backward_of_fsdp(test, rank, world, meeting, options):
    start(rank, world, meeting)
    torch.manual_seed(0)
    model = nn.Sequential(*(fully_shard(nn.Linear(64, 64)) for _ in range(4)))
    fully_shard(model)
    model(torch.ones(2, 64)).sum().backward()
    loss = model(torch.ones(2, 64)).sum()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    test.send(failure_of(loss.backward))
    test.send(failure_of(dist.barrier))
    dist.destroy_process_group()


SIZE = 300_000
"""More elements than can be sent before the peer receives."""
CALLS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(SIZE), group=group),
    "all_gather": lambda group: dist.all_gather([torch.ones(SIZE) for _ in range(3)], torch.ones(SIZE), group=group),
    "asynchronous": lambda group: dist.all_reduce(torch.ones(SIZE), async_op=True, group=group).wait(),
    "future": lambda group: dist.all_reduce(torch.ones(SIZE), async_op=True, group=group).get_future().wait(),
    "functional": lambda group: functions.all_reduce(torch.ones(SIZE), "sum", group) * 1,
    "object": lambda group: dist.all_gather_object([None] * 3, "x" * SIZE, group=group),
    "receive": lambda group: dist.recv(torch.ones(1), 2, group=group),
    "barrier": lambda group: dist.barrier(group=group),
    "monitored_barrier": lambda group: dist.monitored_barrier(group=group),
}


def dies(test, rank, world, meeting):
    """The last of three ranks is killed while the others wait in each of `CALLS`, each in a thread and group of its own."""
    start(rank, world, meeting)
    groups = {name: dist.new_group() for name in CALLS}
    dist.barrier()
    if rank == world - 1:
        test.send("here")
        test.recv()
    with ThreadPoolExecutor(len(CALLS)) as threads:
        failures = {name: threads.submit(failure_of, functools.partial(CALLS[name], groups[name])) for name in CALLS}
        test.send("waiting")
        for name, failure in failures.items():
            test.send((name, failure.result()))
    survivors = dist.new_group(range(world - 1), use_local_synchronization=True)
    dist.all_reduce(total := torch.ones(1), group=survivors)
    test.send(total.item())
    dist.destroy_process_group()


def leaves(test, rank, world, meeting):
    """The last rank destroys its group while the others still use it."""
    start(rank, world, meeting)
    dist.barrier()
    if rank == world - 1:
        dist.destroy_process_group()
        return
    test.send(failure_of(lambda: CALLS["all_reduce"](None)))
    dist.destroy_process_group()


def never_complete(test, rank, world, meeting):
    """One rank of three never starts."""
    test.send(failure_of(lambda: start(rank, world, meeting, timeout=1.0)))
    test.send(dist.is_initialized())


def _timed(options):
    options.timeout = timedelta(seconds=0.5)
    return options


TIMED = {
    "all_reduce": lambda group: group.allreduce([torch.ones(10)], _timed(dist.AllreduceOptions())),
    "all_gather": lambda group: group.allgather(
        [[torch.ones(10) for _ in range(3)]], [torch.ones(10)], _timed(AllgatherOptions())
    ),
    "barrier": lambda group: group.barrier(_timed(dist.BarrierOptions())),
}


def late(test, rank, world, meeting):
    """Rank 1 does not call what the others call; the timeouts of the group or of the call end these calls."""
    start(rank, world, meeting)
    timed = {name: dist.new_group() for name in TIMED}
    brief = dist.new_group(timeout=timedelta(seconds=1))
    again = dist.new_group()
    if rank == 1:
        test.recv()
    else:
        test.send(failure_of(lambda: dist.monitored_barrier(again, timedelta(seconds=1))))
        test.send(failure_of(lambda: dist.all_reduce(torch.ones(10), group=brief)))
    if rank == 0:
        for name, call in TIMED.items():
            test.send((name, failure_of(lambda call=call, name=name: call(timed[name]).wait())))
    dist.barrier()
    dist.destroy_process_group()


def waits_briefly(test, rank, world, meeting):
    """A wait that times out does not end the operation."""
    start(rank, world, meeting)
    tensor = torch.full((1000,), rank + 1.0)
    if rank == 1:
        test.recv()
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        test.send(failure_of(lambda: work.wait(timedelta(seconds=0.2))))
        test.recv()
    work.wait()
    test.send(tensor[0].item())
    dist.destroy_process_group()


def mismatched(test, rank, world, meeting):
    """The ranks pass different sizes."""
    start(rank, world, meeting)
    tensor = torch.ones(10 + rank)
    test.send(failure_of(lambda: dist.all_reduce(tensor)))
    dist.destroy_process_group()


def ends(test, rank, world, meeting, how):
    """End the process in the way ``how``."""
    start(rank, world, meeting)
    groups = [dist.new_group() for _ in range(2)]
    dist.all_reduce(torch.ones(10), group=groups[0])
    if how == "twice":
        dist.destroy_process_group()
        test.send(failure_of(dist.destroy_process_group))
    elif how == "default first":
        dist.destroy_process_group()
        groups[1].shutdown()
        groups[1].shutdown()
        test.send(failure_of(lambda: groups[0].allreduce([torch.ones(1)]).wait()))
    elif how == "pending":
        work = dist.irecv(torch.ones(1), 1 - rank)
        test.send(work.is_completed())
    elif how == "raising":
        dist.irecv(torch.ones(1), 1 - rank)
        raise KeyError("a user's mistake")
    elif how == "in a callback":
        wait_in_a_callback(rank, groups)
    elif how == "from a thread":
        thread = threading.Thread(target=dist.destroy_process_group)
        thread.start()
        thread.join()
    elif how == "again":
        for number in range(3):
            dist.destroy_process_group()
            start(rank, world, f"{meeting}-{number}")
            dist.all_reduce(tensor := torch.ones(10))
            test.send(tensor.tolist())
    sys.exit()  # and free all modules


def wait_in_a_callback(rank, groups):
    """A callback of a future waits for the peer, which does the same."""
    begun = threading.Event()

    def wait_for_the_peer(_):
        begun.set()
        dist.recv(torch.ones(1), 1 - rank, group=groups[1])

    dist.irecv(torch.ones(1), 1 - rank).get_future().then(wait_for_the_peer)
    dist.barrier(groups[0])
    dist.send(torch.ones(1), 1 - rank)
    begun.wait()


def aborts(test, rank, world, meeting):
    """Rank 0, without an open connection, aborts everything and stays; the others wait for each other."""
    start(rank, world, meeting)
    part = dist.new_group(list(range(world)))
    if rank == 0:
        pending = [dist.irecv(torch.zeros(1), world - 1), dist.irecv(torch.zeros(1), world - 1, group=part)]
        whole, below = dist.group.WORLD, part.group
        endpoint = below.endpoint
        dist.distributed_c10d._abort_process_group()
        test.send([failure_of(each.wait) for each in pending])
        test.send(endpoint.transport_selector.transports[0].waits())
        test.send(failure_of(lambda: whole.group.world.new_group(None)))
        whole.shutdown()
    else:
        group = part if rank == 1 else None
        test.send(failure_of(lambda: dist.recv(torch.zeros(1), 3 - rank, group=group)))
    # A rank that exits now would be lost to ranks that know of the abort of one group only.
    test.recv()
