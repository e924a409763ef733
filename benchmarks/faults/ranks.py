"""The ranks of a benchmark of failures. A rank is forked by a nursery, and paced by `benchmark` over a pipe.

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncdist import sync
from asyncdist.elastic import session as elastic
from asyncdist.errors import GroupError
from benchmarks.laboratory import HOST

torch.set_num_threads(1)

_WARM_UPS = 3
STEP_SECONDS = 0.02
"""The duration of the computation in each step of `train`."""
_GRADIENTS = 1 << 18


def wait_with_asyncdist(test: Connection, where: str, rank: int, size: int) -> None:
    """Wait in an all-reduce for a rank that fails, and go on without it.

    Sends ``"ready"``, then what the rank was told by the failure: (type, time), and when it has finished an all-reduce in
    the new group: (type or None, time).
    """
    sync.init_process_group(init_method=where, rank=rank, world_size=size, timeout=300.0)
    tensor = torch.ones(1)
    for _ in range(_WARM_UPS):
        sync.all_reduce(tensor)
    test.send("ready")
    _begin(test)
    try:
        sync.all_reduce(tensor)
    except GroupError as error:
        test.send((type(error).__name__, time.monotonic()))
    try:
        sync.regroup(timeout=60.0)
        sync.all_reduce(tensor)
    except GroupError as error:
        test.send((type(error).__name__, time.monotonic()))
    else:
        test.send((None, time.monotonic()))
    test.recv()
    os._exit(0)


def wait_with_gloo(test: Connection, where: str, rank: int, size: int) -> None:
    """Wait in an all-reduce of gloo for a rank that fails; end with the error, as a training script does."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    tensor = torch.ones(1)
    for _ in range(_WARM_UPS):
        dist.all_reduce(tensor)
    test.send("ready")
    _begin(test)
    try:
        dist.all_reduce(tensor)
    except RuntimeError as error:
        test.send((type(error).__name__, time.monotonic()))
    os._exit(1)


def _begin(test: Connection) -> None:
    """Wait until the test says that all are ready, and for how many seconds this rank holds its interpreter."""
    if seconds := test.recv():
        test.send(time.monotonic())
        ctypes.PyDLL(None).poll(None, 0, round(1000 * seconds))


def join(test: Connection, job: str, min_size: int, start_size: int) -> None:
    """Join a job when the test says so, send (time of the call, time of the first group), and stay until the end.

    The members look for newcomers every few milliseconds, as in training with short steps.
    """
    asyncio.run(_join(test, job, min_size, start_size))


async def _join(test: Connection, job: str, min_size: int, start_size: int) -> None:
    test.send("ready")
    test.recv()
    called = time.monotonic()
    async with elastic.join(job, min_size=min_size, start_size=start_size, timeout=60.0) as session:
        async for group in session.generations():
            if called:
                test.send((called, time.monotonic()))
                called = 0.0
            while not group.changed:
                async with group.step():
                    await asyncio.sleep(STEP_SECONDS / 4)


def train(test: Connection, job: str, min_size: int, start_size: int) -> None:
    """Train until the process is killed; send the time and the number of members of each committed step.

    A step takes `STEP_SECONDS` of computation, which is a sleep, so that ranks may outnumber cores, and an all-reduce of
    gradients of 1 MiB.
    """
    gradients = torch.ones(_GRADIENTS)
    with elastic.join(job, min_size=min_size, start_size=start_size, timeout=60.0) as session:
        for group in session.generations():
            while not group.changed:
                with group.step() as step:
                    time.sleep(STEP_SECONDS)
                    group.all_reduce(gradients, sync.ReduceOp.AVG, background=False).result()
                if step.committed:
                    test.send((time.monotonic(), group.size()))


# -- under torchft -----------------------------------------------------------------------------------

_MOST_PROCESSES = 1000
"""The processes of a job, also those that follow killed ones. gloo needs their number, and another rank for each."""


