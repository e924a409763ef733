"""Worlds: the ranks must agree on version and settings; timeouts, transports and the lifetime of groups."""

import asyncio
import contextlib
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import asyncdist
import asyncdist.sync
from asyncdist.config import Config
from asyncdist.errors import (
    LoopThreadError,
    OperationTimeoutError,
    RendezvousError,
    TransportUnavailableError,
    UsageError,
)
from asyncdist.groups import introductions
from asyncdist.groups.world import open_world
from asyncdist.kernel.devices import group as device_groups
from asyncdist.kernel.engine.work import Work
from asyncdist.store import HashStore
from asyncdist.testing.cluster import world_of
from asyncdist.torch_backend.callback_order import order_of
from tests.support.devices import PretendStreams, part_on


async def refused(*opened):
    """Await calls of `open_world` that must be refused, and return the messages of their errors."""
    outcomes = await asyncio.wait_for(asyncio.gather(*opened, return_exceptions=True), 60)
    assert [type(outcome) for outcome in outcomes] == [RendezvousError] * len(outcomes)
    return [str(outcome) for outcome in outcomes]


async def test_set_timeout_applies_to_later_operations(transport, monkeypatch):
    async with world_of(2, transport=transport, timeout=20) as (group, _):
        monkeypatch.setattr("asyncdist.groups.default_world._world", group.world)
        apart = group.world.new_group([0, 1])
        before = group.recv(torch.ones(1), 1)
        asyncdist.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(OperationTimeoutError, match=r"after 0\.2 s"):
            await group.recv(torch.ones(1), 1, tag=1)
        assert before.exception() is not None  # the group has failed
        assert apart.timeout == 20
        asyncdist.set_timeout(0.2, apart)
        with pytest.raises(OperationTimeoutError, match=r"after 0\.2 s"):
            await apart.recv(torch.ones(1), 1)


async def test_world_drops_destroyed_groups(transport):
    async with world_of(2, transport=transport) as worlds:
        for _ in range(5):
            groups = [group.world.new_group([0, 1]) for group in worlds]
            await asyncio.gather(*(group.barrier() for group in groups))
            for group in groups:
                group.close()
        assert [group.world.groups for group in worlds] == [[group] for group in worlds]


def for_callbacks(group):
    order = order_of(group)
    return order.within(order, group)[0]


@pytest.mark.parametrize(
    "make",
    [lambda group: group._sibling("a test"), for_callbacks, lambda group: part_on(group, torch.device("cuda", 0))],
    ids=["sibling", "for callbacks", "on a device"],
)
async def test_making_a_group_runs_no_callbacks(make, monkeypatch, eventually):
    """Its caller may hold a lock that a callback needs, such as that for the first use of a device."""
    monkeypatch.setattr(device_groups, "CudaStreams", lambda device: PretendStreams())
    async with world_of(2, transport="inproc") as (group, _):
        ran = []
        group.endpoint.progress.post(lambda: group.endpoint.finished.append(lambda: ran.append(True)))
        make(group)
        assert not ran
        await eventually(lambda: ran)


async def test_cancelled_close_of_a_world_closes_its_store_too(tmp_path, monkeypatch):
    """A notice that has not been sent delays the close. The fixtures look for the sockets of the store."""
    world = await open_world(backend="inproc", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=60)
    monkeypatch.setattr(world.endpoint, "notices_flushed", lambda: Work(world.endpoint.progress))
    closing = asyncio.create_task(world.close())
    await asyncio.sleep(0)
    assert closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert world.meeting.server.num_connections == 0


@pytest.mark.parametrize(
    ("variable", "common", "other"),
    [
        ("ASYNCDIST_TCP_LANES", "1", "2"),
        ("ASYNCDIST_STRIPE_NBYTES", "1048576", "4096"),
        ("ASYNCDIST_SEGMENT_NBYTES", "1048576", "4096"),
        ("ASYNCDIST_SHM_AREA_NBYTES", "1048576", "65536"),
        ("ASYNCDIST_DEVICE_PIECE_NBYTES", "4194304", "65536"),
        ("ASYNCDIST_ALGORITHM", "all_reduce=doubling", "all_reduce=ring"),
    ],
)
async def test_different_settings_of_ranks_are_refused_by_name(variable, common, other):
    store = HashStore()
    configs = [Config.from_environment({variable: value}) for value in (common, common, other)]
    messages = await refused(
        *(
            open_world(backend="inproc", store=store, rank=rank, world_size=3, timeout=60, config=config)
            for rank, config in enumerate(configs)
        )
    )
    shown = [repr(int(value) if value.isdigit() else value) for value in (common, other)]
    assert f"rank 2 runs with {variable}={shown[1]}, but rank 0 with {shown[0]}; " in messages[0]
    assert f"rank 2 runs with {variable}={shown[1]}, but rank 1 with {shown[0]}; " in messages[1]
    assert f"rank 0 runs with {variable}={shown[0]}, but rank 2 with {shown[1]}; " in messages[2]


@pytest.mark.parametrize(
    ("backend", "hosts", "used"),
    [
        ("shm,tcp", "aaa", ["shm", "shm", "shm"]),
        ("shm,tcp", "aab", ["shm,tcp", "shm,tcp", "shm,tcp"]),
        ("tcp", "aaa", ["tcp", "tcp", "tcp"]),
        ("auto", "a", ["auto"]),
        ("cpu:gloo,cuda:nccl", "a", ["cpu:gloo,cuda:nccl"]),
    ],
)
async def test_get_backend_returns_the_used_transports_which_may_be_requested(backend, hosts, used):
    async with world_of(len(hosts), transport=backend, hosts=hosts) as groups:
        assert [asyncdist.get_backend(group) for group in groups] == used
    assert all(asyncdist.is_backend_available(name) for name in used)
    store = HashStore()
    configs = [Config(host=host) for host in hosts]
    again = [
        open_world(backend=name, store=store, rank=rank, world_size=len(hosts), timeout=60, config=configs[rank])
        for rank, name in enumerate(used)
    ]
    worlds = await asyncio.gather(*again)
    await asyncio.gather(*(world.group.all_reduce(torch.ones(3)) for world in worlds))
    assert [asyncdist.get_backend(world.group) for world in worlds] == used
    await asyncio.gather(*(world.close() for world in worlds))


