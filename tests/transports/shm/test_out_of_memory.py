"""The kernel refuses a request for memory: every rank gets an error before any tensor has changed."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading

import pytest
import torch

from asyncdist.errors import AsyncdistError, GroupAbortedError, SharedMemoryError
from asyncdist.kernel.memory.shared_arena import arena
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist_transports.shm import control_block

# Several pieces, also of a third of the elements.
COUNT = 300_000
LARGE = {
    "all_reduce": lambda group, own, rows: group.all_reduce(own),
    "all_reduce_coalesced": lambda group, own, rows: group.all_reduce_coalesced([rows[group.rank() - 1][:10], own]),
    "reduce": lambda group, own, rows: group.reduce(own, 0),
    "reduce_scatter": lambda group, own, rows: group.reduce_scatter(rows[group.rank()], [own] * 3),
    "broadcast": lambda group, own, rows: group.broadcast(own, 1),
    "all_gather": lambda group, own, rows: group.all_gather(rows, own),
    "gather": lambda group, own, rows: group.gather(own, None if group.rank() else rows, 0),
    "scatter": lambda group, own, rows: group.scatter(rows[1], [own] * 3 if group.rank() == 1 else None, 1),
    "all_to_all": lambda group, own, rows: group.all_to_all(rows, [own] * 3),
}


def attempt(group, name, ready):
    """Run a collective; return its error, and whether the tensors that other ranks write are unchanged."""
    own, *rows = (torch.full((COUNT,), 10.0 * group.rank() + number) for number in range(4))
    touched = [own, *(row for rank, row in enumerate(rows) if rank != group.rank())]
    before = [tensor.clone() for tensor in touched]
    group.barrier().wait()
    ready.wait()
    try:
        LARGE[name](group, own, rows).wait()
    except AsyncdistError as error:
        return str(error), all(map(torch.equal, touched, before))
    return None, True


class Requests:
    """Requests to the kernel for memory; the ``refused``-th after `count` fails."""

    def __init__(self, refused):
        self.refused = refused
        self._reserve = os.posix_fallocate
        self._numbers = iter(())

    def count(self):
        self._numbers = itertools.count()

    def __call__(self, *where):
        if next(self._numbers, None) == self.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._reserve(*where)

    @property
    def was_one_refused(self):
        return next(self._numbers) > self.refused


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LARGE)
def test_refused_memory_request_leaves_tensors_untouched(monkeypatch, name):
    for refused in itertools.count():
        requests = Requests(refused)
        ready = threading.Barrier(3, requests.count)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", requests)
            outcomes = run_ranks(3, lambda group, ready=ready: attempt(group, name, ready), transport="shm")
        if not requests.was_one_refused:
            assert outcomes == [(None, True)] * 3
            break
        errors = [error for error, _ in outcomes if error is not None]
        assert errors
        assert all("no memory is left" in error for error in errors)
        assert all(unharmed for _, unharmed in outcomes), f"request {refused} was refused too late"
    assert refused > 0


async def test_more_groups_than_directory_entries_do_not_affect_existing_groups(monkeypatch):
    monkeypatch.setattr(control_block, "_PAIRS", 3)
    async with world_of(2, transport="shm") as groups:
        used = arena().used_nbytes
        more = [[group.world.new_group(None) for group in groups] for _ in range(2)]
        for group in groups:
            with pytest.raises(SharedMemoryError, match="more than 3 groups at once"):
                group.world.new_group(None)
        for among in (groups, *more):
            assert [tensor[0].item() for tensor in await sums(among)] == [2.0, 2.0]
        for group in more.pop():
            group.close()
        # Directory entries are reused.
        for _ in range(4):
            among = [group.world.new_group(None) for group in groups]
            assert [tensor[0].item() for tensor in await sums(among)] == [2.0, 2.0]
            for group in among:
                group.close()
        for group in more.pop():
            group.close()
        assert arena().used_nbytes == used


async def sums(groups):
    return await asyncio.gather(*[group.all_reduce(torch.ones(10)) for group in groups])


async def test_group_creation_out_of_memory_leaks_nothing_and_world_continues(monkeypatch):
    async with world_of(2, transport="shm") as groups:
        used = arena().used_nbytes
        with monkeypatch.context() as patch:
            requests = Requests(0)
            requests.count()
            patch.setattr(os, "posix_fallocate", requests)
            with pytest.raises(SharedMemoryError, match="no memory is left"):
                groups[0].world.new_group([1, 0])
        assert arena().used_nbytes == used
        other = groups[1].world.new_group([1, 0])
        with pytest.raises(GroupAbortedError, match=r"rank 0 cannot be in the group: .*no memory is left"):
            await other.all_reduce(torch.ones(10))
        other.close()
        for world_groups in (groups, [group.world.new_group(None) for group in groups]):
            assert [tensor[0].item() for tensor in await sums(world_groups)] == [2.0, 2.0]
