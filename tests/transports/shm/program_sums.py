"""Ranks that run random collectives and messages, and check every result, until one of them dies."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
import types

import torch

import asyncdist
from asyncdist import sync
from asyncdist.errors import AsyncdistError
from asyncdist.kernel.memory import shared_arena
from asyncdist_transports.shm import local_listener

torch.set_num_threads(1)
COUNTS = (1, 5, 1000, 9000, 70_000, 200_000)


def sums(test):
    """Join worlds, ``(where, rank, size, seed, timeout, steps)``; send how each ended, and what is left of it then.

    A rank leaves after ``steps`` steps; -1 is no limit.
    """
    registered = asyncdist.empty(max(COUNTS), shared=True)
    used_nbytes = shared_arena.arena().used_nbytes
    while (order := test.recv()) is not None:
        where, rank, size, seed, timeout, steps = order
        try:
            with sync.process_group("shm", init_method=where, rank=rank, world_size=size, timeout=timeout) as group:
                test.send("ready")
                done, error = until_it_fails(group, random.Random(seed), registered, steps)
                test.send((done, type(error).__name__, getattr(error, "peer", None), str(error), time.monotonic()))
                # The traceback refers to the world.
                del error, group
        except AsyncdistError as error:
            test.send((0, type(error).__name__, None, str(error), time.monotonic()))
        await_freed(used_nbytes)
        test.send(left())
    del registered
    gc.collect()
    test.send(left())


def dies_while_socket_has_a_name(test):
    """Be killed while the socket has a name."""
    opening = os.open
    os.open = lambda path, *how: os.kill(os.getpid(), 9) if "asyncdist-" in str(path) else opening(path, *how)
    listens_by_descriptor(test)


def listens_by_descriptor(test):
    listener = local_listener.LocalListener(types.SimpleNamespace(config=types.SimpleNamespace(host="here")))
    listener.listen_by_descriptor()
    listener.close()
    test.send("opened")


def until_it_fails(group, chance, registered, steps):
    done = 0
    while done != steps:
        try:
            step(group, chance, registered)
        except (AsyncdistError, AssertionError) as error:
            return done, error
        done += 1
    return done, None


def await_freed(used_nbytes):
    """Wait until the memory of the world is freed: a peer that has not left yet may still read it."""
    until = time.monotonic() + 5
    while (used := shared_arena.arena().used_nbytes) != used_nbytes:
        assert time.monotonic() < until, f"{used} bytes are in use, {used_nbytes} before the world"
        # No event reports the release, which a thread of the transport makes.
        time.sleep(0.001)


def step(group, chance, registered):
    rank, size = group.rank(), group.size()
    kind, count, root = chance.choice(KINDS), chance.choice(COUNTS), chance.randrange(size)
    base = float(chance.randrange(100))
    own, total = torch.full((count,), base + rank), size * base + size * (size - 1) / 2
    rows = [torch.empty(count) for _ in range(size)]
    if kind in ("all_reduce", "registered"):
        tensor = own if kind == "all_reduce" else registered[:count].copy_(own)
        group.all_reduce(tensor, background=False).result()
        assert_all(tensor, total)
    elif kind == "reduce":
        group.reduce(own, root, background=False).result()
        assert_all(own, total if rank == root else base + rank)
    elif kind == "broadcast":
        group.broadcast(own, root, background=False).result()
        assert_all(own, base + root)
    elif kind == "all_gather":
        group.all_gather(rows, own, background=False).result()
        for peer, row in enumerate(rows):
            assert_all(row, base + peer)
    elif kind == "reduce_scatter":
        group.reduce_scatter(rows[0], [own + peer for peer in range(size)], background=False).result()
        assert_all(rows[0], total + size * rank)
    elif kind == "all_to_all":
        group.all_to_all(rows, [own + 10 * peer for peer in range(size)], background=False).result()
        for peer, row in enumerate(rows):
            assert_all(row, base + peer + 10 * rank)
    elif kind == "several":
        tensors = [own + number for number in range(4)]
        works = [group.all_reduce(tensor) for tensor in tensors]
        for number, work in enumerate(works):
            work.wait()
            assert_all(tensors[number], total + size * number)
    elif kind == "pass on":
        receiving = group.recv(rows[0], (rank - 1) % size)
        group.send(own, (rank + 1) % size, background=False).result()
        receiving.wait()
        assert_all(rows[0], base + (rank - 1) % size)
    else:
        group.barrier(background=False).result()


KINDS = (
    "all_reduce", "registered", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "several", "pass on",
    "barrier",
)  # fmt: skip


def assert_all(tensor, value):
    assert bool((tensor == value).all()), f"{tensor[tensor != value][:3].tolist()} where {value} was expected"


def left():
    """Return the numbers of this process's sockets and mapped segments, and its used bytes of shared memory."""
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that lists the folder is closed by now.
        with contextlib.suppress(FileNotFoundError):
            kinds.append(os.readlink(f"/proc/self/fd/{name}"))
    sockets = sum("socket:" in kind for kind in kinds)
    segments = sum("memfd:asyncdist" in kind for kind in kinds)
    return sockets, segments, shared_arena.arena().used_nbytes
