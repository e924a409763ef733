"""Point-to-point messages: matching by sender and tag, ordering, early senders and receivers, and any-source."""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch

import asyncdist as dist
from asyncdist import sync
from asyncdist.config import Config
from asyncdist.errors import GroupError, OperationTimeoutError, PeerLostError, UsageError
from asyncdist.kernel.transport import matching
from asyncdist.testing.cluster import world_of

# Elements of a message that exceeds the buffer for unexpected messages.
LARGE = 200_000


def filled(value, count=4):
    return torch.full((count,), float(value))


@pytest.mark.parametrize("count", [1, LARGE])
async def test_messages_of_one_tag_keep_their_order(transport, count):
    for lanes, eager in ((1, 64 << 10), (3, 0), (1, 1 << 30)):
        async with world_of(2, transport=transport, config=Config(lanes=lanes, eager_nbytes=eager)) as (zero, one):
            sent = [zero.send(filled(turn, count), 1) for turn in range(5)]
            rooms = [torch.zeros(count) for _ in range(5)]
            for turn, room in enumerate(rooms):
                assert await one.recv(room, 0) == 0
                assert room.eq(turn).all()
            await asyncio.gather(*sent)


@pytest.mark.exhaustive
@pytest.mark.parametrize("counts", [(1, 1, 1), (LARGE, LARGE, LARGE), (LARGE, 1, 2), (1, LARGE, 2)], ids=str)
@pytest.mark.parametrize("awaited", [True, False], ids=["another is awaited", "nothing is awaited"])
async def test_messages_that_wait_for_their_receives_keep_their_order(transport, counts, awaited):
    """An unexpected message is buffered when a later one is received, and the later one may be small."""
    for eager in (64 << 10, 0):
        async with world_of(2, transport=transport, config=Config(eager_nbytes=eager)) as (zero, one):
            sent = [zero.send(filled(turn, count), 1) for turn, count in enumerate(counts)]
            # Let every message arrive that does not wait for a receive.
            for _ in range(20):
                await asyncio.sleep(0)
            other = one.recv(torch.zeros(1), 0, tag=1) if awaited else None
            for turn, count in enumerate(counts):
                await one.recv(room := torch.zeros(count), 0)
                assert room.eq(turn).all()
            sent.append(zero.send(filled(1, 1), 1, tag=1))
            other = other or one.recv(torch.zeros(1), 0, tag=1)
            await asyncio.gather(*sent, other)


@pytest.mark.parametrize("count", [1, LARGE])
async def test_tags_are_received_in_any_order(transport, count):
    async with world_of(2, transport=transport) as (zero, one):
        for order in itertools.permutations(range(3)):
            sent = [zero.send(filled(tag, count), 1, tag) for tag in range(3)]
            for tag in order:
                room = torch.zeros(count)
                await one.recv(room, 0, tag)
                assert room.eq(tag).all()
            await asyncio.gather(*sent)


@pytest.mark.parametrize("count", [1, LARGE])
@pytest.mark.parametrize("posted", [True, False], ids=["posted before", "posted after"])
async def test_any_source_receive_passes_large_messages_of_another_tag(transport, count, posted):
    """The expected message follows an unexpected one that exceeds the buffer."""
    async with world_of(3, transport=transport) as groups:
        room = torch.zeros(count)
        received = groups[0].recv(room, None, tag=7) if posted else None
        blocking = [group.send(filled(5, LARGE), 0, tag=5) for group in groups[1:]]
        sending = groups[2].send(filled(2, count), 0, tag=7)
        # Let every message arrive that does not wait for a receive.
        for _ in range(20):
            await asyncio.sleep(0)
        if received is None:
            received = groups[0].recv(room, None, tag=7)
        assert await received == 2
        assert room.eq(2).all()
        for source in (1, 2):
            assert await groups[0].recv(torch.zeros(LARGE), source, tag=5) == source
        await asyncio.gather(sending, *blocking)


async def test_any_source_receive_gets_each_message_once(transport):
    async with world_of(4, transport=transport) as groups:
        for early in (True, False):
            works, rooms = [], [torch.zeros(3) for _ in range(9)]
            if not early:
                works = [groups[0].recv(room) for room in rooms]
            sent = [group.send(filled(10 * group.rank() + turn, 3), 0) for turn in range(3) for group in groups[1:]]
            works = works or [groups[0].recv(room) for room in rooms]
            senders = await asyncio.gather(*works)
            await asyncio.gather(*sent)
            got = [(sender, int(room[0])) for sender, room in zip(senders, rooms, strict=True)]
            assert sorted(got) == [(rank, 10 * rank + turn) for rank in (1, 2, 3) for turn in range(3)]
            # The messages of one sender keep their order.
            for rank in (1, 2, 3):
                assert [value for sender, value in got if sender == rank] == [10 * rank + turn for turn in range(3)]


