"""Heartbeats over TCP: in both directions over one connection, and not behind a message that stays on the wire."""

from __future__ import annotations

import asyncio

import pytest
import torch

from asyncdist.config import Config
from asyncdist.testing.cluster import world_of
from asyncdist_transports.tcp import connection

# The ranks' own beats do not disturb these tests.
CONFIG = Config(heartbeat=1e6)
LARGE = 4_000_000


def beat(group):
    """Let a rank beat; return which peers it has heard since its last beat."""
    heard = {}
    group.endpoint.progress.look(lambda: bool(heard.update(group.endpoint.transport_selector.transports[0].beat())))
    return heard


@pytest.fixture
def hears(eventually):
    """Wait until a rank hears another one after that one's beat, and check that it does not hear it without."""

    async def hears(listener, speaker, peer):
        await eventually(lambda: not beat(listener)[peer])
        assert beat(listener) == {peer: False}
        beat(speaker)
        await eventually(lambda: beat(listener)[peer])

    return hears


@pytest.mark.parametrize("lanes", [1, 3])
async def test_ranks_that_send_to_each_other_hear_each_other(hears, lanes):
    async with world_of(2, transport="tcp", config=CONFIG.with_(lanes=lanes)) as groups:
        assert [beat(group) for group in groups] == [{}, {}]
        await asyncio.gather(*(group.all_reduce(torch.ones(10)) for group in groups))
        await hears(groups[0], groups[1], 1)
        await hears(groups[1], groups[0], 0)


async def test_sender_and_receiver_hear_each_other_over_a_connection_in_one_direction(hears):
    async with world_of(2, transport="tcp", config=CONFIG) as groups:
        await asyncio.gather(groups[0].send(torch.ones(10), 1), groups[1].recv(torch.zeros(10), 0))
        await hears(groups[0], groups[1], 1)
        await hears(groups[1], groups[0], 0)


async def test_message_on_the_wire_hides_neither_side(hears, eventually):
    """The receiver reads nothing from the sender, so it cannot tell whether the sender is silent."""
    async with world_of(2, transport="tcp", config=CONFIG) as groups:
        sending = groups[0].send(torch.ones(LARGE), 1)
        await eventually(lambda: beat(groups[1]).get(0) is not None)
        # Long after the sender has filled the buffers of the connection.
        for _ in range(500):
            assert beat(groups[1]) == {0: True}
            await asyncio.sleep(0)
        await hears(groups[0], groups[1], 1)
        received = torch.zeros(LARGE)
        await groups[1].recv(received, 0)
        await sending
        assert received.sum() == LARGE
        await hears(groups[1], groups[0], 0)


async def test_peer_that_acknowledges_no_heartbeat_is_not_heard_although_its_own_arrive(hears, monkeypatch):
    """Its host receives nothing from this rank. Over TCP its heartbeats arrive for some time nevertheless."""
    async with world_of(2, transport="tcp", config=CONFIG) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(10)) for group in groups))
        now, acknowledged = connection.monotonic(), [36]
        monkeypatch.setattr(connection, "monotonic", lambda: now)
        monkeypatch.setattr(connection, "delivery", lambda sock: (1, acknowledged[0], 0))
        await hears(groups[0], groups[1], 1)
        now += CONFIG.heartbeat / 10
        for _ in range(20):
            beat(groups[1])
            await asyncio.sleep(0.001)
            assert beat(groups[0]) == {1: False}
        acknowledged[0] += 36
        await hears(groups[0], groups[1], 1)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("left_unread", [True, False])
async def test_reader_that_beats_receives_the_last_message_of_a_rank_that_has_left(answers, left_unread):
    """The system discards what it has not sent of a closed connection on which something arrives or was not read."""
    async with world_of(2, transport="tcp", config=CONFIG.with_(aside_nbytes=1 << 16)) as groups:
        if answers:
            await asyncio.gather(*(group.all_reduce(torch.ones(10)) for group in groups))
        sent, received = torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)
        await groups[0].send(sent, 1)
        if left_unread:
            beat(groups[1])
        await groups[0].world.close()
        beat(groups[1])
        beat(groups[1])
        await groups[1].recv(received, 0)
        assert torch.equal(received, sent)
