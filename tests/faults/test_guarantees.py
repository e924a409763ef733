"""The guarantees of docs/membership-reference.md that concern one process: time, memory, connections and other groups."""

import asyncio

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import GroupAbortedError, GroupError, PeerLostError
from asyncdist.testing.cluster import world_of
from tests.support.faults import proxied_world
from tests.support.resources import mapped_segments, open_files
from tests.support.stopwatch import Stopwatch

HEARTBEAT = 0.5
COUNT = 4_000_000
SCRIBBLE = -77.0
transports = pytest.mark.parametrize("transport", ["shm", "tcp"])


async def outcomes(works):
    return await asyncio.gather(*works, return_exceptions=True)


async def connect_all(groups):
    """Open a connection for each pair and direction."""
    works = []
    for group in groups:
        for peer in set(range(group.size())) - {group.rank()}:
            works += [group.recv(torch.zeros(1), peer, tag=99), group.send(torch.ones(1), peer, tag=99)]
    await asyncio.gather(*works)


FAULTS = {
    "drop": lambda proxy, sends: proxy.drop(to_target=sends),
    "clog": lambda proxy, sends: proxy.clog(),
    "cut": lambda proxy, sends: (proxy.refuse(), proxy.cut()),
}
"""What happens to a connection of a rank, which it sends or receives on."""


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_operation_outlives_the_heartbeat_limit_and_a_second(fault):
    """Collectives and messages of all kinds, on the ranks on either side of the fault."""
    config = Config(token="secret", heartbeat=HEARTBEAT)
    with proxied_world(3, config=config, home=asyncio.get_running_loop()) as world:
        zero, one, two = world.groups
        await connect_all(world.groups)
        since = Stopwatch()
        for (writer, reader), proxy in world.proxies.items():
            if 2 in (writer, reader):
                FAULTS[fault](proxy, writer == 2)
        # Rank 2 takes part in some, and rank 1 in others.
        works = [
            zero.all_reduce(torch.ones(10)), two.all_reduce(torch.ones(10)), one.recv(torch.zeros(1), 2),
            two.recv(torch.zeros(1), 1, tag=5), one.recv(torch.zeros(1), 0, tag=3), zero.recv(torch.zeros(1), 1, tag=4),
        ]  # fmt: skip
        sends = [zero.send(torch.ones(COUNT), 1), two.send(torch.ones(COUNT), 0)]
        results, sent = await outcomes(works), await outcomes(sends)
        assert since.seconds() < HEARTBEAT + 1.0
        assert all(isinstance(error, PeerLostError) for error in results), results
        assert all(isinstance(error, PeerLostError | None) for error in sent), sent


async def test_rest_of_a_message_does_not_reach_the_memory_of_its_failed_receive(eventually):
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        sender, receiver = world.groups
        await asyncio.gather(*(group.barrier() for group in world.groups))
        proxy = world.proxies[0, 1]
        proxy.hold_after(proxy.passed_nbytes + 1_000_000)
        room = torch.zeros(COUNT)
        sending, receiving = sender.send(torch.ones(COUNT), 1), receiver.recv(room, 0)
        await eventually(lambda: room[0] == 1.0)
        receiver.abort("test")
        with pytest.raises(GroupAbortedError):
            await receiving
        room.fill_(SCRIBBLE)
        before = proxy.passed_nbytes
        proxy.release()
        await outcomes([sending])
        await eventually(lambda: proxy.passed_nbytes > before + 3_000_000)
        others = world.new_group([0, 1])
        await asyncio.gather(*(group.barrier() for group in others.values()))
        assert bool((room == SCRIBBLE).all())


async def test_what_a_sender_writes_after_its_failure_does_not_reach_a_receiver_that_succeeds(eventually):
    """The rest of a message that is partly sent goes out before the notice of the failure."""
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        sender, receiver = world.groups
        await asyncio.gather(*(group.barrier() for group in world.groups))
        proxy = world.proxies[0, 1]
        proxy.hold_after(proxy.passed_nbytes + 1_000_000)
        sent, room = torch.ones(COUNT), torch.zeros(COUNT)
        sending, receiving = sender.send(sent, 1), receiver.recv(room, 0)
        await eventually(lambda: room[0] == 1.0)
        # The notice must not overtake the message on the connection of the receiver.
        world.proxies[1, 0].clog()
        sender.abort("test")
        with pytest.raises(GroupAbortedError):
            await sending
        sent.fill_(SCRIBBLE)
        proxy.release()
        try:
            await receiving
        except GroupError:
            assert not bool((room == SCRIBBLE).any())
        else:
            assert bool((room == 1.0).all())


@transports
async def test_memory_of_failed_collectives_stays_as_the_caller_has_left_it(transport):
    async with world_of(3, transport=transport) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        tensors = [torch.ones(100_000) for _ in groups[:2]]
        works = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=False)]
        await asyncio.sleep(0)
        groups[0].abort("test")
        assert all(isinstance(error, GroupAbortedError) for error in await outcomes(works))
        for tensor in tensors:
            tensor.fill_(SCRIBBLE)
        # The third rank comes late, and then all go on.
        late = await outcomes([groups[2].all_reduce(torch.ones(100_000))])
        assert isinstance(late[0], GroupAbortedError)
        new = await asyncio.gather(*(group.regroup() for group in groups))
        for count in (10, 100_000):
            await asyncio.gather(*(group.all_reduce(torch.ones(count)) for group in new))
        assert all(bool((tensor == SCRIBBLE).all()) for tensor in tensors)


def sockets():
    """The sockets and mapped segments of this process."""
    return {*mapped_segments(), *(target for target in open_files() if target.startswith("socket:"))}


@transports
async def test_regroup_opens_no_connection_and_maps_no_memory(transport):
    """Over tcp the first agreement of a job opens connections, on which its messages do not wait behind data."""
    async with world_of(4, transport=transport) as groups:
        await connect_all(groups)
        if transport == "tcp":
            await asyncio.gather(*(group.agree() for group in groups))
        before = sockets()
        groups[1].world.leave()
        rest = [group for group in groups if group is not groups[1]]
        new = await asyncio.gather(*(group.regroup() for group in rest))
        await connect_all(new)
        assert sockets() <= before


@transports
async def test_group_without_the_lost_rank_continues_during_the_regrouping_of_another(transport):
    async with world_of(4, transport=transport) as groups:
        others = [groups[rank].world.new_group([0, 2, 3]) for rank in (0, 2, 3)]
        rest = [groups[rank] for rank in (0, 2, 3)]
        tensors = [torch.ones(10) for _ in others]
        pending = others[0].all_reduce(tensors[0])
        groups[1].world.leave()
        new = await asyncio.gather(*(group.regroup() for group in rest))
        works = [group.all_reduce(tensor) for group, tensor in zip(others[1:], tensors[1:], strict=True)]
        await asyncio.gather(pending, *works, *(group.barrier() for group in new))
        assert all(bool((tensor == 3.0).all()) for tensor in tensors)
        assert all(group.error is None for group in others)
