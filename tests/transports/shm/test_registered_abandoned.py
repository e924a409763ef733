"""Registered memory of a collective that its owner has given up: it is the owner's again, whatever latecomers do."""

from __future__ import annotations

import threading

import pytest
import torch

import asyncdist
from asyncdist.engine.progress import Progress
from asyncdist.errors import GroupAbortedError, GroupError, OperationTimeoutError
from asyncdist.testing.cluster import run_ranks

PATIENCE = 30.0
COUNT = 500_000  # more than is staged with one meeting


def _broadcast(group, tensor, **how):
    return group.broadcast(tensor, 0, **how)


def _gather(group, tensor, **how):
    room = [torch.empty(COUNT) for _ in range(group.size())] if group.rank() == 1 else None
    return group.gather(tensor, room, 1, **how)


def _all_reduce(group, tensor, **how):
    return group.all_reduce(tensor, **how)


@pytest.mark.parametrize("call", [_all_reduce, _broadcast, _gather])
def test_late_rank_neither_writes_to_nor_reads_from_an_abandoned_tensor(call):
    given_up, over = threading.Event(), threading.Event()

    def give_up(group):
        work = call(group, asyncdist.empty(COUNT).fill_(1), timeout=0.2, background=False)
        assert isinstance(work.exception(), OperationTimeoutError)
        del work
        another = asyncdist.empty(COUNT).fill_(7)  # in the same place, if that was let go
        given_up.set()
        assert over.wait(PATIENCE)
        return bool((another == 7).all())

    def come_late(group):
        tensor = asyncdist.empty(COUNT).fill_(2)
        assert given_up.wait(PATIENCE)
        error = call(group, tensor, background=False).exception()
        over.set()
        return isinstance(error, GroupAbortedError)

    def program(group):
        group.barrier(background=False).wait()
        return give_up(group) if group.rank() == 0 else come_late(group)

    assert run_ranks(2, program, transport="shm") == [True, True]


def test_call_does_not_use_memory_of_a_destroyed_group(monkeypatch):
    """Another thread destroys the group, and makes the next, between what a call looks at and its first attempt."""
    late, attempt = {}, Progress.attempt
    meet = threading.Barrier(2)

    def attempt_late(progress, *args, **how):
        come = late.pop(progress, None)
        if come is not None:
            come()
        return attempt(progress, *args, **how)

    monkeypatch.setattr(Progress, "attempt", attempt_late)

    def program(group):
        first = group.world.new_group(None)
        for _ in range(2):
            first.all_reduce(torch.ones(4), background=False).wait()
        made = []

        def change():
            destroying = threading.Thread(target=first.close)
            destroying.start()
            destroying.join()
            meet.wait(PATIENCE)
            made.append(group.world.new_group(None))
            made.append(made[0]._native._slots.words.tolist())

        late[group.mesh.progress] = change
        error = first.all_reduce(torch.ones(4), background=False).exception()
        assert isinstance(error, GroupError)
        meet.wait(PATIENCE)
        second, words = made
        return second._native._slots.words.tolist() == words

    assert run_ranks(2, program, transport="shm") == [True, True]