async def test_any_source_and_given_source_receives_at_once(transport):
    """A receive from a given rank has the first claim on that rank's message."""
    async with world_of(3, transport=transport) as groups:
        from_any, from_one = torch.zeros(1), torch.zeros(1)
        works = [groups[0].recv(from_any), groups[0].recv(from_one, 1)]
        await groups[1].send(filled(1, 1), 0)
        assert await works[1] == 1
        await groups[2].send(filled(2, 1), 0)
        assert await works[0] == 2
        assert (from_any.item(), from_one.item()) == (2, 1)


async def test_global_and_group_ranks(transport):
    async with world_of(4, transport=transport) as world:
        groups = [group.world.new_group([3, 1, 2]) for group in world]
        room, other = torch.zeros(2), torch.zeros(2)
        # In the group, global rank 3 is rank 0, 1 is rank 1 and 2 is rank 2.
        received = groups[3].recv(room, 2), groups[1].recv(other)
        await asyncio.gather(groups[2].send(filled(5, 2), 0), groups[3].send(filled(6, 2), 1))
        assert await received[0] == 2
        assert await received[1] == 3
        assert (room.tolist(), other.tolist()) == ([5, 5], [6, 6])
        # The APIs take global ranks, or ranks in the group as `group_src` and `group_dst`.
        room, other = torch.zeros(2), torch.zeros(2)
        works = [dist.recv(room, src=3, group=groups[1]), dist.irecv(other, group=groups[2], group_src=0, tag=2)]
        works += [dist.send(filled(7, 2), dst=1, group=groups[3]), dist.isend(filled(8, 2), 2, groups[3], tag=2)]
        assert (await asyncio.gather(*works))[:2] == [3, 3]
        assert (room.tolist(), other.tolist()) == ([7, 7], [8, 8])
        for wrong in (
            lambda: dist.send(room, dst=0, group=groups[1]),
            lambda: dist.send(room, group=groups[1]),
            lambda: dist.recv(room, 3, groups[1], 0, 0),
        ):
            with pytest.raises(UsageError):
                wrong()


async def test_messages_and_collectives_pass_each_other(transport):
    async with world_of(2, transport=transport) as (zero, one):
        sent = zero.send(filled(3, LARGE), 1)
        sums = await asyncio.gather(zero.all_reduce(filled(1)), one.all_reduce(filled(1)))
        assert [tensor[0] for tensor in sums] == [2, 2]
        room = torch.zeros(LARGE)
        await asyncio.gather(one.recv(room, 0), sent)
        assert room.eq(3).all()


async def test_send_completes_when_its_memory_may_be_changed(transport):
    for count in (4, LARGE):
        async with world_of(2, transport=transport) as (zero, one):
            tensor, room = filled(1, count), torch.zeros(count)
            received = one.recv(room, 0)
            await zero.send(tensor, 1)
            tensor.fill_(9)
            await received
            assert room.eq(1).all()


async def test_large_send_waits_for_its_receiver(transport):
    """Back-pressure: the sender keeps the data that does not fit into the buffers of the sockets."""
    async with world_of(2, transport=transport) as (zero, one):
        await asyncio.gather(zero.barrier(), one.barrier())
        sent = zero.send(torch.zeros(8_000_000), 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sent.is_completed()
        await asyncio.gather(one.recv(torch.zeros(8_000_000), 0), sent)


async def test_receive_without_a_sender_times_out(transport):
    async with world_of(3, transport=transport) as groups:
        for source, words in ((1, "waiting for data from rank 1"), (None, "waiting for any rank to send")):
            group = groups[0].world.new_group(None)
            with pytest.raises(OperationTimeoutError, match=words) as late:
                await group.recv(filled(0), source, timeout=0.05)
            assert late.value.peers == ((1,) if source else ())


# -- several at once ---------------------------------------------------------------------------------


async def test_batches(transport):
    async with world_of(3, transport=transport) as groups:
        rooms = [[torch.zeros(5), torch.zeros(5)] for _ in range(3)]

        def batch(group):
            rank = group.rank()
            left, right = (rank - 1) % 3, (rank + 1) % 3
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, rooms[rank][0], left, group),
                    dist.P2POp(dist.isend, filled(rank, 5), right, group=group),
                    dist.P2POp(dist.isend, filled(10 + rank, 5), group=group, group_peer=left, tag=3),
                    dist.P2POp(sync.irecv, rooms[rank][1], right, group, 3),
                ]
            )

        batches = [batch(group) for group in groups]
        assert all(len(works) == 4 for works in batches)
        results = await asyncio.gather(*itertools.chain(*batches))
        for rank in range(3):
            assert results[4 * rank] == (rank - 1) % 3
            assert rooms[rank][0].eq((rank - 1) % 3).all()
            assert rooms[rank][1].eq(10 + (rank + 1) % 3).all()


