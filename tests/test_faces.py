"""Both faces: torch.distributed's names and arguments, one default world, and clear words for calls out of place."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys

import pytest
import torch

import asyncdist
from asyncdist import api, sync
from asyncdist.errors import (
    AlreadyInitializedError,
    AsyncdistError,
    GroupAbortedError,
    LoopThreadError,
    NotInitializedError,
    RendezvousError,
    TransportUnavailableError,
    UsageError,
)
from asyncdist.store import HashStore
from asyncdist.testing.cluster import world_of

NAMES = """
init_process_group destroy_process_group is_initialized is_available get_rank get_world_size get_backend new_group
new_subgroups new_subgroups_by_enumeration split_group get_process_group_ranks get_group_rank get_global_rank group
GroupMember process_group
all_reduce reduce broadcast all_gather all_gather_into_tensor all_gather_single gather scatter reduce_scatter
reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single barrier monitored_barrier all_reduce_coalesced
all_gather_coalesced all_gather_object gather_object scatter_object_list broadcast_object_list send_object_list
recv_object_list send recv isend irecv P2POp batch_isend_irecv
ReduceOp premul_sum Work Group TCPStore FileStore HashStore PrefixStore
""".split()
FACES = {"awaited": asyncdist, "blocking": sync}


@pytest.fixture(params=FACES)
def face(request):
    return FACES[request.param]


@pytest.fixture
def default_world():
    """A default world of one rank, made by the blocking face; it may be destroyed already at the end."""
    sync.init_process_group("inproc", store=HashStore(), rank=0, world_size=1, timeout=20)
    yield
    if sync.is_initialized():
        sync.destroy_process_group()


# -- names and arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(face, name):
    assert getattr(face, name) is not None
    assert name in face.__all__


def test_all_that_is_announced_exists(face):
    for name in face.__all__:
        assert hasattr(face, name)
    assert set(face.__all__) <= set(dir(face))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = face.no_such_name


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_torchs(face, name):
    """Where torch has the function, ours takes its arguments: by the same names, in the same order, as optional."""
    theirs, ours = getattr(torch.distributed, name, None), getattr(face, name)
    if theirs is None or not inspect.isfunction(inspect.unwrap(theirs)):
        return
    expected = [p for p in inspect.signature(theirs).parameters.values() if not p.name.startswith("_")]
    given = list(inspect.signature(ours).parameters.values())[: len(expected)]
    assert [p.name for p in given] == [p.name for p in expected]
    for mine, their in zip(given, expected, strict=True):
        if their.default is not inspect.Parameter.empty:
            assert mine.default is not inspect.Parameter.empty, mine.name
            assert getattr(mine.default, "name", mine.default) == getattr(their.default, "name", their.default)


def test_both_faces_take_the_same_arguments():
    for name in NAMES:
        if inspect.isroutine(getattr(sync, name)):
            ours, theirs = inspect.signature(getattr(sync, name)), inspect.signature(getattr(asyncdist, name))
            assert list(ours.parameters) == list(theirs.parameters), name


def test_the_package_alone_does_not_import_torch():
    program = "import asyncdist, sys; asyncdist.Config, dir(asyncdist); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# -- a world of one ----------------------------------------------------------------------------------


def test_a_blocking_program(default_world):
    dist = sync
    assert dist.is_available()
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "inproc")
    assert dist.group.WORLD is dist.GroupMember.WORLD is api.default_group()
    tensor = torch.arange(3.0)
    assert dist.all_reduce(tensor) is None
    assert dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True).wait()
    assert dist.reduce(tensor, dst=0) is None
    assert dist.reduce(tensor, group_dst=0, op=torch.distributed.ReduceOp.MAX) is None
    assert dist.broadcast(tensor, src=0, group=dist.group.WORLD) is None
    outputs = [torch.zeros(3)]
    dist.all_gather(outputs, tensor)
    dist.gather(tensor, outputs)
    dist.scatter(tensor, outputs)
    dist.all_to_all(outputs, [tensor])
    dist.all_gather_into_tensor(outputs[0], tensor)
    dist.reduce_scatter_tensor(output=outputs[0], input=tensor)
    dist.reduce_scatter(outputs[0], [tensor])
    dist.all_to_all_single(outputs[0], tensor, [3], [3])
    dist.all_reduce_coalesced([tensor, tensor])
    dist.all_gather_coalesced([[outputs[0]]], [tensor])
    objects = [None]
    dist.all_gather_object(objects, "x")
    dist.gather_object("x", objects)
    dist.scatter_object_list(objects, ["y"])
    dist.broadcast_object_list(objects)
    assert objects == ["y"]
    dist.barrier()
    dist.barrier(timeout=5)
    dist.monitored_barrier(timeout=5)
    assert tensor.tolist() == outputs[0].tolist() == [0, 1, 2]
    dist.destroy_process_group()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None


async def test_an_awaited_program():
    dist = asyncdist
    await dist.init_process_group(backend="gloo", store=HashStore(), rank=0, world_size=1, timeout=20)
    try:
        assert sync.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        tensor = torch.arange(3.0)
        for work in (
            dist.all_reduce(tensor),
            dist.all_reduce(tensor, async_op=True),
            dist.broadcast(tensor, 0),
            dist.reduce(tensor, 0, dist.ReduceOp.PRODUCT),
        ):
            assert isinstance(work, dist.Work)
            assert (await work) is tensor
        assert await dist.barrier() is None
        objects = [None]
        assert await dist.all_gather_object(objects, {"a": 1}) is objects
        # The blocking face, on the loop that would have to do the work.
        with pytest.raises(LoopThreadError, match="use `await` instead"):
            sync.all_reduce(tensor)
        with pytest.raises(LoopThreadError):
            sync.barrier()
        await asyncio.to_thread(sync.all_reduce, tensor)
    finally:
        await dist.destroy_process_group()
    assert not dist.is_initialized()


async def test_what_one_face_has_begun_the_other_may_use(default_world):
    """A world of the blocking face goes on by the runtime's loop, so it may be awaited in any."""
    tensor = torch.ones(2)
    assert (await asyncdist.all_reduce(tensor)) is tensor
    sync.all_reduce(tensor)
    work = sync.all_reduce(tensor, async_op=True)
    assert (await work) is tensor
    await asyncdist.destroy_process_group()
    assert not sync.is_initialized()


