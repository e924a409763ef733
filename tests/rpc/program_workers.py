"""Workers that use torch's RPC names, for tests that train with them, kill them and end them."""

import os
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncdist.rpc.blocking as rpc

# Workers import the functions that they run, and the nursery runs this file without importing it.
from tests.rpc import program_workers as importable

WORLD = 4
served = []
noted = []
lock = threading.Lock()


def table():
    """Return the only table of the process, which two trainers share."""
    with lock:
        if not served:
            torch.manual_seed(7)
            served.append(nn.EmbeddingBag(10, 4, mode="sum"))
    return served[0]


def weights():
    return served[0].weight.detach().clone()


def note(number):
    noted.append(number)
    # A call that no code awaits makes another one.
    if number:
        rpc.rpc_async(rpc.get_worker_info().id, importable.note, args=(number - 1,))


def begin(rank, port, world):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60, device_maps={})
    options.init_method = f"tcp://127.0.0.1:{port}"
    rpc.init_rpc(f"worker{rank}", None, rank, world, options)


def train(remote, rank, steps):
    """Train the table of another worker, and a layer that the trainers replicate."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, [remote, *map(rpc.RRef, model.parameters())], lr=0.2)
    words, labels = torch.arange(10).reshape(5, 2), torch.tensor([0, 1, 0, 1, 0])
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(remote.forward(words)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        assert not remote(words).requires_grad
    assert rpc.get_worker_info().id == rank
    return losses


def hybrid(test, rank, port):
    """Train in two workers, with a third that has the table, and a fourth that tells them to."""
    if rank < 2:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(test.recv()))
        dist.init_process_group("gloo", rank=rank, world_size=2)
    begin(rank, port, WORLD)
    if rank == 3:
        remote = rpc.RemoteModule("worker2", importable.table)
        trained = [rpc.rpc_async(f"worker{each}", importable.train, args=(remote, each, 20)) for each in range(2)]
        test.send(torch.futures.collect_all(trained).wait() and [each.wait() for each in trained])
        state = remote.remote_state_dict()
        assert torch.equal(state["weight"], rpc.rpc_sync("worker2", importable.weights))
        remote.load_remote_state_dict({"weight": torch.zeros(10, 4)})
        test.send(rpc.rpc_sync("worker2", importable.weights).abs().sum().item())
    rpc.shutdown()
    if rank < 2:
        dist.destroy_process_group()


def on_one_port(test, rank, port):
    """Meet where torch's process group has met."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for _ in range(2):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        test.send(rpc.rpc_sync(1 - rank, max, args=(rank, 5)))
        rpc.shutdown()
    dist.destroy_process_group()


def leave_early(test, rank, port):
    """End with calls that no code awaits."""
    begin(rank, port, 2)
    if rank == 0:
        rpc.rpc_async("worker1", importable.note, args=(20,))
    rpc.shutdown()
    test.send(len(importable.noted))


def end(test, rank, port, world, limit):
    """Wait for the test, and end."""
    begin(rank, port, world)
    test.send("begun")
    test.recv()
    try:
        rpc.shutdown(timeout=limit)
    except Exception as error:
        test.send(f"{type(error).__name__}: {error}")
    else:
        test.send("ended")