def test_blocking_send_and_receive(together, transport):
    def rank(group):
        for turn in range(3):
            tensor = filled(turn, LARGE if turn else 2)
            if group.rank() == turn % 2:
                assert sync.send(tensor, 1 - group.rank(), group=group) is None
            else:
                room = torch.zeros_like(tensor)
                assert sync.recv(room, None if turn else turn % 2, group=group) == turn % 2
                assert torch.equal(room, tensor)
        return True

    assert all(together(2, rank, transport=transport))


async def test_batch_refuses_invalid_operations():
    async with world_of(2) as (group, _):
        for wrong, words in (
            (lambda: dist.P2POp(dist.all_reduce, filled(0), 1, group), "takes isend or irecv"),
            (lambda: dist.P2POp(dist.isend, filled(0), 2, group), "global rank 2 is not in group"),
            (lambda: dist.P2POp(dist.isend, filled(0), "1", group), "global rank '1' is not in group"),
            (lambda: dist.P2POp(dist.isend, filled(0), group=group), "peer is missing"),
            (lambda: dist.batch_isend_irecv([]), "one at least"),
            (lambda: dist.batch_isend_irecv([filled(0)]), "list of P2POp"),
        ):
            with pytest.raises(UsageError, match=words):
                wrong()


# -- objects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [2, None])
async def test_lists_of_objects(transport, source):
    async with world_of(3, transport=transport) as groups:
        for values in ([1], [{"a": torch.arange(3)}, None], [b"x" * 300_000, "y"], []):
            room = [object()] * len(values)
            sent = dist.send_object_list(values, dst=0, group=groups[2])
            assert await dist.recv_object_list(room, src=source, group=groups[0]) == 2
            await sent
            assert len(room) == len(values)
            if values and isinstance(values[0], dict):
                assert torch.equal(room[0].pop("a"), torch.arange(3))
                assert room == [{}, None]
            else:
                assert room == values


async def test_objects_of_several_senders_do_not_mix(transport):
    async with world_of(4, transport=transport) as groups:
        sent = [group.send_object_list([group.rank()] * 3, 0) for group in groups[1:] for _ in range(2)]
        seen = []
        for _ in range(6):
            room = [None] * 3
            sender = await groups[0].recv_object_list(room)
            assert room == [sender] * 3
            seen.append(sender)
        assert sorted(seen) == [1, 1, 2, 2, 3, 3]
        await asyncio.gather(*sent)


def no_memory(*_):
    raise MemoryError


@pytest.mark.parametrize("reason", ["limit", "memory"])
@pytest.mark.parametrize("source", [0, None], ids=["from the sender", "from any"])
async def test_unexpected_messages_have_a_limit_while_another_receive_is_posted(
    transport, monkeypatch, reason, source, eventually
):
    """The error blames the missing receive, not the sender, and names the tag, the bytes and the setting."""
    monkeypatch.setattr(matching, "_LEAST_LIMIT", 0)
    if reason == "memory":
        monkeypatch.setattr(matching, "UnexpectedMessage", no_memory)
    config = Config(eager_nbytes=0, aside_nbytes=LARGE)
    async with world_of(2, transport=transport, config=config) as (zero, one):
        pending = one.recv(torch.zeros(1), source, tag=9)
        sent = [zero.send(filled(turn, LARGE), 1, tag=1) for turn in range(4)]
        with pytest.raises(
            GroupError, match=f"rank 1 has no room for a message of {4 * LARGE} bytes with tag 1"
        ) as error:
            await pending
        assert not isinstance(error.value, PeerLostError)
        assert "ASYNCDIST_ASIDE_NBYTES" in str(error.value)
        assert one.endpoint.inboxes[0].aside_nbytes <= 8 * LARGE
        with pytest.raises(GroupError, match="rank 1 has no room"):
            await zero.recv(torch.zeros(1), 1)
        for work in sent:
            await eventually(work.is_completed)
            work.exception()
        assert not one.endpoint.lost_peers


async def test_single_unexpected_message_may_exceed_the_limit(transport, monkeypatch):
    monkeypatch.setattr(matching, "_LEAST_LIMIT", 0)
    async with world_of(2, transport=transport, config=Config(eager_nbytes=0, aside_nbytes=1)) as (zero, one):
        later = one.recv(torch.zeros(1), 0, tag=9)
        sent = zero.send(filled(3, LARGE), 1, tag=1), zero.send(filled(4, 1), 1, tag=9)
        await later
        room = torch.zeros(LARGE)
        await one.recv(room, 0, tag=1)
        assert room.eq(3).all()
        await asyncio.gather(*sent)
