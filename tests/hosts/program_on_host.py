"""A rank on a host of its own: enters a network namespace, joins the world, and executes the commands of the test."""

import itertools
import os
import signal
import time

import torch

from asyncdist import sync
from asyncdist.kernel.engine.executor import Executor
from asyncdist.testing.hosts import enter

torch.set_num_threads(1)


def on_host(test, namespace, where, rank, size, folder="."):
    enter(namespace)
    os.chdir(folder)
    with sync.process_group(init_method=where, rank=rank, world_size=size, timeout=30) as group:
        test.send("met")
        while True:
            name, *arguments = test.recv()
            if name == "end":
                break
            test.send(globals()[name](group, *arguments))
    # The world is closed, and the end of the interpreter takes seconds.
    os._exit(0)


def links(group):
    """Return the kinds of the links to the other ranks."""
    return sorted({type(group.endpoint.link(peer)).__name__ for peer in group.ranks if peer != group.endpoint.rank})


def reduced(group, count):
    """All-reduce, reduce-scatter and all-gather; return the distinct values of the results."""
    tensor = torch.full((count,), float(group.rank() + 1))
    group.all_reduce(tensor, background=False).result()
    part = torch.zeros(count)
    group.reduce_scatter_single(part, tensor.repeat(group.size()), background=False).result()
    whole = torch.zeros(count * group.size())
    group.all_gather_single(whole, part * (group.rank() + 1), background=False).result()
    return tensor.unique().tolist(), part.unique().tolist(), whole.unique().tolist()


def all_reduced(group, count):
    """Return the value of a sum."""
    tensor = torch.ones(count)
    group.all_reduce(tensor, background=False).result()
    return tensor[0].item()


def passed_on(group, count):
    """Send a tensor to the next rank; return the distinct values from the previous rank."""
    tensor = torch.zeros(count)
    receiving = group.recv(tensor, (group.rank() - 1) % group.size())
    group.send(torch.full((count,), float(group.rank())), (group.rank() + 1) % group.size(), background=False).result()
    receiving.wait()
    return tensor.unique().tolist()


def timed(group, nbytes):
    """All-reduce once; return the seconds that it took after a barrier, and whether the sum is right."""
    tensor = torch.ones(nbytes // 4)
    group.barrier(background=False).result()
    begun = time.perf_counter()
    group.all_reduce(tensor, background=False).result()
    took = time.perf_counter() - begun
    return took, bool((tensor == group.size()).all())


def reduce_until_it_fails(group, counts, dies_at):
    """All-reduce tensors of some sizes in turn until that fails; be killed at step ``dies_at`` of the executor."""
    steps = itertools.count()
    run = Executor.resume

    def run_or_die(executor, task):
        if next(steps) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(executor, task)

    Executor.resume = run_or_die
    tensors = [torch.zeros(count) for count in counts]
    try:
        for turn in itertools.count():
            tensor = tensors[turn % len(tensors)].fill_(1.0)
            group.all_reduce(tensor, background=False).result()
            if not (tensor == group.size()).all():
                return "a wrong sum", turn
    except Exception as error:
        return type(error).__name__, getattr(error, "peer", None)


def all_reduce_in_vain(group, count):
    """All-reduce with a rank that does not join; return the kind of the error, and its peer."""
    try:
        group.all_reduce(torch.ones(count), background=False).result()
    except Exception as error:
        return type(error).__name__, getattr(error, "peer", None)
    return "no failure", None


def wait_for_failure(group):
    """Wait until the group fails, without a call; return the error's kind, peer, way of noticing, text, and the time."""
    while group.error is None:
        time.sleep(0.002)
    error = group.error
    return (
        type(error).__name__,
        getattr(error, "peer", None),
        getattr(error, "noticed", None),
        str(error),
        time.monotonic(),
    )


def regroup(failed, count):
    """All-reduce in the successor of a failed group; return its members and the sum, or the kind of the error."""
    try:
        successor = failed.regroup(background=False).result()
        tensor = torch.ones(count)
        successor.all_reduce(tensor, background=False).result()
    except Exception as error:
        return type(error).__name__
    return successor.member_ids, tensor[0].item()
