"""Conformance tests for transports: the guarantees of `asyncdist.kernel.transport.base` beyond the results of collectives.

`collective_cases` checks that bytes arrive. These tests check that messages arrive in order, that a transport reads no
memory after its send has completed and writes no memory after its receive has ended, and that a waiting rank learns that a
peer has ended::

    for promise in PROMISES:
        await promise("tcp")

Each test raises AssertionError, or the error that the broken guarantee causes. The tests do not sleep. If a rank never
learns that a peer has ended, its receive times out.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import torch

from asyncdist.errors import GroupError, PeerLostError
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.work import Work
from asyncdist.testing.cluster import world_of

# Elements of 4 bytes. A message of so many does not fit into the buffers between two ranks.
_LARGE = 2_000_000
_PATIENCE = 10.0  # timeout in seconds of receives that take milliseconds


async def messages_queue_in_order(transport: str) -> None:
    """A rank sends large messages with one tag and then a small one, which the receiver receives first.

    The sender overwrites the memory of each message as soon as its send has completed.
    """
    async with world_of(2, transport=transport) as (zero, one):
        tensors = [torch.full((_LARGE,), float(turn)) for turn in (1, 2, 3)]
        sends = [zero.send(tensor, 1) for tensor in tensors]
        for work, tensor in zip(sends, tensors, strict=True):
            work.add_done_callback(functools.partial(_overwrite, tensor))
        small, large = torch.zeros(3), torch.zeros(_LARGE)
        sends.append(zero.send(torch.ones(3), 1, tag=1))
        await one.recv(small, 0, tag=1)
        assert bool((small == 1).all()), f"{small} behind large messages"
        for turn in (1, 2, 3):
            if turn == 2:  # a receive whose message is sent last
                last = one.recv(small, 0, tag=2)
            await one.recv(large, 0)
            assert bool((large == turn).all()), f"message {turn} of one tag came as {large.unique().tolist()}"
        await asyncio.gather(*sends, zero.send(torch.ones(3), 1, tag=2), last)


async def cancelled_receive_leaves_memory_alone(transport: str) -> None:
    """A group fails while a message arrives: the rest is discarded, and later messages of another group arrive."""
    async with world_of(2, transport=transport) as (zero, one):
        others = _second_groups(zero, one)
        output = torch.zeros(_LARGE)
        sent, received = zero.send(torch.ones(_LARGE), 1), one.recv(output, 0)
        while not output[0]:  # noqa: ASYNC110 - there is no event for arriving bytes
            await asyncio.sleep(0)
        one.abort("the test aborts")
        kept = output.clone()
        await asyncio.gather(sent, received, return_exceptions=True)
        later = torch.zeros(1)
        await asyncio.gather(others[0].send(torch.ones(1), 1), others[1].recv(later, 0, timeout=_PATIENCE))
        assert torch.equal(output, kept), "the transport wrote into the memory of a receive after it had failed"


async def receiver_learns_of_closed_link(transport: str) -> None:
    """A rank that has never sent leaves: a rank that waits for it, and has never sent to it, learns of the end."""
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
        others = _second_groups(*groups)
        output = torch.zeros(3)
        await asyncio.gather(*(group.all_reduce(torch.ones(3)) for group in (*groups, *others)))
        issued = monotonic()
        waiting = [group.recv(torch.zeros(1), 1, timeout=_PATIENCE) for group in (others[0], others[2])]
        await _leave(one)
        for work in waiting:
            await _raises_lost(work, issued)
        await asyncio.gather(zero.send(torch.ones(3), 2), two.recv(output, 0))
        assert bool((output == 1).all())


async def peer_declared_lost_is_told(transport: str) -> None:
    """A rank that declares a peer lost disconnects it with `Transport.disconnect`, so that the waiting peer learns of it.

    Only for transports between processes, whose connections can break while both ranks are alive.
    """
    async with world_of(2, transport=transport) as (zero, one):
        await asyncio.gather(*(group.all_reduce(torch.ones(3)) for group in (zero, one)))
        issued = monotonic()
        received = one.recv(torch.zeros(1), 0, timeout=_PATIENCE)
        zero.endpoint.post(lambda: zero.endpoint.lost(1, "the connection broke"))
        zero.endpoint.progress.ensure_driven()
        await _raises_lost(received, issued)


PROMISES: tuple[Callable[[str], Awaitable[None]], ...] = (
    messages_queue_in_order,
    cancelled_receive_leaves_memory_alone,
    receiver_learns_of_closed_link,
    orderly_departure_is_not_a_loss,
    peer_declared_lost_is_told,
)


def _overwrite(tensor: torch.Tensor, work: Work) -> None:
    tensor.fill_(-1.0)


def _second_groups(*groups: Group) -> list[Any]:
    return [group.world.new_group(list(group.ranks), "second") for group in groups]


async def _leave(group: Group) -> None:
    group.world.leave()
    await group.world.close()


async def _raises_lost(work: Work, issued: float) -> None:
    try:
        await work
    except PeerLostError as error:
        # A waiting rank queries its peers in the last quarter of its timeout, or the last second.
        if monotonic() - issued >= 0.75 * _PATIENCE:
            raise AssertionError(f"the rank learned only by its own query that its peer left: {error}") from error
        return
    except GroupError as error:
        raise AssertionError(f"the rank did not learn that its peer left: {error}") from error
    raise AssertionError("received a message that no rank sent")
