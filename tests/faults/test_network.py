"""A network between ranks that cuts connections at any byte, is slow or blocked, or refuses connections."""

import asyncio
import contextlib
import math
import pickle
import re
import resource
import select
import socket
import time
import tracemalloc

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import GroupAbortedError, OperationTimeoutError, PeerLostError
from asyncdist.testing.cluster import world_of
from tests.support.faults import proxied_world
from tests.support.ports import free_port
from tests.support.stopwatch import Stopwatch

# Magic and nonce.
GREETING = 12 + 32
PROOF = GREETING + 32
HELLO = PROOF + 8
HEADER = HELLO + 36
SOON = 3.0


async def outcomes(works):
    return await asyncio.gather(*works, return_exceptions=True)


def all_reduces(world, count):
    return [group.all_reduce(torch.full((count,), float(group.rank() + 1))) for group in world.groups]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "nbytes",
    [1, 12, GREETING - 1, GREETING, GREETING + 1, PROOF - 1, PROOF, PROOF + 4, HELLO - 1, HELLO, HELLO + 1,
     HEADER - 1, HEADER, HEADER + 1, HEADER + 2000, HEADER + 3999],
)  # fmt: skip
async def test_connection_cut_at_any_byte_fails_the_operation_on_both_ranks(nbytes, eventually, monkeypatch):
    # A slow machine would retry the handshake, and the proxy cuts only once.
    monkeypatch.setattr("asyncdist_transports.tcp.connection._STALLED_AFTER", math.inf)
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        world.proxies[0, 1].cut_after(nbytes)
        zero, one = await outcomes(all_reduces(world, 1000))
        assert (type(one), one.peer) == (PeerLostError, 0)
        # Rank 0's operation may have succeeded: its message had left, and rank 1's came over the other connection.
        await eventually(lambda: world.groups[0].error is not None)
        assert world.proxies[0, 1].since_cut.seconds() < SOON
        for error in [world.groups[0].error, *([zero] if isinstance(zero, Exception) else [])]:
            assert (type(error), error.peer) == (PeerLostError, 1)


@pytest.mark.parametrize("nbytes", [HELLO + 100_000, HELLO + 1_000_000, HELLO + 3_999_999])
async def test_cut_in_large_message_fails_the_operation_on_all_ranks(nbytes):
    with proxied_world(4, home=asyncio.get_running_loop()) as world:
        world.proxies[0, 1].cut_after(nbytes)
        errors = await outcomes(all_reduces(world, 5_000_000))
        assert world.proxies[0, 1].since_cut.seconds() < SOON
        assert {type(error) for error in errors} == {PeerLostError}
        assert {error.peer for error in errors} <= {0, 1}
        assert [errors[0].peer, errors[1].peer] == [1, 0]
        assert all(group.error is not None for group in world.groups)


@pytest.mark.parametrize("cut", [(0, 1), (1, 0)])
async def test_idle_cut_is_noticed_by_the_next_operation(cut, eventually):
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        await asyncio.gather(*all_reduces(world, 10))
        world.proxies[cut].cut()
        await eventually(lambda: not world.proxies[cut].num_connections)
        since = Stopwatch()
        errors = await outcomes(all_reduces(world, 10))
        assert since.seconds() < SOON
        assert [type(error) for error in errors] == [PeerLostError, PeerLostError]


@pytest.mark.parametrize(("count", "chunk_nbytes", "delay"), [(1, 1, 0.0), (700, 1, 0.0), (5000, 1000, 0.002)])
async def test_slow_network_and_small_chunks_give_correct_results(count, chunk_nbytes, delay):
    with proxied_world(3, home=asyncio.get_running_loop()) as world:
        for proxy in world.proxies.values():
            proxy.chunk_nbytes, proxy.delay = chunk_nbytes, delay
        for _ in range(2):
            tensors = [torch.full((count,), rank + 1.0) for rank in range(3)]
            works = [group.all_reduce(tensor) for group, tensor in zip(world.groups, tensors, strict=True)]
            await asyncio.gather(*works)
            assert all(torch.equal(tensor, torch.full((count,), 6.0)) for tensor in tensors)


async def test_blocked_network_applies_backpressure_without_buffering():
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        await asyncio.gather(*all_reduces(world, 10))
        sent = torch.arange(16_000_000, dtype=torch.int32)
        received = torch.zeros_like(sent)
        proxy = world.proxies[0, 1]
        proxy.clog()
        tracemalloc.start()
        try:
            highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            sending = world.groups[0].send(sent, 1)
            receiving = world.groups[1].recv(received, 0)
            passed = proxy.passed_nbytes
            await asyncio.wait([asyncio.ensure_future(sending)], timeout=0.2)
            assert not sending.is_completed()
            assert proxy.passed_nbytes == passed
            proxy.unclog()
            await asyncio.gather(sending, receiving)
            assert torch.equal(sent, received)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - highest
            assert grown < 16 << 10, f"{grown} KiB"
        finally:
            tracemalloc.stop()


