"""Ranks that use asyncdist as a back end of torch in Python, from torch 2.14 on; forked by test_python_backend.py.

The first argument is the rank's end of the pipe to the test. A rank sends what it observes, then exits like any program.
"""

import asyncio
import gc
import json
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functions
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncdist.cli.bench.contenders import null_backend
from asyncdist.torch_backend import Backend, ProcessGroup, Work
from tests.torch_backend.toys import bindings, failure_of, start

CPU = torch.device("cpu")


def mean(rank, world, group):
    """Return the mean of the ranks' numbers, as DDP's gradients, and as it must be."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    model(torch.full((1, 1), float(rank))).sum().backward()
    return model.module.weight.grad.item(), (world - 1) / 2


def collectives(rank, world, group=None):
    """Return pairs of results of collectives and what they must be."""
    size, me = dist.get_world_size(group), dist.get_rank(group)
    dist.all_reduce(total := torch.tensor([me + 1.0]), group=group)
    work = dist.all_reduce(later := torch.tensor([me + 1.0]), group=group, async_op=True)
    work.wait()
    dist.broadcast(first := torch.tensor([me]), group_src=0, group=group)
    dist.all_gather_into_tensor(gathered := torch.zeros(size), torch.tensor([float(me)]), group=group)
    dist.reduce_scatter_tensor(part := torch.zeros(1), torch.arange(float(size)), group=group)
    dist.all_to_all_single(dealt := torch.zeros(size), torch.full((size,), float(me)), group=group)
    dist.all_gather_object(objects := [None] * size, {"rank": me}, group=group)
    functional = functions.all_reduce(torch.tensor([me + 1.0]), "sum", group or dist.group.WORLD)
    dist.barrier(group=group)
    every = list(range(size))
    sum_of_all = size * (size + 1) / 2
    results = [
        (total.item(), sum_of_all),
        (later.item(), sum_of_all),
        (first.item(), 0),
        (gathered.tolist(), every),
        (part.item(), size * me),
        (dealt.tolist(), every),
        (objects, [{"rank": each} for each in every]),
        (functional.item(), sum_of_all),
    ]
    if size > 1:
        sending = dist.isend(torch.tensor([me]), group_dst=(me + 1) % size, group=group)
        dist.recv(received := torch.zeros(1, dtype=torch.int64), group_src=(me - 1) % size, group=group)
        sending.wait()
        results.append((received.item(), (me - 1) % size))
    return results


def mixed(test, rank, world, meeting, config):
    """asyncdist serves the CPU, and gloo another device."""
    start(rank, world, meeting, config)
    group, ours = dist.group.WORLD, dist.get_backend_impl(device=CPU)
    theirs = group._get_backend(torch.device("cuda"))
    test.send([type(each).__name__ for each in (group, ours, theirs)])
    part = dist.new_group(list(range(world)))
    split = dist.split_group(group, [[each] for each in range(world)])
    shared = part._get_backend(CPU).group.world is ours.group.world is split._get_backend(CPU).group.world
    test.send((shared, dist.get_world_size(split), dist.get_backend(part), dist.get_backend()))
    results = [
        *collectives(rank, world),
        *collectives(rank, world, part),
        *collectives(rank, world, split),
        mean(rank, world, None),
    ]
    test.send(results)
    # Works of torch's own classes can only be waited on; those of the back end itself are asyncdist's.
    work = ours.allreduce([tensor := torch.ones(1)])
    test.send((isinstance(work, Work), work.wait(), tensor.item(), ours.supports_coalescing))
    if rank:
        test.send(failure_of(lambda: dist.split_group(group, [[0]])))
    dist.monitored_barrier()
    dist.destroy_process_group()


def nested(test, rank, world, meeting):
    """A process group of the program's own contains asyncdist's back end."""
    start(rank, world, meeting)
    outer = dist.ProcessGroup(dist.HashStore(), rank, world)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    outer._register_backend(CPU, kind, dist.get_backend_impl(dist.new_group(), CPU))
    outer._set_default_backend(kind)
    outer.allreduce([total := torch.tensor([rank + 1.0])], dist.AllreduceOptions()).wait()
    outer.barrier().wait()
    outer.send([torch.tensor([rank])], (rank + 1) % world, 3)
    outer.recv_anysource([received := torch.zeros(1, dtype=torch.int64)], 3).wait()
    test.send((outer.rank(), outer.size(), total.item(), received.item()))
    dist.destroy_process_group()


def splits(test, rank, world, meeting):
    """Split the ranks in reverse order, split the halves, and leave the last rank out."""
    start(rank, world, meeting)
    halves = [list(reversed(range(world // 2))), list(reversed(range(world // 2, world)))]
    half = dist.split_group(None, halves, timeout=timedelta(seconds=30), group_desc="half")
    alone = dist.split_group(half, [[each] for each in range(half.size())])
    most = dist.split_group(None, [list(range(world - 1))])
    test.send([isinstance(each, ProcessGroup) for each in (half, alone, most)])
    test.send((half.rank(), half.group.timeout, half.group_desc, dist.get_process_group_ranks(half)))
    results = collectives(rank, world, half) + collectives(rank, world, alone)
    if isinstance(most, ProcessGroup):
        results += collectives(rank, world, most)
    results += [
        (asyncio.run(_sum(rank, half)), sum(halves[0] if rank in halves[0] else halves[1])),
        mean(rank, world, None),
    ]
    test.send(results)
    dist.destroy_process_group(half)
    dist.all_reduce(total := torch.ones(1))
    test.send(total.item())
    dist.destroy_process_group()


async def _sum(rank, group):
    await dist.all_reduce(tensor := torch.tensor([float(rank)]), group=group, async_op=True)
    return tensor.item()


def merges(test, rank, world, meeting, store):
    """Ranks that each have a world of their own make one of all."""
    start(0, 1, f"{meeting}-{rank}")
    shared = dist.FileStore(store, world)
    merged = dist.group.WORLD.merge_remote_group(
        shared, world, timeout=timedelta(seconds=60), group_name="all", group_desc="merged"
    )
    merged.allreduce([total := torch.tensor([merged.rank() + 1.0])]).wait()
    test.send((isinstance(merged, ProcessGroup), merged.size(), total.item(), merged.group_name, merged.group_desc))
    merged.shutdown()
    dist.destroy_process_group()


def aborts(test, rank, world, meeting):
    """Rank 0 aborts a group for which the others wait."""
    start(rank, world, meeting)
    group, called = dist.new_group(), []
    group.register_abort_hook(1, lambda: called.append(group.get_error().name))
    group.register_abort_hook(2, lambda: called.append("removed"))
    group.unregister_abort_hook(2)
    backend = dist.get_backend_impl(group, CPU)
    dist.all_reduce(torch.ones(1), group=group)
    test.send((group.supports_abort_hooks, called, group.get_error().name, backend.get_error().name))
    if rank:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        test.send("waiting")
        kinds, text = failure_of(work.wait)
        test.send((kinds[0], "torch.distributed aborted" in text, work.is_completed()))
    else:
        test.recv()
        group.abort()
        test.send(failure_of(lambda: dist.all_reduce(torch.ones(1), group=group))[0][0])
    test.send((called, group.get_error().name, backend.get_error().name))
    test.recv()
    dist.destroy_process_group()


def times_out(test, rank, world, meeting):
    """Rank 1 is late for the others."""
    start(rank, world, meeting)
    group, called = dist.new_group(timeout=timedelta(seconds=0.5)), []
    group.register_abort_hook(1, lambda: called.append("called"))
    if rank == 0:
        test.send(failure_of(lambda: dist.all_reduce(torch.ones(1), group=group))[0][0])
    dist.barrier()
    test.send((called, group.get_error().name))
    dist.destroy_process_group()


def observes(test, rank, world, meeting):
    """torch's flight recorder and its check for NaN see the calls; a hook that is registered later does, too."""
    start(rank, world, meeting)
    before = []
    dist.group.WORLD.register_pre_hook(1, lambda call: before.append(call.name.name))
    results = [*collectives(rank, world), mean(rank, world, None), (asyncio.run(_sum(rank, None)), sum(range(world)))]
    test.send(results)
    recorded = [entry["profiling_name"] for entry in _recorded()]
    test.send((recorded, before))
    test.send(failure_of(lambda: dist.all_reduce(torch.tensor([float("nan")]))))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    test.send((type(work) is Work, work.is_completed(), isinstance(dist.group.WORLD, ProcessGroup)))
    dist.destroy_process_group()


