"""Ranks that use what torch 2.15 brought; forked by test_next_torch.py."""

import collections
import json
import time
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from tests.torch_backend.toys import bindings, failure_of, numbers, start


def on_a_cpu(test, rank, world, meeting):
    """The default group is bound to ``cpu:0``."""
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "asyncdist", init_method=meeting, rank=rank, world_size=world, timeout=limit, device_id=torch.device("cpu:0")
    )
    groups = [None, dist.new_group(), dist.new_group([0]), dist.split_group(None, [list(range(world))])]
    groups.append(init_device_mesh("cpu", (world,)).get_group())
    sums = []
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.all_reduce(total := torch.tensor([rank + 1.0]), group=group)
            sums.append(total.item())
    dist.barrier()
    test.send(sums)
    dist.destroy_process_group()


def aborts_mesh(test, rank, world, meeting):
    """The last rank dies while the others wait in the groups of a mesh."""
    start(rank, world, meeting)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))
    dist.all_reduce(torch.ones(1), group=mesh.get_group("rows"))
    dist.barrier()
    test.send("ready")
    test.recv()
    refused = failure_of(mesh["rows"].abort)[1]
    work = dist.all_reduce(torch.ones(1), group=mesh.get_group("rows"), async_op=True) if rank % 2 else None
    begun = time.monotonic()
    mesh.abort()
    test.send((refused, time.monotonic() - begun, failure_of(work.wait)[0] if work else None))
    kinds, text = failure_of(lambda: dist.barrier(mesh.get_group("columns")))
    test.send((kinds[0], text))
    test.recv()


def named(test, rank, world, meeting):
    """Operations are shown in profiles under the name that the program gives them."""
    start(rank, world, meeting)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with dist.record_comm("gradients of layer 1"):
            dist.all_reduce(numbers(rank))
        with dist.record_comm("to the next stage"):
            (dist.send if rank == 0 else dist.recv)(numbers(rank), 1 - rank)
        dist.all_reduce(numbers(rank))
    seen = collections.Counter(event.name for event in profiler.events())
    test.send({name: count for name, count in seen.items() if not name.startswith("aten::")})
    dist.destroy_process_group()


def fails(test, rank, world, meeting):
    """Rank 1 is late for rank 0. Send what the page "c10d health" of torch's debug server would show."""
    start(rank, world, meeting)
    server = bindings._WorkerServer("127.0.0.1", 0)
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    dist.all_reduce(numbers(rank), group=group)
    if rank == 1:
        dist.barrier()
    test.send(failure_of(lambda: dist.all_reduce(numbers(rank), group=group))[0][0])
    if rank == 0:
        dist.barrier()
    address = f"http://127.0.0.1:{server.port}/handler/c10d_health_check"
    with urllib.request.urlopen(urllib.request.Request(address, method="POST")) as answer:
        test.send(json.loads(answer.read()))
    server.shutdown()
    dist.barrier()
    dist.destroy_process_group()
