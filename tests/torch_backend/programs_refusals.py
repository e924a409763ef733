"""User mistakes. Each call is refused before anything is sent, so the group stays usable; run by the teams of conftest.py.

Each program returns pairs of actual and expected results."""

import re

import torch
import torch.distributed as dist
from toys import numbers, operators

from asyncdist.errors import AsyncdistError


def _refused(op, call, *words):
    """Return a pair for the error of a call: an asyncdist error that names operation, group, rank and ``words``.

    ``op`` is None for calls that are not operations.
    """
    try:
        call()
    except Exception as error:
        ours = isinstance(error, AsyncdistError) and isinstance(error, RuntimeError | ValueError)
        where = rf"{op} on group '\w+', rank {dist.get_rank()}: " if op else ""
        missing = [] if re.match(where, str(error)) else [where]
        missing += [word for word in words if word not in str(error)]
        return (ours or type(error).__name__, missing and [*missing, str(error)]), (True, [])
    return "nothing was raised", "an error"


def _still_works(rank, world):
    tensor = numbers(rank)
    dist.all_reduce(tensor)
    return tensor, sum(numbers(peer) for peer in range(world))


def devices(rank, world):
    """Tensors on a device that no transport supports."""
    meta = torch.ones(4, device="meta")
    return [
        _refused("all_reduce", lambda: dist.all_reduce(meta), "meta", "it has no values"),
        _refused("broadcast", lambda: dist.broadcast(meta, 0), "meta"),
        _refused("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(torch.zeros(4 * world), meta), "meta"),
        _refused("send", lambda: dist.send(meta, (rank + 1) % world), "meta"),
        _refused("all_reduce", lambda: dist.all_reduce(meta, async_op=True).wait(), "meta"),
        _still_works(rank, world),
    ]


def counts(rank, world):
    """Wrong numbers of entries and elements, under torch's names of the operations."""
    ones, few = torch.ones(4), [torch.zeros(4) for _ in range(world - 1)]
    short, group = torch.zeros(5), dist.group.WORLD
    listed = "a tensor or numpy array is needed here, not list"
    return [
        _refused("all_gather", lambda: dist.all_gather(few, ones), f"{world - 1} entries", f"{world} ranks"),
        _refused("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(short, ones), "5"),
        _refused("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(short, torch.ones(4 * world)), "5"),
        _refused("all_to_all_single", lambda: dist.all_to_all_single(short, short), f"{world} ranks"),
        _refused("all_reduce", lambda: group.allreduce([ones, ones]), listed),
        _refused("all_gather", lambda: group.allgather([few, few], [ones]), "2 entries" if world != 2 else "not list"),
        _refused("recv", lambda: group.recv([ones], world, 0), f"src={world} is not a rank"),
        _still_works(rank, world),
    ]


def by_cpp(rank, world):
    """An error that is raised below C++ code passes through it unchanged."""
    name = dist.group.WORLD.group_name
    bits = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    return [
        _refused("all_reduce", lambda: operators.all_reduce(torch.ones(4), "band", name), "BAND", "float32"),
        _refused(
            "all_to_all_single", lambda: operators.all_to_all_single(torch.ones(3), [1] * world, [3] * world, name), "3"
        ),
        _refused("broadcast", lambda: operators.broadcast(bits, 0, name), "bits8"),
        _still_works(rank, world),
    ]


def features_of_later_releases(rank, world):
    """Features that torch 2.15 requests by these attributes and methods."""
    group = dist.group.WORLD
    can = [
        group.supports_reconfigure,
        group.supports_shrinking,
        group.supports_window,
        group.supports_abort_hooks,
        group.supports_completion_hooks,
    ]
    return [
        (can, [True, True, True, True, False]),
        _refused(None, lambda: group.new_window().put(torch.ones(2), 0, 0, False), "call tensor_register"),
        _still_works(rank, world),
    ]