async def test_only_another_thread_may_destroy_an_awaited_world_by_blocking():
    await asyncdist.init_process_group("inproc", store=HashStore(), rank=0, world_size=1, timeout=20)
    with pytest.raises(LoopThreadError):
        sync.destroy_process_group()
    assert asyncdist.is_initialized()
    await asyncio.to_thread(sync.destroy_process_group)
    assert not asyncdist.is_initialized()


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_call_in_a_loop_of_its_own(transport, new_loop):
    """``asyncio.run`` for each: the store's connection ends with the loop that it was made on, the world does not."""

    def run(make_coroutine):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(make_coroutine())

    async def init():
        await asyncdist.init_process_group(transport, store=HashStore(), rank=0, world_size=1, timeout=20)

    async def use():
        return (await asyncdist.all_reduce(torch.ones(2))).tolist()

    async def destroy():
        await asyncdist.destroy_process_group()

    for end in (lambda: run(destroy), sync.destroy_process_group):
        run(init)
        assert run(use) == run(use) == [1, 1]
        sync.all_reduce(torch.ones(2))
        end()
        assert not sync.is_initialized()


# -- calls out of place ------------------------------------------------------------------------------

USES = {
    "all_reduce": lambda dist: dist.all_reduce(torch.ones(1)),
    "barrier": lambda dist: dist.barrier(),
    "isend": lambda dist: dist.isend(torch.ones(1), 1),
    "recv": lambda dist: dist.recv(torch.ones(1)),
    "object": lambda dist: dist.all_gather_object([None], 1),
    "P2POp": lambda dist: dist.P2POp(dist.isend, torch.ones(1), 1),
    "get_rank": lambda dist: dist.get_rank(),
    "get_world_size": lambda dist: dist.get_world_size(),
    "get_backend": lambda dist: dist.get_backend(),
    "new_group": lambda dist: dist.new_group([0]),
    "new_subgroups": lambda dist: dist.new_subgroups(1),
    "split_group": lambda dist: dist.split_group(None, [[0]]),
    "ranks": lambda dist: dist.get_process_group_ranks(None),
}


@pytest.mark.parametrize("name", USES)
def test_before_there_is_a_world_and_after(face, name):
    assert not face.is_initialized()
    assert face.group.WORLD is None
    with pytest.raises(NotInitializedError, match=r"no process group: call init_process_group\(\) first"):
        USES[name](face)


