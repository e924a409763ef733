"""What stands for something of one process: a copy is the object itself, and no pickle contains it."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import asyncdist
from asyncdist import rpc, store, sync, weights
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.groups.world import World
from asyncdist.rpc import blocking
from asyncdist.testing.cluster import world_of
from asyncdist.torch_backend import backend, process_group, torch_store, torch_work
from asyncdist.weights.blocking import BlockingPublisher, BlockingSubscriber

JOB = "asyncdist://127.0.0.1:1/job"
HANDLES = [
    World, backend.Backend, process_group.ProcessGroup, torch_store.Store, torch_work.Work, BlockingPublisher,
    BlockingSubscriber, rpc.RemoteReference, rpc.RemoteObject, rpc.RemoteObjects, rpc.RemoteModule, rpc.RemoteOptimizer,
    blocking.RRef, blocking.RemoteModule,
]  # fmt: skip
"""Classes of such objects without the methods by which `opened_classes` knows them."""
NO_HANDLES = {"DiLoCo", "LocalSGD", "GroupMetrics", "GroupStep"}
"""They work with a group, and have values of their own."""


def opened_classes():
    """Return the exported classes whose objects are awaited, entered or closed."""
    exported = [
        getattr(package, name)
        for package in (asyncdist, sync, rpc, blocking, weights, store)
        for name in package.__all__
        if name not in NO_HANDLES
    ]
    marks = ("__aenter__", "__enter__", "__await__", "close")
    return [each for each in exported if inspect.isclass(each) and any(hasattr(each, mark) for mark in marks)]


@pytest.mark.parametrize("handle", dict.fromkeys([*HANDLES, *opened_classes()]), ids=lambda each: each.__qualname__)
def test_every_handle_keeps_itself_from_copies_and_pickles(handle):
    for method in ("__copy__", "__deepcopy__", "__reduce__"):
        assert getattr(handle, method) is getattr(ProcessBound, method)
    assert handle._elsewhere


def assert_handles(*handles):
    for handle in handles:
        assert copy.copy(handle) is handle
        assert copy.deepcopy({"part": [handle]})["part"][0] is handle
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(UsageError) as caught:
                pickle.dumps([handle], protocol)
            assert str(caught.value).startswith(f"{handle!r} cannot be pickled, because it belongs to this process: ")


async def test_groups_works_and_stores():
    class Model(nn.Module):
        def __init__(self, group):
            super().__init__()
            self.layer, self.group = nn.Linear(1, 1), group

    async with world_of(2) as (group, peer):
        received = torch.zeros(1)
        pending = group.recv(received, 1)
        twin = copy.copy(pending)
        assert_handles(group, pending, process_group.ProcessGroup(group, None))
        model = copy.deepcopy(Model(group))
        assert model.group is group
        await peer.send(torch.ones(1), 0)
        assert (await twin, received.item()) == (1, 1.0)
        done = group.barrier()
        await peer.barrier()
        await done
        assert_handles(done, torch_work.Work(done, []))
    hashed = store.HashStore()
    server = await store.StoreServer.start("127.0.0.1", 0)
    client = await store.AsyncStore.connect("127.0.0.1", server.port)
    stores = [hashed, store.PrefixStore("a", hashed), client, store.AsyncPrefixStore("a", client), server]
    assert_handles(*stores, torch_store.Store(hashed))
    await client.close()
    await server.close()


async def test_sessions_and_what_they_find():
    class Thing:
        async def refer(self):
            return rpc.refer(self)

        async def stream(self):
            yield 1

    server = await store.StoreServer.start("127.0.0.1", 0)
    job = f"asyncdist://127.0.0.1:{server.port}/job"
    async with rpc.serve({"thing": Thing()}, job, config=Config(timeout=20.0)) as session:
        thing = await session.find("thing")
        call = thing.refer()
        assert_handles(session, thing, call, await call, await session.find_all("thing"))
        async with await thing.stream() as stream:
            assert_handles(stream)
    await server.close()
    tensors = {"a": torch.ones(1)}
    assert_handles(weights.Publisher(tensors, job=JOB), weights.Subscriber(tensors, job=JOB), asyncdist.join(JOB))
