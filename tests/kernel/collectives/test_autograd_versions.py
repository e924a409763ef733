"""Collectives tell autograd what they have written: a backward that needs an overwritten tensor raises."""

from __future__ import annotations

import asyncio

import pytest
import torch

import asyncdist
from asyncdist.base.ops import premul_sum
from asyncdist.testing.cluster import world_of
from asyncdist_transports.shm.collectives.small import MOST_NBYTES

SIZE = 3
COUNTS = {"small": 1, "large": MOST_NBYTES // 4 + 8}


def tensor_of(kind, count):
    if kind == "strided":
        return torch.ones(count, 2)[:, 0]
    return asyncdist.empty(count).fill_(1) if kind == "registered" else torch.ones(count)


def rows(kind, count):
    return [tensor_of(kind, count) for _ in range(SIZE)]


def calls(kind, count):
    """Return functions of a group that return a rank's call, the tensors that it writes, and those that it only reads."""

    def all_reduce(group, **how):
        tensor = tensor_of(kind, count)
        return lambda: group.all_reduce(tensor, **how), [tensor], []

    def scaled_all_reduce(group):
        return all_reduce(group, op=premul_sum(0.5))

    def all_reduce_coalesced(group):
        tensors = rows(kind, count)
        return lambda: group.all_reduce_coalesced(tensors), tensors, []

    def reduce(group):
        tensor = tensor_of(kind, count)
        at_root = group.rank() == 1
        return lambda: group.reduce(tensor, 1), [tensor] * at_root, [tensor] * (not at_root)

    def reduce_scatter(group):
        output, inputs = tensor_of(kind, count), rows(kind, count)
        return lambda: group.reduce_scatter(output, inputs), [output], inputs

    def reduce_scatter_single(group):
        output, whole = tensor_of(kind, count), tensor_of(kind, count * SIZE)
        return lambda: group.reduce_scatter_single(output, whole), [output], [whole]

    def broadcast(group):
        tensor = tensor_of(kind, count)
        at_root = group.rank() == 1
        return lambda: group.broadcast(tensor, 1), [tensor] * (not at_root), [tensor] * at_root

    def all_gather(group):
        outputs, own = rows(kind, count), tensor_of(kind, count)
        return lambda: group.all_gather(outputs, own), outputs, [own]

    def all_gather_single(group):
        output, own = tensor_of(kind, count * SIZE), tensor_of(kind, count)
        return lambda: group.all_gather_single(output, own), [output], [own]

    def gather(group):
        own = tensor_of(kind, count)
        outputs = rows(kind, count) if group.rank() == 1 else None
        return lambda: group.gather(own, outputs, 1), outputs or [], [own]

    def gather_single(group):
        own = tensor_of(kind, count)
        output = tensor_of(kind, count * SIZE) if group.rank() == 1 else None
        return lambda: group.gather_single(own, output, 1), [] if output is None else [output], [own]

    def scatter(group):
        own = tensor_of(kind, count)
        inputs = rows(kind, count) if group.rank() == 1 else None
        return lambda: group.scatter(own, inputs, 1), [own], inputs or []

    def all_to_all(group):
        outputs, inputs = rows(kind, count), rows(kind, count)
        return lambda: group.all_to_all(outputs, inputs), outputs, inputs

    def all_to_all_single(group):
        output, whole = tensor_of(kind, count * SIZE), tensor_of(kind, count * SIZE)
        return lambda: group.all_to_all_single(output, whole), [output], [whole]

    def send_and_recv(group):
        tensor = tensor_of(kind, count)
        if group.rank() < 2:
            call = group.send if group.rank() == 0 else group.recv
            return lambda: call(tensor, 1 - group.rank()), [tensor] * group.rank(), [tensor] * (1 - group.rank())
        return lambda: asyncio.sleep(0), [], []

    return [
        all_reduce, scaled_all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_single, broadcast,
        all_gather, all_gather_single, gather, gather_single, scatter, all_to_all, all_to_all_single,
        send_and_recv,
    ]  # fmt: skip


async def check_versions(groups, kind, count):
    """Call each operation twice on the same tensors, the second time as a prepared call, and check all versions."""
    for make in calls(kind, count):
        made = [make(group) for group in groups]
        for turn in ("first", "prepared"):
            before = [([t._version for t in written], [t._version for t in read]) for _, written, read in made]
            await asyncio.gather(*(start() for start, _, _ in made))
            for rank, ((_, written, read), (old, kept)) in enumerate(zip(made, before, strict=True)):
                where = (make.__name__, turn, rank)
                assert all(t._version > version for t, version in zip(written, old, strict=True)), where
                assert [t._version for t in read] == kept, where


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(
    ("transport", "kind"),
    [("inproc", "plain"), ("tcp", "plain"), ("shm", "plain"), ("shm", "registered"), ("tcp", "strided")],
)
async def test_operations_raise_the_version_of_every_tensor_that_they_write(transport, size, kind):
    async with world_of(SIZE, transport=transport) as groups:
        await check_versions(groups, kind, COUNTS[size])


async def test_collectives_over_several_hosts_raise_versions():
    async with world_of(SIZE, transport="auto", hosts=["a", "a", "b"]) as groups:
        await check_versions(groups, "plain", 5)


async def test_backward_of_a_tensor_saved_before_an_in_place_all_reduce_raises(transport):
    async with world_of(SIZE, transport=transport) as groups:
        weights = [torch.full((1,), 2.0, requires_grad=True) for _ in groups]
        tensors = [torch.full((1,), 4.0) for _ in groups]
        losses = [(weight * tensor).sum() for weight, tensor in zip(weights, tensors, strict=True)]
        await asyncio.gather(*(group.all_reduce(tensors[group.rank()]) for group in groups))
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