def test_destroying_what_is_not_there(face):
    async def destroy():
        result = face.destroy_process_group()
        if face is asyncdist:
            await result

    with pytest.raises(NotInitializedError):
        asyncio.run(destroy())


def test_a_second_init(default_world):
    for init in (
        lambda: sync.init_process_group("inproc", store=HashStore(), rank=0, world_size=1),
        lambda: asyncio.run(asyncdist.init_process_group("inproc", store=HashStore(), rank=0, world_size=1)),
    ):
        with pytest.raises(AlreadyInitializedError, match=r"call destroy_process_group\(\) first"):
            init()
    sync.all_reduce(torch.ones(1))
    sync.destroy_process_group()
    sync.init_process_group("tcp", store=HashStore(), rank=0, world_size=1, timeout=20)
    assert sync.get_backend() == "tcp"


async def test_a_second_init_while_the_first_is_under_way():
    store = HashStore()
    first = asyncio.ensure_future(asyncdist.init_process_group("inproc", store=store, rank=0, world_size=1, timeout=20))
    await asyncio.sleep(0)
    with pytest.raises(AlreadyInitializedError):
        await asyncdist.init_process_group("inproc", store=store, rank=0, world_size=1)
    await first
    await asyncdist.destroy_process_group()


async def test_an_init_that_fails_or_is_cancelled_leaves_nothing():
    for wrong, error in (
        ({"backend": "carrier-pigeon", "store": HashStore(), "rank": 0, "world_size": 1}, TransportUnavailableError),
        ({"backend": "inproc", "store": HashStore(), "rank": 3, "world_size": 1}, AsyncdistError),
        ({"backend": "inproc", "store": HashStore(), "rank": 0, "world_size": 2, "timeout": 0.2}, RendezvousError),
        ({"init_method": "telepathy://", "rank": 0, "world_size": 1}, AsyncdistError),
    ):
        with pytest.raises(error):
            await asyncdist.init_process_group(**wrong)
        assert not asyncdist.is_initialized()
    waiting = asyncio.ensure_future(asyncdist.init_process_group("inproc", store=HashStore(), rank=0, world_size=2))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncdist.init_process_group("inproc", store=HashStore(), rank=0, world_size=1, timeout=20)
    await asyncdist.destroy_process_group()


def test_an_unknown_transport_is_answered_with_those_there_are():
    with pytest.raises(TransportUnavailableError, match=r"no transport 'pigeon'; there are .*inproc.*tcp"):
        sync.init_process_group("pigeon", store=HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    "backend", [None, "auto", "gloo", "nccl", "mpi", "NCCL", "cpu:gloo,cuda:nccl", "cuda:nccl", "tcp", "cpu:tcp"]
)
def test_the_names_of_torchs_back_ends_are_taken(backend):
    sync.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=20)
    try:
        assert "tcp" in sync.get_backend()
        sync.barrier()
    finally:
        sync.destroy_process_group()


def test_a_group_after_its_world_was_destroyed(default_world):
    world, part = sync.group.WORLD, sync.new_group([0])
    sync.destroy_process_group(part)
    with pytest.raises(NotInitializedError, match="was destroyed"):
        part.all_reduce(torch.ones(1))
    assert world.all_reduce(torch.ones(1)).wait()
    sync.destroy_process_group(sync.group.WORLD)
    for group in (world, part):
        with pytest.raises(NotInitializedError, match="was destroyed: make a new one for barrier"):
            sync.barrier(group=group)


async def test_what_is_pending_when_the_world_is_destroyed(transport):
    async with world_of(2, transport=transport) as (zero, one):
        works = one.all_reduce(torch.ones(3)), one.recv(torch.ones(3), 0)
        await one.world.close()
        for work in works:
            with pytest.raises(GroupAbortedError, match="was destroyed while"):
                await work
        async with asyncio.timeout(10):
            with pytest.raises(AsyncdistError, match="rank 1"):
                await zero.all_reduce(torch.ones(3))


# -- worlds of one's own -----------------------------------------------------------------------------


def test_worlds_beside_the_default_one(default_world):
    with sync.process_group("inproc", store=HashStore(), rank=0, world_size=1, timeout=20) as one:
        with sync.process_group("tcp", store=HashStore(), rank=0, world_size=1, timeout=20, group_name="two") as two:
            for group in (one, two, None):
                sync.all_reduce(torch.ones(2), group=group)
            assert two.name == "two"
            assert sync.get_backend(two) == "tcp"
        with pytest.raises(NotInitializedError):
            two.barrier()
        sync.barrier(group=one)
    sync.barrier()


