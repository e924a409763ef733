"""Ranks that leave, or abort and leave: waiting ranks learn of it, also those without a connection to them."""

import asyncio
import gc
import weakref

import pytest
import torch

from asyncdist.errors import GroupAbortedError, PeerLostError
from asyncdist.kernel.engine.machine import Until
from asyncdist.testing.cluster import world_of

pytestmark = pytest.mark.each_loop


@pytest.mark.parametrize("source", [1, None], ids=["from one", "from any"])
async def test_receive_from_left_ranks_fails(transport, source):
    async with world_of(3, transport=transport) as (stayer, *leavers):
        waiting = stayer.recv(torch.zeros(1), source)
        await asyncio.sleep(0)
        for leaver in leavers:
            await leaver.world.close()
        with pytest.raises(PeerLostError) as raised:
            await waiting
        assert raised.value.peer in (1, 2)


@pytest.mark.parametrize("source", [1, 2, None], ids=["from it", "from another", "from any"])
async def test_abort_reaches_all_ranks_although_sender_leaves_at_once(transport, source):
    """Also ranks without a connection to the sender, and ranks that wait for another rank."""
    async with world_of(3, transport=transport) as (stayer, leaver, _):
        waiting = stayer.recv(torch.zeros(1), source)
        leaver.abort("on purpose")
        await leaver.world.close()
        with pytest.raises(GroupAbortedError, match="rank 1 aborted: on purpose"):
            await waiting


async def test_abort_with_a_very_long_reason_is_an_abort(transport):
    async with world_of(2, transport=transport) as (stayer, aborter):
        await asyncio.gather(stayer.barrier(), aborter.barrier())
        waiting = stayer.recv(torch.zeros(1), 1)
        aborter.abort("on purpose" + 100_000 * "!!")
        with pytest.raises(GroupAbortedError, match="rank 1 aborted: on purpose!!"):
            await waiting


def test_abort_from_a_thread_reaches_all_ranks_although_sender_leaves_at_once(transport, together):
    def rank(group):
        if group.rank() == 1:
            group.abort("on purpose")
        else:
            with pytest.raises(GroupAbortedError, match="rank 1 aborted: on purpose"):
                group.recv(torch.zeros(1), 2 - group.rank(), background=False).result()

    together(3, rank, transport=transport)


@pytest.mark.exhaustive
async def test_leaving_after_failure_waits_for_silent_peers_only_until_timeout(transport):
    async with world_of(2, transport=transport) as (_, leaver):
        leaver.abort("on purpose")
        leaver.endpoint.notices_flushed = lambda: Until(lambda: False)
        async with asyncio.timeout(60):
            await leaver.world.close()


async def test_failure_by_left_rank_keeps_no_reference_to_later_callers(transport):
    """The world keeps the error for later calls."""
    async with world_of(2, transport=transport) as (stayer, leaver):
        waiting = stayer.recv(torch.zeros(1), None)
        await leaver.world.close()
        with pytest.raises(PeerLostError):
            await waiting

        def call_with(tensor):
            late = stayer.world.new_group([0, 1], "late").recv(torch.zeros(1), None)
            assert late.exception() is not None
            return weakref.ref(tensor)

        seen = call_with(torch.zeros(1))
        gc.collect()
        assert seen() is None
