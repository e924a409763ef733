"""The processes of the benchmark of growing worlds: tasks of one process, ranks, and a store and its client."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec

import torch
import torch.distributed as gloo

import asyncdist as dist
from asyncdist.config import Config
from asyncdist.groups.group import Group
from asyncdist.store.client.aio import AsyncStore
from asyncdist.store.protocol.operations import Command, Op
from asyncdist.store.server.server import StoreServer
from asyncdist.testing.cluster import world_of
from benchmarks.laboratory import HOST

P = ParamSpec("P")
_RECEIVED = struct.Struct("128xQ")
"""The bytes that a TCP socket has received in order, in Linux's ``struct tcp_info``."""
_TIMEOUT = 600.0
_VALUE_NBYTES, _READS = 4 << 20, 16


def _process(program: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a process of a coroutine function."""

    def process(*args: P.args, **kwargs: P.kwargs) -> None:
        torch.set_num_threads(1)
        asyncio.run(program(*args, **kwargs))

    return process


@_process
async def meet(test: Connection, transport: str, size: int, barriers: int) -> None:
    """Open a world of ``size`` ranks, pass barriers, and send what that took."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with world_of(2, transport=transport, timeout=_TIMEOUT) as first:
        await _barrier(first)  # what the first world of a process makes for all
    # It would look at the objects of all ranks, of which a process of one rank has only its own.
    gc.disable()
    before, began, used = _resident(), time.perf_counter(), time.process_time()
    # The ranks share one thread: on a busy machine one may wait for long until it runs, and is not dead.
    config = Config.from_environment().with_(heartbeat=0.0)
    async with world_of(size, transport=transport, timeout=_TIMEOUT, config=config) as groups:
        found = {"opened": time.perf_counter() - began, "processor": (time.process_time() - used) / size}
        server = groups[0].world.meeting.server
        assert server is not None
        received = _received_from(server.port)
        found |= {"sent": sum(received), "most_read": max(received)}
        times = [await _barrier(groups) for _ in range(barriers)]
        found |= {"first": times[0], "later": sorted(times[1:])[len(times[1:]) // 2]}
        found["memory"] = (_resident() - before) / size
    test.send(found)
    await asyncio.to_thread(test.recv)


async def _barrier(groups: Sequence[Group]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(group.barrier() for group in groups))
    return time.perf_counter() - began


def _received_from(port: int) -> list[int]:
    """Return the bytes that each connection of this process to a port of this host has received."""
    received = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.type == socket.SOCK_STREAM and sock.getpeername()[1] == port:
                    received.append(_RECEIVED.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136))[0])
        except (OSError, IndexError, TypeError):  # no connected socket
            continue
    return received


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


# -- real processes -------------------------------------------------------------------------------------


@_process
async def serve(test: Connection) -> None:
    """Serve a store, and send the processor time that it has used whenever the test asks."""
    async with await StoreServer.start(HOST, 0, token=Config.from_environment().token) as server:
        test.send(server.port)
        while (await asyncio.to_thread(test.recv)) != "end":
            test.send(time.process_time())


@_process
async def ask(test: Connection, port: int, connections: int, requests: int) -> None:
    """Use a store in five phases, and send the processor time that each has taken.

    The clients connect one after the other, and then at the same time, as those of a large world do; so they ask, too.
    """
    clients: list[AsyncStore] = []
    config = Config.from_environment()

    connect_next = functools.partial(AsyncStore.connect, HOST, port, timeout=_TIMEOUT, config=config)

    async def connect() -> None:
        clients.extend([await connect_next() for _ in range(connections)])

    async def connect_together() -> None:
        clients.extend(await asyncio.gather(*(connect_next() for _ in range(connections))))

    def offer(number: int, count: int) -> asyncio.Future[Any]:
        last = f"{number - number % count + count - 1}"
        return clients[number % count].request(Command(Op.OFFER, (str(number), b"value", [last], [])))

    async def ask() -> None:
        for number in range(requests):
            await offer(number, 1)

    async def ask_together() -> None:
        for first in range(requests, 2 * requests, connections):
            await asyncio.gather(*(offer(number, connections) for number in range(first, first + connections)))

    async def read() -> None:
        for client in clients[:_READS]:
            await client.get("long")

    for phase in (connect, connect_together, ask, ask_together, read):
        if phase is read:
            await clients[0].set("long", bytes(_VALUE_NBYTES))
        test.recv()
        used = time.process_time()
        await phase()
        test.send(time.process_time() - used)
    test.recv()


@_process
async def be_rank(test: Connection, where: str, rank: int, size: int, barriers: int) -> None:
    """Join a world, pass barriers and then a token when the test says so; send when each began and ended, and its
    processor time.
    """
    async with world_of(1, transport="shm,tcp"):  # what the first world of a process makes for all
        test.send("ready")
    meet_others: Any = functools.partial(
        dist.init_process_group, init_method=where, rank=rank, world_size=size, timeout=_TIMEOUT
    )
    token, before, after = torch.zeros(1), (rank - 1) % size, (rank + 1) % size

    async def take_turn() -> float:
        if rank:
            await dist.recv(token, before)
        began = time.monotonic()
        await dist.send(token, after)
        if not rank:
            await dist.recv(token, before)
        return began

    async def take_turns() -> float:
        await take_turn()  # then all wait for the token
        return await take_turn()

    for step in (meet_others, *(dist.barrier for _ in range(barriers)), take_turns):
        test.recv()
        began, used = time.monotonic(), time.process_time()
        result = await step()
        test.send((result if step is take_turns else began, time.monotonic(), time.process_time() - used))
    test.recv()
    await dist.destroy_process_group()


def be_gloo_rank(test: Connection, alone: str, where: str, rank: int, size: int) -> None:
    """Join a world of gloo and pass a barrier as `be_rank` does, after a world of its own."""
    torch.set_num_threads(1)
    gloo.init_process_group("gloo", alone, rank=0, world_size=1)
    gloo.destroy_process_group()
    test.send("ready")
    meet_others: Any = functools.partial(gloo.init_process_group, "gloo", where, rank=rank, world_size=size)
    for step in (meet_others, gloo.barrier):
        test.recv()
        began, used = time.monotonic(), time.process_time()
        step()
        test.send((began, time.monotonic(), time.process_time() - used))
    test.recv()
    gloo.destroy_process_group()