def _recorded():
    return json.loads(bindings._dump_fr_trace_json(backend="asyncdist"))["entries"]


def idles(test, rank, world, meeting):
    """torch's flight recorder leaves the groups of both registered back ends alone."""
    null_backend.register_null_backend()
    start(rank, world, meeting)
    idle = dist.new_group(backend=null_backend.NAME)
    dist.all_reduce(tensor := torch.full((1,), float(rank)), group=idle)
    test.send((type(dist.group.WORLD) is ProcessGroup, type(idle) is null_backend.NullWorkBackend, tensor.item()))
    dist.destroy_process_group()


def completes(test, rank, world, meeting):
    """A hook learns of each completed operation."""
    start(rank, world, meeting)
    group, done = dist.new_group(), []
    group._register_on_completion_hook(done.append)
    dist.all_reduce(torch.ones(1), group=group)
    dist.all_gather_into_tensor(torch.zeros(world), torch.ones(1), group=group)
    test.send(
        [(each.op_type.name, each.seq, each.time_finished - each.time_started == each.active_duration) for each in done]
    )
    dist.destroy_process_group()


def forgets(test, rank, world, meeting):
    """Destroyed groups are freed, with their back ends."""
    start(rank, world, meeting)
    made = [dist.new_group(), dist.split_group(None, [list(range(world))])]
    for group in made:
        dist.all_reduce(torch.ones(1), group=group)
    kept = [weakref.ref(each) for group in made for each in (group, dist.get_backend_impl(group, CPU), group.group)]
    assert all(isinstance(group.backend, Backend) for group in made)
    while made:
        dist.destroy_process_group(made.pop())
    del group
    dist.barrier()
    gc.collect()
    test.send([each() is None for each in kept])
    dist.destroy_process_group()
