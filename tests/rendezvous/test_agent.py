"""Rendezvous in the store of torchrun's agent; here, torch's own server stands in for the agent."""

import asyncio

import pytest

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import AuthenticationError, RendezvousError, RendezvousTimeoutError
from asyncdist.net.network import is_loopback
from asyncdist.rendezvous import sources
from asyncdist.rendezvous.addresses import outward
from asyncdist.store import StoreServer
from tests.support.ports import free_port

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def agent():
    import torch.distributed

    return torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def launched(rank, port, run_id="job", host=HOST):
    return Launch(rank=rank, world_size=2, master_addr=host, master_port=port, agent_store=True, run_id=run_id)


@pytest.mark.parametrize("token", [None, "the user's own"])
async def test_agent_store_serves_one_world_after_another(meet_as, agent, token):
    seen = set()
    for _ in range(2):
        launches = [launched(rank, agent.port) for rank in range(2)]
        config = Config(token=token)
        meetings = await asyncio.gather(*(meet_as(world_size=None, launch=each, config=config) for each in launches))
        exchanged = await asyncio.gather(*(meeting.exchange(b"%d" % meeting.rank) for meeting in meetings))
        assert exchanged == [[b"0", b"1"]] * 2
        assert {meeting.listen_host for meeting in meetings} == {HOST}
        assert meetings[0].where == f"torchrun's store at {HOST}:{agent.port}"
        seen.add(meetings[1].world_id)
        if token is not None:
            assert meetings[1].token == token
            assert token.encode() not in agent.get("asyncdist/job/")
        await asyncio.gather(*(meeting.close() for meeting in meetings))
    assert len(seen) == 2


async def test_jobs_and_named_worlds_are_separate(meet_as, agent):
    leaders = [
        await meet_as(world_size=None, launch=launched(0, agent.port, run_id), name=name)
        for run_id, name in (("a", ""), ("b", ""), ("b", "red"))
    ]
    follower = await meet_as(world_size=None, launch=launched(1, agent.port, "b"), name="red")
    assert follower.world_id == leaders[2].world_id


async def test_timeout_of_an_agent_that_never_listens_tells_the_last_failure(meet_as, monkeypatch):
    async def two_attempts(*_):
        yield 0
        yield 1

    monkeypatch.setattr(sources, "Backoff", two_attempts)
    with pytest.raises(RendezvousTimeoutError, match=r"rank 1 of 2 .*agent's store does not answer: Connection ref"):
        await meet_as(world_size=None, launch=launched(1, free_port()))


@pytest.mark.parametrize("token", [None, "the user's own"])
async def test_server_that_is_no_agent_is_reported(meet_as, monkeypatch, token):
    until_served = sources.wait_until_listening

    async def briefly(method, where, limit):
        await until_served(method, where, limit)
        object.__setattr__(limit, "deadline", Deadline.after(0.3))  # only after it has accepted a connection

    monkeypatch.setattr(sources, "wait_until_listening", briefly)
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), HOST, 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        with pytest.raises(RendezvousError, match="if it is not a torchrun agent, unset TORCHELASTIC_USE_AGENT_STORE"):
            await meet_as(world_size=None, launch=launched(0, port), config=Config(token=token))
    finally:
        listener.close()
        await listener.wait_closed()


async def test_rank_cancelled_while_waiting_for_rank_0(meet_as, agent):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(meet_as(world_size=None, launch=launched(1, agent.port, "no rank 0")), 0.1)


async def test_token_is_not_written_where_other_hosts_can_read_it(meet_as):
    several_hosts = Launch(
        rank=0, world_size=2, local_world_size=1, master_addr="10.1.2.3", master_port=1, agent_store=True
    )
    with pytest.raises(AuthenticationError, match=r"cannot be passed through it.*ASYNCDIST_TOKEN to the same value"):
        await meet_as(world_size=None, launch=several_hosts)


@pytest.fixture
def outside():
    """This host's outward address, from which a store accepts no clients of torch's."""
    address = outward(Config())
    if is_loopback(address):
        pytest.skip("this machine has no address but loopback")
    return address


async def test_asyncdist_store_of_an_agent_on_another_host(meet_as, outside, caplog):
    config = Config(token="secret")
    async with await StoreServer.start(outside, 0, token="secret", config=config) as served:
        launches = [launched(rank, served.port, host=outside) for rank in range(2)]
        meetings = await asyncio.gather(*(meet_as(world_size=None, launch=one, config=config) for one in launches))
        assert meetings[0].world_id == meetings[1].world_id
        assert caplog.records == []
        await asyncio.gather(*(meeting.close() for meeting in meetings))


async def test_ranks_with_asyncdist_and_c10d_clients_meet_at_one_agent(meet_as, monkeypatch):
    """If the store accepts both clients, each rank uses the one that connects first."""
    config = Config(token="secret", store_c10d="loopback")
    async with await StoreServer.start(HOST, 0, token="secret", config=config) as served:
        first = await meet_as(world_size=None, launch=launched(0, served.port), config=config)
        monkeypatch.setattr(sources, "_PROBE_DELAY", 0.0)
        second = await meet_as(world_size=None, launch=launched(1, served.port), config=config)
        assert second.world_id == first.world_id
        await asyncio.gather(first.close(), second.close())


async def test_rank_without_token_at_a_store_that_refuses_c10d_is_told_what_to_set(meet_as):
    config = Config(token="secret")
    async with await StoreServer.start(HOST, 0, token="secret", config=config) as served:
        with pytest.raises(RendezvousError, match=r"set ASYNCDIST_TOKEN on this rank.*--c10d loopback"):
            await meet_as(world_size=None, launch=launched(0, served.port))