async def test_unexpected_large_messages_stay_in_sender_memory(eventually):
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        await asyncio.gather(*all_reduces(world, 10))
        tensors = [torch.full((1_000_000,), number) for number in range(10)]
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sending = [world.groups[0].send(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
        await asyncio.wait([asyncio.ensure_future(sending[0])], timeout=0.2)
        assert not any(work.is_completed() for work in sending)
        room = torch.empty(1_000_000, dtype=tensors[0].dtype)
        # Receives in the order of the sends need no other memory.
        for tag in range(10):
            await world.groups[1].recv(room, 0, tag)
            assert torch.equal(room, tensors[tag])
        await asyncio.gather(*sending)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - highest
        assert grown < 24 << 10, f"{grown} KiB"


async def test_unexpected_small_messages_do_not_fill_receiver_memory(eventually):
    config = Config(token="secret", aside_nbytes=1 << 20)
    with proxied_world(2, home=asyncio.get_running_loop(), config=config) as world:
        await asyncio.gather(*all_reduces(world, 10))
        block = torch.ones(10_000)
        # The kernel's buffers, which may grow to 32 MiB, are not counted.
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            sending = [world.groups[0].send(block, 1, tag) for tag in range(300)]
            await eventually(lambda: tracemalloc.get_traced_memory()[0] - before > 1 << 20)
            await asyncio.wait([asyncio.ensure_future(sending[-1])], timeout=0.2)
            assert tracemalloc.get_traced_memory()[0] - before < 4 << 20
        finally:
            tracemalloc.stop()
        room = torch.zeros(10_000)
        # The receiver stores all messages before the last one.
        for tag in reversed(range(300)):
            await world.groups[1].recv(room, 0, tag)
            assert torch.equal(room, block)
        await asyncio.gather(*sending)


@pytest.mark.parametrize("transport", ["tcp", "inproc"])
async def test_receive_from_any_source_is_not_blocked_by_unexpected_large_message(transport):
    async with world_of(2, transport=transport) as (receiver, sender):
        large = torch.arange(1_000_000)
        first = sender.send(large, 0, tag=5)
        second = sender.send(torch.ones(3), 0, tag=6)
        room = torch.zeros(3)
        assert await receiver.recv(room, None, tag=6) == 1
        assert torch.equal(room, torch.ones(3))
        whole = torch.zeros_like(large)
        await receiver.recv(whole, None, tag=5)
        assert torch.equal(whole, large)
        await asyncio.gather(first, second)


async def test_receive_from_any_source_gets_messages_of_left_ranks_then_fails(transport, eventually):
    async with world_of(3, transport=transport) as groups:
        receiver, *senders = groups
        await asyncio.gather(*(group.barrier() for group in groups))
        for group in senders:
            await group.send(torch.full((2,), float(group.rank())), 0)
            group.world.leave()
        await eventually(lambda: all(receiver.endpoint.gone(peer) for peer in (1, 2)))
        room = [torch.zeros(2) for _ in senders]
        assert sorted([await receiver.recv(one, None) for one in room]) == [1, 2]
        assert sorted(one.tolist() for one in room) == [[1.0, 1.0], [2.0, 2.0]]
        with pytest.raises(PeerLostError, match="destroyed its process group"):
            await receiver.recv(room[0], None)


@pytest.fixture(params=[False, True], ids=["without goodbye", "with goodbye"])
async def left_behind(request, eventually):
    """Rank 1 waits for rank 0, which has sent everything and left; a proxy still holds rank 0's last messages.

    Rank 1 has read the end of its own connection: with a goodbye, unless rank 0 did not learn whose connection it was.
    """
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        (leaver,), (tcp,) = (endpoint.transport_selector.transports for endpoint in world.endpoints)

        def connections_to_leaver():
            return [connection for connection in tcp.connections.values() if connection.peer == 0]

        for (writer, _), proxy in world.proxies.items():
            if writer == 0 or not request.param:
                proxy.hold_after(PROOF)
        room = torch.zeros(3)
        receiving = world.groups[1].recv(room, 0)
        await eventually(lambda: any(connection.established for connection in connections_to_leaver()))
        if request.param:
            await eventually(lambda: any(connection.peer == 1 for connection in leaver.connections.values()))
        await world.groups[0].send(torch.ones(3), 1)
        world.endpoints[0].close()
        await eventually(lambda: not connections_to_leaver())
        yield world, receiving
        assert receiving.is_success()
        assert torch.equal(room, torch.ones(3))


async def test_rank_that_left_before_accepting_may_have_sent_on_its_own_connection(left_behind):
    world, receiving = left_behind
    world.proxies[0, 1].release()
    await receiving


async def test_delayed_process_reads_pending_bytes_before_declaring_peer_lost(left_behind):
    world, receiving = left_behind
    proxy, due = world.proxies[0, 1], world.endpoints[1].next_deadline()

    def block_the_loop():
        proxy.release()
        proxy.until(lambda: proxy.passed_nbytes == HEADER + 12 + len(world.endpoints[0].closing_frames(1)))
        while time.monotonic() < due:
            time.sleep(0.01)

    block_the_loop()
    await receiving


async def test_pending_messages_of_left_rank_are_kept(eventually):
    with proxied_world(2, home=asyncio.get_running_loop()) as world:
        leaver, stayer = world.groups
        world.proxies[1, 0].hold_after(PROOF)
        world.endpoints[1].progress.post(lambda: world.endpoints[1].watch(0))
        room = torch.zeros(50_000)
        await asyncio.gather(stayer.recv(torch.zeros(1), 0), leaver.send(torch.ones(1), 1))
        await leaver.send(torch.ones(50_000), 1, tag=2)
        world.endpoints[0].close()
        await eventually(lambda: bool(world.endpoints[1].timers))
        await eventually(lambda: not world.endpoints[1].timers)
        await stayer.recv(room, 0, tag=2)
        assert torch.equal(room, torch.ones(50_000))


async def test_group_with_left_rank_fails_only_when_rank_is_needed(transport, eventually):
    async with world_of(3, transport=transport) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        groups[2].world.leave()
        await eventually(lambda: all(group.endpoint.gone(2) for group in groups[:2]))
        made = [group.world.new_group([0, 1, 2]) for group in groups[:2]]
        room = torch.zeros(4)
        await asyncio.gather(made[0].send(torch.ones(4), 1), made[1].recv(room, 0))
        assert torch.equal(room, torch.ones(4))
        for error in await outcomes([group.all_reduce(torch.ones(4)) for group in made]):
            assert isinstance(error, PeerLostError | GroupAbortedError)
            assert "rank 2 was lost" in str(error)


def redirect(group, peer, where):
    """Let the connection to a peer, which is not open yet, go to another address."""
    group.endpoint.link(peer)._where = where


async def test_unreachable_address_is_reported_on_both_ranks():
    nowhere = free_port()
    async with world_of(2, transport="tcp") as groups:
        redirect(groups[1], 0, ("127.0.0.1", nowhere))
        zero, one = await outcomes([group.all_reduce(torch.ones(1000)) for group in groups])
        why = f"cannot connect to it at 127.0.0.1:{nowhere}: Connection refused; check ASYNCDIST_SOCKET_IFNAME"
        assert (type(one), one.peer) == (PeerLostError, 0)
        assert f"rank 0 was lost ({why}" in str(one)
        assert (type(zero), zero.peer) == (PeerLostError, 1)
        assert f"rank 1 was lost (it found that rank 0 was lost ({why}" in str(zero)


@pytest.fixture
def unanswered():
    """An address that does not answer: pending connections fill the backlog of its listener."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        where = listener.getsockname()
        connected = True
        while connected:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(where)
            connected = bool(select.select([], [one], [], 0.2)[1])
        yield where


async def test_timeout_error_mentions_missing_connection(unanswered):
    async with world_of(2, transport="tcp") as groups:
        redirect(groups[0], 1, unanswered)
        groups[0].set_timeout(0.5)
        with pytest.raises(OperationTimeoutError) as late:
            await groups[0].send(torch.ones(1), 1)
        host, port = unanswered
        assert re.search(
            rf"rank 1 to take data \(rank 0 has no connection to rank 1 at {host}:{port} yet, tried for \d s\); "
            r"check ASYNCDIST_SOCKET_IFNAME on that rank, routes and firewalls$",
            late.value.summary,
        )
        assert str(pickle.loads(pickle.dumps(late.value))) == str(late.value)


async def test_reported_timeout_mentions_missing_connection_to_waiting_rank(unanswered):
    async with world_of(2, transport="tcp") as groups:
        redirect(groups[0], 1, unanswered)
        groups[1].set_timeout(0.5)
        aborted, late = await outcomes([groups[0].send(torch.ones(1), 1), groups[1].recv(torch.ones(1), 0)])
        assert (type(late), late.peers) == (OperationTimeoutError, (0,))
        assert "check whether those ranks issued the same call" in str(late)
        assert isinstance(aborted, GroupAbortedError)
        assert re.search(
            r"rank 1 timed out after 0\.5 s, waiting for data from rank 0 .*\(rank 0 has no connection to rank 1",
            str(aborted),
        )
        assert aborted.summary.endswith("check ASYNCDIST_SOCKET_IFNAME on that rank, routes and firewalls")


async def test_unaccepted_connection_is_not_reported_as_network_problem():
    async with world_of(2, transport="tcp") as groups:
        with socket.create_server(("127.0.0.1", 0)) as busy:
            redirect(groups[0], 1, busy.getsockname())
            groups[0].set_timeout(0.5)
            with pytest.raises(
                OperationTimeoutError,
                match=r"to take data \(rank 1 does not answer\); check whether those ranks issued",
            ):
                await groups[0].send(torch.ones(1), 1)
