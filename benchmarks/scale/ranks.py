"""The ranks of the benchmark of growing worlds: tasks of one process, which measures itself."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from asyncdist.config import Config
from asyncdist.groups.group import Group
from asyncdist.testing.cluster import world_of

_RECEIVED = struct.Struct("128xQ")
"""The bytes that a TCP socket has received in order, in Linux's ``struct tcp_info``."""
_TIMEOUT = 300.0


def meet(test: Connection, transport: str, size: int, barriers: int) -> None:
    """Open a world of ``size`` ranks, pass barriers, and send what that took."""
    torch.set_num_threads(1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    test.send(asyncio.run(_meet(transport, size, barriers)))
    test.recv()


async def _meet(transport: str, size: int, barriers: int) -> dict[str, float]:
    async with world_of(2, transport=transport, timeout=_TIMEOUT) as first:
        await _barrier(first)  # what the first world of a process makes for all
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
    return found


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