@pytest.mark.parametrize(
    ("backend", "used"), [(None, "tcp"), ("gloo", "tcp"), ("asyncdist", "tcp"), ("auto", "auto"), ("inproc", "inproc")]
)
async def test_variable_selects_the_transport_unless_the_argument_does(backend, used):
    config = Config.from_environment({"ASYNCDIST_TRANSPORT": "tcp"})
    world = await open_world(backend=backend, store=HashStore(), rank=0, world_size=1, config=config)
    assert asyncdist.get_backend(world.group) == used
    await world.close()


async def test_unknown_transport_is_refused():
    with pytest.raises(
        TransportUnavailableError, match=r"there is no transport 'smh'; .* leave the name out, or give 'auto'"
    ):
        await open_world(backend="tcp, smh", store=HashStore(), rank=0, world_size=2, timeout=60)
    assert not asyncdist.is_backend_available("tcp,smh")
    assert not asyncdist.is_backend_available("cpu:")


@pytest.mark.parametrize(
    ("variable", "value", "error", "said"),
    [
        ("ASYNCDIST_ALGORITHM", "all_reduce=rng", UsageError, "there is no schedule 'rng' for all_reduce"),
        ("ASYNCDIST_TRANSPORT", "smh", TransportUnavailableError, "there is no transport 'smh'; there are inproc"),
    ],
)
async def test_settings_with_unknown_names_are_refused_before_the_rendezvous(variable, value, error, said):
    config = Config.from_environment({variable: value})
    with pytest.raises(error, match=f"^{variable}='{value}': {said}"):
        await open_world(store=HashStore(), rank=0, world_size=2, timeout=60, config=config)


async def test_different_versions_of_ranks_are_refused(monkeypatch):
    agreed = introductions.compared
    newer = {"version": "99.0"}
    monkeypatch.setattr(
        introductions, "compared", lambda config: agreed(config) | (newer if config.host == "host of rank 1" else {})
    )
    store, options = HashStore(), {"backend": "tcp", "world_size": 2, "timeout": 60}
    messages = await refused(
        *(
            open_world(store=store, rank=rank, config=Config(host=f"host of rank {rank}"), **options)
            for rank in range(2)
        )
    )
    assert messages[0].startswith(f"rank 1 runs asyncdist 99.0, but rank 0 asyncdist {asyncdist.__version__}; install")
    assert messages[1].startswith(f"rank 0 runs asyncdist {asyncdist.__version__}, but rank 1 asyncdist 99.0; install")


def test_blocking_destroy_refuses_the_loop_that_opened_the_world_and_works_elsewhere():
    async def run():
        await asyncdist.init_process_group(store=HashStore(), rank=0, world_size=1)
        with pytest.raises(LoopThreadError, match="destroy_process_group on the event loop's own thread"):
            asyncdist.sync.destroy_process_group()
        assert asyncdist.is_initialized()
        await asyncio.to_thread(asyncdist.sync.destroy_process_group)
        assert not asyncdist.is_initialized()

    asyncio.run(run())
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(asyncdist.init_process_group(store=HashStore(), rank=0, world_size=1))
        asyncdist.sync.destroy_process_group()
    assert not asyncdist.is_initialized()


@pytest.mark.parametrize("opened", ["by the blocking API", "by a loop in another thread"])
def test_awaited_destroy_closes_a_world_of_another_loop(opened):
    alone = {"rank": 0, "world_size": 1}

    async def with_thread():
        await asyncdist.init_process_group(store=HashStore(), **alone)
        await asyncio.to_thread(asyncio.run, asyncdist.destroy_process_group())

    if opened == "by a loop in another thread":
        asyncio.run(with_thread())
    else:
        asyncdist.sync.init_process_group(store=HashStore(), **alone)
        asyncio.run(asyncdist.destroy_process_group())
    assert not asyncdist.is_initialized()


OVER_TWO_LOOPS = """
import asyncio, importlib, sys
from pathlib import Path
import torch
import asyncdist

new_loop = importlib.import_module(sys.argv[3]).new_event_loop
calls = [Path(sys.argv[4], str(number)) for number in range(2)]

async def begin():
    await asyncdist.init_process_group("tcp", sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=60)
    await asyncdist.all_reduce(torch.ones(3))

async def reduce():
    tensor = torch.ones(3)
    called = calls.pop()
    # Rank 1 calls later, so that the call of rank 0 is pending when it returns.
    while asyncdist.get_rank() == 1 and not called.exists():
        await asyncio.sleep(0.001)
    work = asyncdist.all_reduce(tensor)
    called.touch()
    await work
    assert tensor.tolist() == [2.0] * 3

for part in (begin, reduce, reduce, asyncdist.destroy_process_group):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(part())
    print(asyncdist.is_initialized())
"""


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_world_works_and_closes_after_the_loop_that_opened_it_has_ended(tmp_path, kind):
    pytest.importorskip(kind)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OVER_TWO_LOOPS, f"file://{tmp_path}/meeting", str(rank), kind, tmp_path],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [rank.communicate(timeout=60)[0].split() for rank in ranks] == [["True", "True", "True", "False"]] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