async def test_awaited_worlds_of_ones_own():
    store = HashStore()

    async def rank(number):
        async with asyncdist.process_group("inproc", store=store, rank=number, world_size=3, timeout=20) as group:
            tensor = torch.full((2,), float(number))
            await asyncdist.all_reduce(tensor, group=group)
            await asyncdist.broadcast(tensor, src=2, group=group)
            assert asyncdist.get_rank(group) == number
            return tensor.tolist()

    assert await asyncio.gather(*map(rank, range(3))) == [[3.0, 3.0]] * 3
    assert not asyncdist.is_initialized()


async def test_a_world_whose_user_fails_is_closed():
    with pytest.raises(ZeroDivisionError):
        async with asyncdist.process_group("tcp", store=HashStore(), rank=0, world_size=1, timeout=20) as group:
            raise ZeroDivisionError
    with pytest.raises(NotInitializedError):
        group.barrier()


# -- the faces over several ranks --------------------------------------------------------------------


def test_blocking_calls_return_nothing_and_started_ones_a_work(together, transport):
    def rank(group):
        tensor = torch.full((3,), float(group.rank()))
        assert sync.all_reduce(tensor, group=group) is None
        work = sync.all_reduce(tensor, group=group, async_op=True)
        assert isinstance(work, sync.Work)
        assert work.wait()
        assert sync.broadcast(tensor, 1, group, async_op=True).result is not None
        assert sync.monitored_barrier(group) is None
        assert sync.all_gather_single(torch.zeros(6), tensor, group) is None
        assert sync.isend(tensor, 1 - group.rank(), group).wait() if group.rank() else sync.recv(tensor, 1, group) == 1
        return tensor.tolist()

    assert together(2, rank, transport=transport) == [[2.0] * 3] * 2


async def test_roots_are_global_ranks(transport):
    """In a group of other ranks, src and dst are still those of the world; group_src and group_dst are the group's."""
    async with world_of(4, transport=transport) as world:
        members = [3, 1, 2]
        groups = {rank: world[rank].world.new_group(members) for rank in members}

        async def on_all(call):
            return await asyncio.gather(*(call(rank, group) for rank, group in groups.items()))

        async def broadcast(root, named):
            tensors = {rank: torch.tensor([float(rank)]) for rank in members}
            await on_all(lambda rank, group: asyncdist.broadcast(tensors[rank], group=group, **named))
            assert all(tensor.item() == root for tensor in tensors.values())

        async def reduce(root, named):
            tensors = {rank: torch.tensor([float(rank)]) for rank in members}
            await on_all(lambda rank, group: asyncdist.reduce(tensors[rank], group=group, **named))
            assert {rank: tensor.item() for rank, tensor in tensors.items()} == {1: 1, 2: 2, 3: 3} | {root: 6}

        async def gather(root, named):
            rooms = [torch.zeros(1) for _ in members]

            def part(rank, group):
                own = torch.tensor([float(rank)])
                return asyncdist.gather(own, rooms if rank == root else None, group=group, **named)

            await on_all(part)
            assert [room.item() for room in rooms] == members

        for place, root in enumerate(members):
            await broadcast(root, {"src": root})
            await broadcast(root, {"group_src": place})
            for call in (reduce, gather):
                await call(root, {"dst": root})
                await call(root, {"group_dst": place})
        for wrong in ({"src": 0}, {"src": 1, "group_src": 1}, {}):
            with pytest.raises(UsageError):
                asyncdist.broadcast(torch.ones(1), group=groups[1], **wrong)


async def test_ranks_outside_a_group_are_told(transport):
    async with world_of(2, transport=transport) as (zero, _):
        outside = zero.world.new_group([1])
        assert outside is None
        nobody = asyncdist.GroupMember.NON_GROUP_MEMBER
        assert repr(nobody) == "GroupMember.NON_GROUP_MEMBER"
        assert asyncdist.get_rank(nobody) == asyncdist.get_world_size(nobody) == -1
        for face in FACES.values():
            for call in (
                lambda face: face.all_reduce(torch.ones(1), group=nobody),
                lambda face: face.barrier(nobody),
                lambda face: face.irecv(torch.ones(1), 1, nobody),
                lambda face: face.get_process_group_ranks(nobody),
            ):
                with pytest.raises(UsageError, match="this rank is not in the group"):
                    call(face)
