"""A process that changes the members of its process group as the test says; forked by test_reconfigure.py.

The test sends the name of a command and its arguments. The process answers with the result, or with the names of the
classes of the exception and its message.
"""

import asyncio
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist.torch_backend  # noqa: F401

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)
PENDING = []
PARTS = {}


def serve(test, **environment):
    torch.set_num_threads(1)
    os.environ.update(environment)
    while (message := test.recv()) is not None:
        command, *arguments = message
        try:
            answer = "done", COMMANDS[command](*arguments)
        except Exception as error:
            answer = [kind.__name__ for kind in type(error).__mro__], str(error)
        test.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def open_group(rank=0, world=1, meeting=None, reconfigurable=True):
    where = {"store": dist.HashStore()} if meeting is None else {"init_method": meeting}
    flag = {"enable_reconfigure": True} if reconfigurable else {}
    dist.init_process_group("asyncdist", rank=rank, world_size=world, timeout=TIMEOUT, **where, **flag)


def reconfigure(uuid, handles, seconds=60):
    dist._reconfigure(uuid, handles, timeout=timedelta(seconds=seconds)).wait()
    return dist.get_rank(), dist.get_world_size()


def reconfigure_and_await(uuid, handles):
    async def call():
        await dist._reconfigure(uuid, handles)
        await dist.all_reduce(total := torch.ones(1), async_op=True)
        return total.item()

    return asyncio.run(call())


def total(part=None):
    """Return the sum of the ranks, each plus one, by an all-reduce."""
    group = PARTS.get(part)
    dist.all_reduce(tensor := torch.tensor([dist.get_rank(group) + 1.0]), group=group)
    return tensor.item()


def mean_by_ddp():
    """Return the mean of the ranks, as DDP's gradient."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
    return model.module.weight.grad.item()


def make_part(name, ranks):
    PARTS[name] = dist.new_group(ranks)
    return PARTS[name] is not dist.GroupMember.NON_GROUP_MEMBER


def send_around():
    """Pass this rank to the next one through the back end alone; return what came from the one before."""
    backend, rank, size = dist.get_backend_impl(dist.group.WORLD, CPU), dist.get_rank(), dist.get_world_size()
    sending = backend.send([torch.tensor([rank])], (rank + 1) % size, 0)
    backend.recv([received := torch.zeros(1, dtype=torch.int64)], (rank - 1) % size, 0).wait()
    sending.wait()
    return received.item(), backend.rank(), backend.size()


def shrink(excluded, flags=0, part=None):
    made = dist.shrink_group(excluded, PARTS.get(part), flags)
    if part is not None:
        PARTS[part] = made
    return type(made).__name__, made.rank(), made.size(), made is dist.group.WORLD


def start(call):
    if call == "all_reduce":
        PENDING.append(dist.all_reduce(torch.ones(1), async_op=True))
    else:
        PENDING.append(dist.irecv(torch.zeros(1), group_src=int(call)))
    return len(PENDING)


def abort():
    hooks = []
    dist.group.WORLD.register_abort_hook(7, lambda: hooks.append("called"))
    dist.get_backend_impl(dist.group.WORLD, CPU).abort()
    dist.group.WORLD.abort()
    return hooks, dist.get_backend_impl(dist.group.WORLD, CPU).get_error().name


COMMANDS = {
    "open": open_group,
    "handle": lambda: dist._get_reconfigure_handle(),
    "reconfigure": reconfigure,
    "reconfigure and await": reconfigure_and_await,
    "total": total,
    "mean": mean_by_ddp,
    "part": make_part,
    "around": send_around,
    "shrink": shrink,
    "start": start,
    "wait": lambda: PENDING.pop(0).wait(),
    "abort": abort,
    "error": lambda: dist.group.WORLD.get_error().name,
    "rank": lambda: (dist.get_rank(), dist.get_world_size()),
    "world": lambda: dist.group.WORLD.group.endpoint.world_id,
    "supports": lambda: dist._supports_reconfigure(),
    "timeout": lambda: dist.group.WORLD.group.timeout,
}