def serve_lighthouse(test: Connection, heartbeat: float) -> None:
    """Serve a lighthouse that forgets replicas after ``heartbeat`` seconds, and send its port."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, heartbeat_timeout_ms=round(1000 * heartbeat))
    test.send(int(server.address().rpartition(":")[2]))
    test.recv()


def _manager(where: str, backend: str, lighthouse: str, limit: float, number: int, own: str = HOST) -> Any:
    """Return the manager of a replica of one rank. ``number`` is that of the process, and ``own`` its host's address.

    Operations time out after ``limit`` seconds, so that gloo, too, notices a silent rank after them; 60 is the default.
    """
    import torch.distributed
    from torchft import Manager

    dist: Any = torch.distributed
    dist.init_process_group(
        backend, init_method=where, rank=number, world_size=_MOST_PROCESSES, enable_reconfigure=True,
        timeout=timedelta(seconds=limit),
    )  # fmt: skip
    store = dist.TCPStore(own, 0, is_master=True, wait_for_workers=False)
    return Manager(
        pg=dist.group.WORLD, min_replica_size=1, use_async_quorum=False, replica_id=f"replica_{number}", rank=0,
        load_state_dict=bool, state_dict=dict, lighthouse_addr=lighthouse, world_size=1,
        store_addr=own, store_port=store.port, hostname=own, timeout=timedelta(seconds=limit),
        # The state of a first step would be fetched by the machine's name, which other namespaces take for themselves.
        init_sync=False,
    )  # fmt: skip


def wait_under_torchft(
    test: Connection, where: str, rank: int, size: int, backend: str, lighthouse: str, limit: float, own: str
) -> None:
    """Do as `wait_with_asyncdist` does, with a group that torchft's manager changes."""
    manager, tensor = _manager(where, backend, lighthouse, limit, rank, own), torch.ones(1)
    for _ in range(_WARM_UPS):
        manager.start_quorum()
        while manager.num_participants() < size:
            manager.start_quorum()
        manager.allreduce(tensor).wait()
        manager.should_commit()
    manager.start_quorum()
    test.send("ready")
    _begin(test)
    manager.allreduce(tensor).wait()
    test.send((str(manager.errored()), time.monotonic()))
    try:
        while not manager.should_commit():
            manager.start_quorum()
            manager.allreduce(tensor).wait()
    # The lighthouse does not answer as long as other replicas wait for their all-reduce, or cannot be reached.
    except (TimeoutError, RuntimeError) as error:
        test.send((type(error).__name__, time.monotonic()))
    else:
        test.send((None, time.monotonic()))
    test.recv()
    os._exit(0)


def join_under_torchft(
    test: Connection, where: str, number: int, backend: str, lighthouse: str, limit: float, least: int, begun: int
) -> None:
    """Do as `join` does, under torchft, with a first group of ``begun``; then send (time, members) of each change."""
    test.send("ready")
    test.recv()
    called, last = time.monotonic(), 0
    for now, members in _steps_under_torchft(where, number, backend, lighthouse, limit, STEP_SECONDS / 4, 1):
        if called and members >= begun:
            test.send((called, now))
            called = 0.0
        elif not called and members != last:
            test.send((now, members))
        last = members


def train_under_torchft(
    test: Connection, where: str, number: int, backend: str, lighthouse: str, limit: float, least: int, begun: int
) -> None:
    """Do as `train` does, under torchft."""
    for committed in _steps_under_torchft(where, number, backend, lighthouse, limit, STEP_SECONDS, _GRADIENTS):
        test.send(committed)


def _steps_under_torchft(
    where: str, number: int, backend: str, lighthouse: str, limit: float, seconds: float, count: int
) -> Iterator[tuple[float, int]]:
    """Train without end; yield the time and the number of members of each committed step."""
    manager, gradients = _manager(where, backend, lighthouse, limit, number), torch.ones(count)
    while True:
        manager.start_quorum()
        time.sleep(seconds)
        manager.allreduce(gradients).wait()
        if manager.should_commit():
            yield time.monotonic(), manager.num_participants()
