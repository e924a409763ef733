"""Processes with a one-sided transport; forked by test_transport.py. The first argument is the end of the pipe."""

import torch
import torch.distributed as dist

import asyncdist
from asyncdist.store import TCPStore
from asyncdist.torch_backend import Store
from asyncdist.torch_backend.one_sided.memory import RemoteMemory
from asyncdist.torch_backend.one_sided.transport import OneSidedTransport


def keep(test, endpoint, count, registered):
    """Register a tensor, connect to the peer, and do nothing more until the test says what."""
    transport = OneSidedTransport("cpu")
    tensor = asyncdist.empty(count, dtype=torch.uint8) if registered else torch.empty(count, dtype=torch.uint8)
    tensor.copy_(torch.arange(count) % 251)
    memory = transport.register_memory(tensor)
    test.send((transport.bind(), memory.to_remote_buffer().serialize()))
    transport.connect(endpoint)
    while (word := test.recv()) != "close":
        if word == "sum":
            test.send(int(tensor.sum(dtype=torch.int64)))
    transport.close()


def serve_store(test):
    """Serve a store of torch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    test.send(store.port)
    test.recv()


def pair(test, rank, port, kind):
    """Pair two ranks through a store, without a process group, and copy a tensor from one to the other."""
    from torch.distributed._transport import new_transport_rank, register_transport

    register_transport("asyncdist", OneSidedTransport, replace=True)
    inner = TCPStore("127.0.0.1", port) if kind == "asyncdist" else None
    store = Store(inner) if inner else dist.TCPStore("127.0.0.1", port, is_master=False)
    sums = []
    # The calls of a pair are matched in order.
    for attempt in range(2):
        with new_transport_rank("asyncdist", "cpu", store=store, rank=10 + rank, peer_rank=11 - rank) as transport:
            tensor = asyncdist.empty(1000).fill_(rank + attempt)
            memory = transport.register_memory(tensor)
            store.set(f"memory/{attempt}/{rank}", memory.to_remote_buffer().serialize())
            remote = RemoteMemory.deserialize(store.get(f"memory/{attempt}/{1 - rank}"))
            received = torch.empty(1000)
            transport.read(transport.register_memory(received).to_mutable_view(), remote)
            sums.append(float(received.sum()))
            test.send("read")
            test.recv()
    test.send(sums)
    if inner:
        store.close()
