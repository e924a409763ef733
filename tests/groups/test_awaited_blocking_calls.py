"""An ``await`` of a call of the blocking API is refused by an error that names the API, before anything is sent."""

import asyncio
import inspect

import pytest
import torch

import asyncdist
import asyncdist.sync as blocking
from asyncdist.errors import UsageError
from asyncdist.sync import weights

pytestmark = pytest.mark.each_loop

ALONE = {"rank": 0, "world_size": 1}
OP = {"op": "sum"}


async def initialized():
    await blocking.init_process_group(store=blocking.HashStore(), **ALONE)


async def reduced_with_arguments():
    await blocking.all_reduce(*[torch.ones(2)], **OP)


async def await_call(name):
    """Await a call of the blocking API."""
    if name == "all_reduce":
        await blocking.all_reduce(torch.ones(2))
    elif name == "barrier":
        return [await blocking.barrier() for _ in range(2)]
    elif name == "recv":
        await blocking.recv(torch.ones(2))
    elif name == "agree":
        await blocking.agree()
    elif name == "all_gather_object":
        await blocking.all_gather_object([None], 1)
    elif name == "wait":
        await blocking.all_reduce(torch.ones(2), async_op=True).wait()
    else:
        await blocking.destroy_process_group()
    return None


async def adopted():
    await blocking.group.WORLD.adopt(blocking.State()).wait()


async def entered():
    async with blocking.process_group(store=blocking.HashStore(), **ALONE):
        raise AssertionError


@pytest.fixture
def world():
    blocking.init_process_group(store=blocking.HashStore(), **ALONE)
    yield
    blocking.destroy_process_group()


async def pass_call(name):
    """Pass a call of the blocking API to asyncio."""
    if name == "agree":
        await asyncio.wait_for(
            blocking.agree(True),
            timeout=1.0,
        )
    elif name == "all_gather_object":
        return asyncio.create_task(blocking.all_gather_object([None], 1)), 1
    elif name == "barrier":
        await asyncio.wait_for(blocking.barrier(), 1.0)
    else:
        await asyncio.gather(blocking.barrier(), asyncio.sleep(0))
    return None


async def calls_with_a_value(world):
    return await asyncio.wait_for(returned(blocking.agree()), 10.0), await returned(blocking.agree())


async def returned(value):
    return value


CALLS = ["all_reduce", "barrier", "recv", "agree", "all_gather_object", "wait", "destroy_process_group"]


@pytest.mark.parametrize("name", CALLS)
async def test_await_of_a_blocking_call_names_the_blocking_api(world, name):
    with pytest.raises(
        UsageError, match=rf"{name} is called with await at {__file__}:\d+, but this is the blocking API"
    ):
        await await_call(name)
    assert blocking.is_initialized()
    blocking.all_reduce(torch.ones(2))


@pytest.mark.parametrize("name", ["barrier", "agree", "all_gather_object", " barrier"])
async def test_blocking_call_that_is_passed_to_asyncio_names_the_blocking_api(world, name):
    with pytest.raises(
        UsageError, match=rf"{name.strip()} is called with await at {__file__}:\d+, but this is the block"
    ):
        await pass_call(name)


async def test_value_of_a_blocking_call_may_be_passed_to_a_coroutine(world):
    assert await calls_with_a_value(world) == (blocking.agree(), blocking.agree())


async def test_place_of_the_call_is_that_of_the_line(world):
    line = inspect.getsourcelines(reduced_with_arguments)[1] + 1
    with pytest.raises(UsageError, match=f":{line}, but this is the blocking API"):
        await reduced_with_arguments()
    with pytest.raises(UsageError, match="wait is called with await"):
        await adopted()


@pytest.mark.parametrize("call", [initialized, entered])
async def test_await_of_the_blocking_start_names_the_blocking_api(call):
    with pytest.raises(UsageError, match=r"process_group is called with await at .*, but this is the blocking API"):
        await call()
    assert not blocking.is_initialized()
    await asyncdist.init_process_group(store=blocking.HashStore(), **ALONE)
    with pytest.raises(UsageError, match="all_reduce is called with await at"):
        await blocking.all_reduce(torch.ones(2))
    await asyncdist.destroy_process_group()


async def test_await_of_a_blocking_call_of_weights_names_the_blocking_api():
    with blocking.TCPStore("127.0.0.1", 0, is_master=True) as store:
        job = f"asyncdist://127.0.0.1:{store.port}/weights"
        with weights.Publisher({"w": torch.ones(2)}, job=job) as publisher:
            with pytest.raises(UsageError, match=r"publish is called with await at .*, but this is the blocking API"):
                await publisher.publish()
            publisher.publish()


async def test_works_of_both_apis_are_awaited_as_before(world):
    tensor = torch.ones(2)
    assert await blocking.all_reduce(tensor, async_op=True) is tensor
    assert await blocking.group.WORLD.all_reduce(tensor, background=False) is tensor
    assert await asyncdist.all_reduce(tensor) is tensor
    blocking.all_reduce(tensor)
    assert await blocking.group.WORLD.agree() == (True, ())
