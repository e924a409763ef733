"""Conformance tests for transports: the guarantees of `asyncdist.transport.base` beyond the results of collectives.

`collective_cases` checks that bytes arrive. These tests check that messages arrive in order, are read from memory that is
still the sender's, are written to memory that is still the receiver's, and that a waiting rank learns of a peer's end:

    for promise in PROMISES:
        await promise("tcp")

Each raises AssertionError, or the error that the broken guarantee causes. No test waits for a time to pass, except that a
rank which never learns of an end is noticed by the timeout of a receive.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import torch

from asyncdist.engine.work import Work
from asyncdist.errors import GroupError, PeerLostError
from asyncdist.groups.group import Group
from asyncdist.testing.cluster import world_of

# Elements of 4 bytes: more than the buffers between two ranks hold.
_LARGE = 2_000_000
_PATIENCE = 10.0  # seconds for what takes milliseconds


async def messages_queue_in_order(transport: str) -> None:
    """Large messages under one tag without a receive, and a small one behind them that is received first.

    As soon as a send has completed, its memory is overwritten.
    """
    async with world_of(2, transport=transport) as (zero, one):
        tensors = [torch.full((_LARGE,), float(turn)) for turn in (1, 2, 3)]
        sends = [zero.send(tensor, 1) for tensor in tensors]
        for work, tensor in zip(sends, tensors, strict=True):
            work.add_done_callback(functools.partial(_spoil, tensor))
        small, room = torch.zeros(3), torch.zeros(_LARGE)
        sends.append(zero.send(torch.ones(3), 1, tag=1))
        await one.recv(small, 0, tag=1)
        assert bool((small == 1).all()), f"{small} behind large messages"
        for turn in (1, 2, 3):
            if turn == 2:  # what it waits for may lie behind the others, for all that it knows
                last = one.recv(small, 0, tag=2)
            await one.recv(room, 0)
            assert bool((room == turn).all()), f"message {turn} of one tag came as {room.unique().tolist()}"
        await asyncio.gather(*sends, zero.send(torch.ones(3), 1, tag=2), last)


async def cancelled_receive_leaves_memory_alone(transport: str) -> None:
    """A group fails in the middle of a message: the rest is discarded, and later messages are not held up."""
    async with world_of(2, transport=transport) as (zero, one):
        beside = _groups_beside(zero, one)
        room = torch.zeros(_LARGE)
        sent, received = zero.send(torch.ones(_LARGE), 1), one.recv(room, 0)
        while not room[0]:  # noqa: ASYNC110 - no event tells of arriving bytes
            await asyncio.sleep(0)
        one.abort("enough")
        kept = room.clone()
        await asyncio.gather(sent, received, return_exceptions=True)
        behind = torch.zeros(1)
        await asyncio.gather(beside[0].send(torch.ones(1), 1), beside[1].recv(behind, 0, timeout=_PATIENCE))
        assert torch.equal(room, kept), "a receive that was given up was written on into"


async def receiver_learns_of_closed_link(transport: str) -> None:
    """A rank that has never sent leaves: a rank that waits for it, and has never sent to it, learns of that."""
    async with world_of(2, transport=transport) as (zero, one):
        issued = monotonic()
        received = zero.recv(torch.zeros(1), 1, timeout=_PATIENCE)
        await asyncio.sleep(0)
        await _leave(one)
        await _raises_lost(received, issued)


async def orderly_departure_is_not_a_loss(transport: str) -> None:
    """A rank leaves while no rank of the group waits for it: the others continue."""
    async with world_of(3, transport=transport) as groups:
        zero, one, two = groups
        beside = _groups_beside(*groups)
        room = torch.zeros(3)
        works = [group.all_reduce(torch.ones(3)) for group in groups]
        works += [group.all_reduce(torch.ones(3)) for group in beside]
        await asyncio.gather(*works)
        issued = monotonic()
        waiting = [group.recv(torch.zeros(1), 1, timeout=_PATIENCE) for group in (beside[0], beside[2])]
        await _leave(one)
        for work in waiting:
            await _raises_lost(work, issued)
        await asyncio.gather(zero.send(torch.ones(3), 2), two.recv(room, 0))
        assert bool((room == 1).all())


async def peer_declared_lost_is_told(transport: str) -> None:
    """One rank has lost another rank, which waits for it: `Transport.disconnect` ends the connection between them.

    For transports whose ranks can lose each other while both are alive, unlike messages within one process.
    """
    async with world_of(2, transport=transport) as (zero, one):
        await asyncio.gather(*(group.all_reduce(torch.ones(3)) for group in (zero, one)))
        issued = monotonic()
        received = one.recv(torch.zeros(1), 0, timeout=_PATIENCE)
        zero.mesh.post(lambda: zero.mesh.lost(1, "the connection broke"))
        zero.mesh.progress.ensure_driven()
        await _raises_lost(received, issued)


PROMISES: tuple[Callable[[str], Awaitable[None]], ...] = (
    messages_queue_in_order,
    cancelled_receive_leaves_memory_alone,
    receiver_learns_of_closed_link,
    orderly_departure_is_not_a_loss,
    peer_declared_lost_is_told,
)


def _spoil(tensor: torch.Tensor, work: Work) -> None:
    tensor.fill_(-1.0)


def _groups_beside(*groups: Group) -> list[Any]:
    return [group.world.new_group(list(group.ranks), "beside") for group in groups]


async def _leave(group: Group) -> None:
    group.world.leave()
    await group.world.close()


async def _raises_lost(work: Work, issued: float) -> None:
    try:
        await work
    except PeerLostError as error:
        # Ranks ask each other from a quarter of the timeout, or a second, before the deadline on.
        if monotonic() - issued >= 0.75 * _PATIENCE:
            raise AssertionError(f"the rank was told only by its own query that its peer left: {error}") from error
        return
    except GroupError as error:
        raise AssertionError(f"the rank was not told that its peer left: {error}") from error
    raise AssertionError("received a message that no rank sent")
