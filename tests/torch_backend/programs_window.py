"""Ranks with windows by torch's names; forked by test_window.py. Each returns what the test compares."""

import asyncio
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

import asyncdist
from asyncdist.torch_backend.torch_group import HAS_PYTHON_BACKENDS


def opened(rank, world, meeting):
    dist.init_process_group(
        "asyncdist", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    return dist.group.WORLD


def new_window(group, tensor=None):
    """Make a window as programs do: torch has the function from 2.15 on."""
    if not hasattr(dist, "_new_window"):
        return group.new_window(tensor)
    assert dist._supports_window(group)
    return dist._new_window(tensor, group)


def pass_around(test, rank, world, meeting):
    """Put into the next rank's window and signal, by blocking calls and by works: the ring of torch's own tests."""
    group = opened(rank, world, meeting)
    after, before = (rank + 1) % world, (rank - 1) % world
    outcomes = []
    for make in (torch.ones, lambda count, dtype: asyncdist.empty(count, dtype=dtype).fill_(1)):
        for count, dtype, is_async in ((4, torch.float, False), (1024, torch.int, True), (65_536, torch.int8, False)):
            buffer = make(count * world, dtype=dtype)
            if is_async:
                window = new_window(group)
                window.tensor_register(buffer)
            else:
                window = new_window(group, buffer)
            for _ in range(3):
                put = window.put(torch.full([count], rank, dtype=dtype), after, after * count, is_async)
                assert put.wait()
                assert window.signal(after, is_async).wait()
                assert window.wait_signal(before, is_async).wait()
                received = window.map_remote_tensor(rank)[rank * count : (rank + 1) * count]
                outcomes.append((received == before).all().item())
                outcomes.append((buffer == 1).sum().item() >= count)
            window.tensor_deregister()
    test.send(outcomes)
    dist.destroy_process_group()


def await_works(test, rank, world, meeting):
    """Await the works of a window in a coroutine."""
    group = opened(rank, world, meeting)
    window = new_window(group, buffer := torch.zeros(8))

    async def call():
        await window.put(torch.full((8,), rank + 1.0), 1 - rank, 0, True)
        await window.signal(1 - rank, True)
        await window.wait_signal(1 - rank, True)

    asyncio.run(call())
    test.send(float(buffer.sum()))
    window.tensor_deregister()
    dist.destroy_process_group()


def refuse(test, rank, world, meeting):
    """Return what each wrong call raises, and the attributes of windows in both kinds of memory."""
    group = opened(rank, world, meeting)
    window, plain = new_window(group), torch.ones(16)
    outcomes = [raised(lambda: window.put(plain, 0, 0, False)), raised(lambda: window.signal(0, False))]
    window.tensor_register(plain)
    outcomes.append(raised(lambda: window.tensor_register(plain)))
    outcomes.append(raised(lambda: window.put(plain, 1 - rank, 8, False)))
    kinds = [str(window.get_attr(1 - rank).access_type)] if HAS_PYTHON_BACKENDS else ["WindowAccessType.SEPARATE"]
    window.tensor_deregister()
    shared = new_window(group, asyncdist.empty(4))
    kinds += [str(shared.get_attr(1 - rank).access_type)] if HAS_PYTHON_BACKENDS else ["WindowAccessType.UNIFIED"]
    dist.barrier()
    options = SimpleNamespace(timeout=timedelta(milliseconds=50))
    late = raised(lambda: shared.wait_signal(1 - rank, False, options)) if rank == 0 else ""
    test.send((outcomes, kinds, late))
    test.recv()
    dist.destroy_process_group()


def raised(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"
