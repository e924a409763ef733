"""Registered tensors of a collective that has failed on its owner's rank: ranks that call later do not access them."""

from __future__ import annotations

import threading

import pytest
import torch

import asyncdist
from asyncdist.errors import GroupAbortedError, GroupError, OperationTimeoutError
from asyncdist.testing.cluster import run_ranks
from tests.support.ranks import native_of

PATIENCE = 60.0
# More elements than a small exchange stages.
COUNT = 500_000


def _broadcast(group, tensor, **options):
    return group.broadcast(tensor, 0, **options)


def _gather(group, tensor, **options):
    blocks = [torch.empty(COUNT) for _ in range(group.size())] if group.rank() == 1 else None
    return group.gather(tensor, blocks, 1, **options)


def _all_reduce(group, tensor, **options):
    return group.all_reduce(tensor, **options)


@pytest.mark.parametrize("call", [_all_reduce, _broadcast, _gather])
def test_late_rank_neither_writes_to_nor_reads_from_an_abandoned_tensor(call):
    timed_out, failed = threading.Event(), threading.Event()

    def time_out(group):
        work = call(group, asyncdist.empty(COUNT).fill_(1), timeout=0.2, background=False)
        assert isinstance(work.exception(), OperationTimeoutError)
        del work
        # It takes the place of the first tensor, if that was freed.
        another = asyncdist.empty(COUNT).fill_(7)
        timed_out.set()
        assert failed.wait(PATIENCE)
        return bool((another == 7).all())

    def call_late(group):
        tensor = asyncdist.empty(COUNT).fill_(2)
        assert timed_out.wait(PATIENCE)
        error = call(group, tensor, background=False).exception()
        failed.set()
        return isinstance(error, GroupAbortedError)

    def program(group):
        group.barrier(background=False).wait()
        return time_out(group) if group.rank() == 0 else call_late(group)

    assert run_ranks(2, program, transport="shm") == [True, True]


def test_call_does_not_use_memory_of_a_destroyed_group(monkeypatch):
    """Another thread destroys the group, and makes the next one, between a call's checks and its first attempt."""
    both = threading.Barrier(2)

    def program(group):
        first = group.world.new_group(None)
        for _ in range(2):
            first.all_reduce(torch.ones(4), background=False).wait()
        made = []

        def change():
            destroying = threading.Thread(target=first.close)
            destroying.start()
            destroying.join()
            both.wait(PATIENCE)
            made.append(group.world.new_group(None))
            made.append(native_of(made[0]).slots.words.tolist())

        attempt = group.endpoint.progress.attempt

        def attempt_late(*args, **options):
            monkeypatch.setattr(group.endpoint.progress, "attempt", attempt)
            change()
            return attempt(*args, **options)

        monkeypatch.setattr(group.endpoint.progress, "attempt", attempt_late)
        error = first.all_reduce(torch.ones(4), background=False).exception()
        assert isinstance(error, GroupError)
        both.wait(PATIENCE)
        second, words = made
        return native_of(second).slots.words.tolist() == words

    assert run_ranks(2, program, transport="shm") == [True, True]
