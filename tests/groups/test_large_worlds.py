"""Worlds in which a rank reads the address of a peer when it first needs it: here of a few ranks, in blocks of two."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest
import torch

from asyncdist.errors import GroupError, OperationTimeoutError, PeerLostError, StoreConnectionError
from asyncdist.groups import introductions
from asyncdist.kernel.transport import address_search
from asyncdist.rendezvous import pages, session
from asyncdist.rendezvous.pages import Pages, neighbours
from asyncdist.rendezvous.session import RendezvousSession
from asyncdist.testing.cluster import world_of
from benchmarks.scale import simulation
from benchmarks.scale.cluster import Costs
from tests.support.ranks import sums

SIZE = 24
NEAR, FAR = 5, 16
"""Two ranks of which neither knows the address of the other at first."""


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(session, "BLOCK", 2)
    monkeypatch.setattr(introductions, "MOST_EAGER", 4)


@pytest.fixture
async def groups():
    async with world_of(SIZE, transport="tcp") as groups:
        assert selector(groups[NEAR]).addresses[FAR] is None
        assert selector(groups[FAR]).addresses[NEAR] is None
        yield groups


def selector(group):
    return group.endpoint.transport_selector


async def pass_on(groups, sender, receiver):
    sent, received = torch.arange(4.0), torch.zeros(4)
    await asyncio.gather(groups[sender].send(sent, receiver), groups[receiver].recv(received, sender))
    assert received.tolist() == sent.tolist()


async def test_ranks_that_do_not_know_each_other_at_first_send_and_reduce(groups):
    await pass_on(groups, NEAR, FAR)
    assert set(await sums(groups)) == {SIZE * (SIZE - 1) / 2}
    outputs = [[torch.zeros(1) for _ in groups] for _ in groups]
    inputs = [[torch.tensor([100.0 * own + other]) for other in range(SIZE)] for own in range(SIZE)]
    await asyncio.gather(*(group.all_to_all(outputs[own], inputs[own]) for own, group in enumerate(groups)))
    assert [each.item() for each in outputs[FAR]] == [100 * other + FAR for other in range(SIZE)]
    assert not any(selector(group).busy() for group in groups)


class SilentStore:
    """Lets ranks wait for pages of the store until it is told what becomes of them."""

    def __init__(self, monkeypatch):
        self.asked, self.answer = asyncio.Event(), asyncio.get_running_loop().create_future()
        read = RendezvousSession.notes

        async def notes(meeting, names, timeout=None):
            self.asked.set()
            await asyncio.shield(self.answer)
            return await read(meeting, names, timeout)

        monkeypatch.setattr(RendezvousSession, "notes", notes)


@pytest.fixture
async def store(groups, monkeypatch):
    store = SilentStore(monkeypatch)
    yield store
    if not store.answer.done():
        store.answer.set_result(None)


async def test_other_ranks_know_an_address_when_the_store_has_ended(groups, store):
    store.answer.set_exception(StoreConnectionError("the store has ended"))
    await pass_on(groups, NEAR, FAR)
    assert set(await sums(groups)) == {SIZE * (SIZE - 1) / 2}


async def test_page_that_is_awaited_comes_from_other_ranks_if_the_store_ends(groups, store):
    passing = asyncio.ensure_future(pass_on(groups, NEAR, FAR))
    await store.asked.wait()
    store.answer.set_exception(StoreConnectionError("the store has ended"))
    await passing


async def test_rank_is_lost_by_name_if_nobody_knows_its_address(groups, store, monkeypatch):
    monkeypatch.setattr(address_search, "_PATIENCE", 0.01)
    monkeypatch.setattr(address_search.AddressSearch, "on_page", lambda *arguments: None)
    store.answer.set_exception(StoreConnectionError("the store has ended"))
    with pytest.raises(
        PeerLostError, match=r"its address could not be read from rank 0's store.*has ended.*read rank 0"
    ):
        await groups[NEAR].send(torch.zeros(1), FAR)


async def test_call_names_the_rank_whose_address_it_waits_for_when_its_time_is_up(groups, store, monkeypatch):
    short = [group.new_group(timeout=0.3) for group in groups]
    with pytest.raises(OperationTimeoutError, match=f"rank {NEAR} does not know the address of rank {FAR} yet"):
        await short[NEAR].send(torch.zeros(1), FAR)


async def test_rank_that_ends_while_its_address_is_awaited_is_lost(groups, store):
    sending = asyncio.ensure_future(groups[NEAR].send(torch.zeros(1), FAR))
    await store.asked.wait()
    groups[FAR].world.leave()
    store.answer.set_result(None)
    with pytest.raises(GroupError, match=f"rank {FAR}"):
        await sending


async def test_message_whose_caller_is_cancelled_arrives_once_the_address_is_known(groups, store):
    received = torch.zeros(1)
    sending = asyncio.ensure_future(groups[NEAR].send(torch.ones(1), FAR))
    await store.asked.wait()
    sending.cancel()
    store.answer.set_result(None)
    await groups[FAR].recv(received, NEAR)
    assert received.item() == 1.0
    assert not selector(groups[NEAR]).busy()


async def test_several_calls_read_a_page_once(groups, monkeypatch):
    asked = []
    read = RendezvousSession.notes

    async def notes(meeting, names, timeout=None):
        asked.extend(names)
        return await read(meeting, names, timeout)

    monkeypatch.setattr(RendezvousSession, "notes", notes)
    await asyncio.gather(
        *(groups[NEAR].send(torch.ones(1), FAR + further) for further in (0, 1)),
        *(groups[FAR + further].recv(torch.zeros(1), NEAR) for further in (0, 1)),
    )
    assert asked.count(pages.page_name(FAR // 2)) == 1


def test_rank_of_a_world_of_100_000_holds_few_pages(monkeypatch):
    monkeypatch.setattr(session, "BLOCK", 32)
    held = neighbours(77_777, 100_000)
    assert len(held) < 32
    assert {0, 77_777 // 32, 77_778 // 32, (77_777 + 65_536) % 100_000 // 32} <= set(held)


def test_bytes_that_a_rank_reads_at_the_start_grow_with_the_logarithm_of_the_ranks(monkeypatch):
    monkeypatch.setattr(session, "BLOCK", 4)
    small, large = (simulation.simulate(simulation.Shape(size), Costs()) for size in (64, 512))
    assert large.most_read < 1.6 * small.most_read
    assert large.sent < 8 * 1.6 * small.sent


async def test_page_of_other_data_is_refused(monkeypatch):
    book = Pages(AsyncMock(world_size=SIZE), {})
    for page in (b"\xc1", b"\x01", b"\x92\x00\xc4\x01x"):
        with pytest.raises((ValueError, TypeError)):
            book.add(page)
    assert not book.holds(0)
