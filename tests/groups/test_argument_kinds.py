"""Arguments of the wrong kind, and forgotten awaits, end in a UsageError that says what to write."""

import asyncio
import gc
import inspect
import warnings
from datetime import timedelta

import pytest
import torch

import asyncdist
import asyncdist.sync as dist
from asyncdist.errors import NotInitializedError, UsageError

ALONE = {"rank": 0, "world_size": 1}
ONES = torch.ones(2)


@pytest.fixture
def world():
    """The default world, of one rank."""
    dist.init_process_group(store=dist.HashStore(), **ALONE)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": 7}, "backend is a text such as 'shm,tcp' or 'auto', not 7"),
        ({"backend": ["shm"]}, "backend is a text"),
        ({"init_method": 7, "store": None}, "init_method is a text such as 'tcp://host:port', not 7"),
        ({"timeout": "soon"}, "a timeout is a number of seconds from 0 up, or a timedelta, not 'soon'"),
        ({"timeout": [1]}, "a timeout is a number"),
        ({"world_size": "1"}, r"world_size is a whole number, not '1': pass int\(...\) of that text"),
        ({"rank": 0.0}, "rank is a whole number, not 0.0"),
        ({"store": 7}, "store is a store such as asyncdist.TCPStore, not 7"),
        ({"store": "tcp://127.0.0.1:1"}, "pass an address as init_method="),
        ({"group_name": 7}, "group_name is a text"),
    ],
)
async def test_init_process_group_refuses_arguments_of_the_wrong_kind(arguments, message):
    given = {"store": dist.HashStore(), **ALONE, **arguments}
    with pytest.raises(UsageError, match=message):
        dist.init_process_group(**given)
    with pytest.raises(UsageError, match=message):
        await asyncdist.init_process_group(**given)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.all_reduce(7), "all_reduce on group 'world', rank 0: a tensor or numpy array is needed"),
        (lambda: dist.all_reduce(ONES, group=7), "group is a group such as"),
        (lambda: dist.get_rank("a"), "group is a group such as"),
        (lambda: dist.destroy_process_group(7), "group is a group such as"),
        (lambda: dist.broadcast(ONES, group_src="0"), "src is a whole number, not '0'"),
        (lambda: dist.all_reduce_coalesced(7), "a tensor or numpy array is needed"),
        (lambda: dist.all_to_all_single(ONES.clone(), ONES, 7, 7), "output_split_sizes is a list of numbers of rows"),
        (lambda: dist.all_to_all_single(ONES.clone(), ONES, [2.0], [2.0]), "an entry of output_split_sizes is a whole"),
        (lambda: dist.all_gather_object(7, 1), "the output list is a list, into which"),
        (lambda: dist.gather_object(1, 7), "object_gather_list is a list"),
        (lambda: dist.scatter_object_list(7, [1]), "scatter_object_output_list is a list"),
        (lambda: dist.scatter_object_list([None], 7), "is not a list but 7"),
        (lambda: dist.broadcast_object_list("ab"), "object_list is a list"),
        (lambda: dist.barrier(timeout="soon"), "a timeout is a number"),
        (lambda: dist.send(ONES, 0, tag="a"), "a tag is a whole number, not 'a'"),
        (lambda: dist.batch_isend_irecv(7), "takes a list of P2POp"),
        (lambda: dist.new_group(7), "ranks is a list of ranks, not 7"),
        (lambda: dist.new_group(["0"]), "a rank is a whole number, not '0'"),
        (lambda: dist.new_group(group_desc=7), "the name of a group is a text"),
        (lambda: dist.new_subgroups("1"), "group_size is a whole number"),
        (lambda: dist.new_subgroups_by_enumeration([7]), "a subgroup is a list of ranks, not 7"),
        (lambda: dist.split_group(None, 7), "split_ranks is a list of lists of ranks, not 7"),
        (lambda: dist.get_global_rank(None, "0"), "group_rank is a whole number"),
        (lambda: dist.set_timeout("soon"), "a timeout is a number"),
        (lambda: dist.DistributedDataParallel(7), "wraps a torch.nn.Module, not 7"),
        (lambda: dist.DistributedSampler(7), "needs a dataset with a length, not 7"),
        (lambda: dist.DistributedSampler([1], num_replicas="2", rank=0), "num_replicas is a whole number"),
        (lambda: dist.TCPStore(7, 7), "takes a host name and a whole number as port, not 7 and 7"),
        (lambda: dist.TCPStore("127.0.0.1", "x"), "takes a host name and a whole number as port"),
        (lambda: dist.FileStore(7), "takes the path of a file, not 7"),
        (lambda: dist.PrefixStore(7, 7), "takes a prefix and a store"),
    ],
)
def test_call_with_an_argument_of_the_wrong_kind_is_refused_and_the_group_stays_usable(world, call, message):
    with pytest.raises(UsageError, match=message):
        call()
    dist.all_reduce(ONES.clone())
    dist.monitored_barrier(timeout=timedelta(seconds=10))


def test_next_call_names_the_line_of_a_forgotten_await():
    line = inspect.currentframe().f_lineno + 1
    forgotten = asyncdist.init_process_group(store=dist.HashStore(), **ALONE)
    for call in (asyncdist.get_rank, lambda: asyncdist.all_reduce(ONES)):
        with pytest.raises(NotInitializedError) as caught:
            call()
        assert f"was called at {__file__}:{line} and never awaited: write `await dist.init_pro" in str(caught.value)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        del forgotten
        gc.collect()
    assert [str(each.message) for each in caught_warnings] == ["coroutine 'init_process_group' was never awaited"]
    with pytest.raises(UsageError, match="backend is a text"):
        dist.init_process_group(7)  # refused before the rendezvous
    with pytest.raises(NotInitializedError, match=r"^no process group: call init_process_group\(\) first\nsee "):
        asyncdist.get_rank()


async def test_call_during_the_initialization_says_that_it_has_not_completed():
    opening = asyncio.ensure_future(asyncdist.init_process_group(store=asyncdist.HashStore(), **ALONE))
    await asyncio.sleep(0)
    with pytest.raises(NotInitializedError, match=r"init_process_group\(\) has not completed"):
        asyncdist.get_rank()
    await opening
    assert asyncdist.get_rank() == 0
    await asyncdist.destroy_process_group()


def test_blocking_api_exports_the_training_classes():
    from asyncdist.sync import DistributedDataParallel, DistributedSampler

    assert DistributedDataParallel is asyncdist.DistributedDataParallel
    assert DistributedSampler is asyncdist.DistributedSampler
    with pytest.raises(AttributeError, match=r"module 'asyncdist\.sync' has no attribute"):
        dist.DistributedDataparallel  # noqa: B018
