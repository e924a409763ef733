"""Rendezvous of ranks in one process over real sockets on loopback."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time

import msgpack
import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.environment import Launch
from asyncdist.errors import AddressError, AuthenticationError, RendezvousError, RendezvousTimeoutError, UsageError
from asyncdist.rendezvous import RendezvousSession, addresses, meet
from asyncdist.rendezvous import join as joining
from asyncdist.rendezvous import session as sessions
from asyncdist.rendezvous.record_store import AddressRecord
from asyncdist.store import AsyncPrefixStore, AsyncStore, HashStore, StoreServer, TCPStore
from asyncdist.store.client import connect as dialling
from asyncdist.store.protocol.c10d import Code
from tests.support.c10d_peer import Peer
from tests.support.faults import Proxy
from tests.support.ports import free_port
from tests.support.rendezvous_stores import BLOCKING_STORES
from tests.support.stopwatch import Stopwatch

LONG = 60.0


async def world_of(meet_as, size, init_method=None, **arguments):
    """Complete the rendezvous of a whole world and check its ranks."""
    if init_method is not None and init_method.endswith(":0"):
        leader = await meet_as(init_method, 0, size, **arguments)
        others = await asyncio.gather(*(meet_as(leader.where, rank, size, **arguments) for rank in range(1, size)))
        meetings = [leader, *others]
    else:
        meetings = await asyncio.gather(*(meet_as(init_method, rank, size, **arguments) for rank in range(size)))
    for turn in range(2):
        payloads = [b"payload %d of %d" % (turn, rank) for rank in range(size)]
        assert await asyncio.gather(*map(RendezvousSession.exchange, meetings, payloads)) == [payloads] * size
    assert [meeting.rank for meeting in meetings] == list(range(size))
    assert {meeting.world_size for meeting in meetings} == {size}
    assert len({meeting.world_id for meeting in meetings}) == 1
    assert len({meeting.token for meeting in meetings}) == 1
    assert [meeting.server is not None for meeting in meetings] == [True] + [False] * (size - 1)
    return meetings


async def close_all(meetings):
    since = Stopwatch()
    for _ in range(2):
        await asyncio.gather(*(meeting.close(LONG) for meeting in meetings))
    assert since.seconds() < LONG / 2, "a rank waited for its timeout"


# -- meeting points ------------------------------------------------------------------------------


@pytest.mark.each_loop
@pytest.mark.parametrize("size", [1, 2, 5, 16])
async def test_world_meets_at_an_address(meet_as, size):
    meetings = await world_of(meet_as, size, "tcp://127.0.0.1:0")
    assert meetings[0].where == f"tcp://127.0.0.1:{meetings[0].server.port}"
    assert {meeting.listen_host for meeting in meetings} == {"127.0.0.1"}
    assert meetings[0].token is None
    await close_all(meetings)


@pytest.fixture(params=["file", "folder", *BLOCKING_STORES, "TCPStore", "AsyncStore", "AsyncPrefixStore"])
async def meeting_point(request, tmp_path, in_thread):
    """Return the arguments of `meet` that name a file or a store. Rank 0 removes its file."""
    if request.param in ("file", "folder"):
        yield {"init_method": f"file://{tmp_path / 'meet' if request.param == 'file' else tmp_path}"}
        assert list(tmp_path.iterdir()) == []
        return
    async with contextlib.AsyncExitStack() as stack:
        if request.param in BLOCKING_STORES:
            made = BLOCKING_STORES[request.param](str(tmp_path / "store"))
            stack.callback(getattr(made, "close", lambda: None))
        else:
            server = await stack.enter_async_context(await StoreServer.start("127.0.0.1", 0))
            if request.param == "TCPStore":
                made = stack.enter_context(await in_thread(TCPStore, "127.0.0.1", server.port))
            else:
                made = await stack.enter_async_context(await AsyncStore.connect("127.0.0.1", server.port))
            if request.param == "AsyncPrefixStore":
                made = AsyncPrefixStore("part", made)
        yield {"store": made}


async def test_meeting_point_serves_one_world_after_another(meet_as, meeting_point):
    first = await world_of(meet_as, 3, **meeting_point)
    assert first[0].token
    await close_all(first)
    second = await world_of(meet_as, 3, **meeting_point)
    assert second[0].world_id != first[0].world_id
    assert second[0].token != first[0].token
    await close_all(second)


@pytest.mark.each_loop
async def test_async_store_of_another_loop(meet_as, in_thread):
    async with await StoreServer.start("127.0.0.1", 0) as server:
        there = await in_thread(background_loop().run, AsyncStore.connect("127.0.0.1", server.port))
        meetings = await world_of(meet_as, 2, store=there)
        assert {meeting.listen_host for meeting in meetings} == {"127.0.0.1"}, "the store listens on loopback only"
        await close_all(meetings)
        await in_thread(background_loop().run, there.close())


async def test_argument_that_is_no_store_is_refused(meet_as):
    with pytest.raises(UsageError, match=r"takes a store of asyncdist or of torch.distributed, not dict"):
        await meet_as(rank=0, store={})


async def test_ranks_from_the_launcher(meet_as):
    port = free_port()
    launches = [Launch(rank=rank, world_size=2, master_addr="localhost", master_port=port) for rank in range(2)]
    meetings = await asyncio.gather(*(meet_as(world_size=None, launch=launch) for launch in launches))
    assert [meeting.rank for meeting in meetings] == [0, 1]
    assert meetings[1].where == f"tcp://localhost:{port}"
    assert await asyncio.gather(*(meeting.exchange(b"") for meeting in meetings)) == [[b"", b""]] * 2
    await close_all(meetings)


async def test_ipv6(meet_as):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this host has no IPv6")
    meetings = await world_of(meet_as, 2, "tcp://[::1]:0")
    assert meetings[0].where == f"tcp://[::1]:{meetings[0].server.port}"
    assert {meeting.listen_host for meeting in meetings} == {"::1"}


# -- several worlds, several times ----------------------------------------------------------------


async def test_named_worlds_share_an_address_only(meet_as):
    red = [await meet_as("tcp://127.0.0.1:0", 0, name="red")]
    blue = [await meet_as(red[0].where, 0, name="blue")]
    assert blue[0].server is red[0].server
    red.append(await meet_as(red[0].where, 1, name="red"))
    blue.append(await meet_as(red[0].where, 1, name="blue"))
    answers = await asyncio.gather(*(meeting.exchange(b"red") for meeting in red), *(m.exchange(b"blue") for m in blue))
    assert answers == [[b"red"] * 2] * 2 + [[b"blue"] * 2] * 2
    await asyncio.gather(red[0].store.set("key", b"red"), blue[0].store.set("key", b"blue"))
    await close_all(red)
    assert await blue[1].store.get("key") == b"blue"
    assert await blue[1].store.list_keys() == ["key"]
    await close_all(blue)


async def test_world_meets_repeatedly_at_one_port(meet_as):
    keeper = await meet_as("tcp://127.0.0.1:0", 0, 1, name="keeps the port")
    worlds = []

    async def live(rank):
        for _ in range(5):
            meeting = await meet_as(keeper.where, rank, name="cycle")
            assert await meeting.exchange(b"%d" % rank) == [b"0", b"1"]
            if rank == 0:
                worlds.append(meeting.world_id)
            await meeting.close()

    await asyncio.gather(live(0), live(1))
    assert len(set(worlds)) == 5
    left = await keeper.store.underlying_store.list_keys()
    assert not [key for key in left if worlds[0] in key]


# -- stale addresses ------------------------------------------------------------------------------


class Watched(HashStore):
    """A store that sets an event at its second read, when the address of the first record has been tried."""

    def __init__(self):
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._reads = 0
        self.read_twice = asyncio.Event()

    def get(self, key, timeout=None):
        self._reads += 1
        if self._reads == 2:
            self._loop.call_soon_threadsafe(self.read_twice.set)
        return super().get(key, timeout)


@pytest.mark.parametrize("token", ["another", None])
@pytest.mark.parametrize("alive", [False, True], ids=["nothing listens", "another program listens"])
async def test_record_of_another_store_is_skipped(meet_as, alive, token):
    store = Watched()
    async with await StoreServer.start("127.0.0.1", 0, token="another") as stranger:
        store.set("asyncdist/", AddressRecord("127.0.0.1", stranger.port, token, "0123", 2).encode())
        if not alive:
            await stranger.close()
        follower = asyncio.ensure_future(meet_as(rank=1, store=store))
        await store.read_twice.wait()
        leader = await meet_as(rank=0, store=store)
        assert (await follower).world_id == leader.world_id
    store.close()


async def test_record_of_a_killed_rank_0_is_replaced(meet_as):
    store = HashStore()
    killed = await meet_as(rank=0, store=store)
    await asyncio.wrap_future(background_loop().submit(killed.server.close()))
    leader, follower = await asyncio.gather(meet_as(rank=0, store=store), meet_as(rank=1, store=store))
    assert leader.world_id == follower.world_id != killed.world_id
    assert await asyncio.gather(leader.exchange(b"a"), follower.exchange(b"b")) == [[b"a", b"b"]] * 2
    await killed.close()
    assert AddressRecord.decode(store.get("asyncdist/")).world_id == leader.world_id, "rank 0 withdraws its own record"
    store.close()


# -- refusals and timeouts -------------------------------------------------------------------------


@pytest.mark.each_loop
async def test_incomplete_world_names_the_missing_ranks_on_every_rank(meet_as):
    leader = await meet_as("tcp://127.0.0.1:0", 0, 5)
    others = [await meet_as(leader.where, rank, 5, timeout=60) for rank in (1, 3)]
    waiting = [asyncio.ensure_future(each.exchange(b"")) for each in others]
    await leader.store.underlying_store.wait([leader.keys("part0", 0, rank) for rank in (1, 3)])
    outcomes = await asyncio.gather(leader.exchange(b"", timeout=0.1), *waiting, return_exceptions=True)
    for error in outcomes:
        assert isinstance(error, RendezvousTimeoutError)
        assert (error.joined, error.missing, error.timeout) == ((0, 1, 3), (2, 4), 0.1)
        assert "after 0.1 s only 3 of 5 ranks" in str(error)
        assert "joined 0-1, 3, missing 2, 4" in str(error)
    late = await meet_as(leader.where, 4, 5)
    with pytest.raises(RendezvousTimeoutError, match="missing 2, 4"):
        await late.exchange(b"")


async def test_blocks_of_blocks_combine(meet_as, monkeypatch):
    monkeypatch.setattr(sessions, "BLOCK", 3)
    await close_all(await world_of(meet_as, 28, "tcp://127.0.0.1:0"))


async def offer_and_stop(meeting):
    """Do what a rank has done that stops before it combines what its block has offered."""
    await meeting.store.underlying_store.set(meeting.keys("part0", 0, meeting.rank), msgpack.packb([b""]))


async def test_one_block_waits_for_no_rank_that_combines_it(meet_as):
    leader = await meet_as("tcp://127.0.0.1:0", 0, 3)
    others = [await meet_as(leader.where, rank, 3) for rank in (1, 2)]
    await offer_and_stop(leader)
    assert await asyncio.gather(*(meeting.exchange(b"") for meeting in others)) == [[b""] * 3] * 2


@pytest.mark.parametrize(("silent", "size"), [(3, 5), (9, 12)])
async def test_rank_that_does_not_combine_its_block_is_named(meet_as, monkeypatch, silent, size):
    monkeypatch.setattr(sessions, "BLOCK", 3)
    meetings = [await meet_as("tcp://127.0.0.1:0", 0, size)]
    meetings += [await meet_as(meetings[0].where, rank, size, timeout=60) for rank in range(1, size)]
    await offer_and_stop(meetings[silent])
    others = [asyncio.ensure_future(meeting.exchange(b"")) for meeting in meetings[1:] if meeting.rank != silent]
    keys = [meetings[0].keys("part0", 0, rank) for rank in range(1, size)]
    keys += [meetings[0].keys("part1", 0, rank) for rank in range(3, size, 3) if rank != silent]
    await meetings[0].store.underlying_store.wait(keys)
    outcomes = await asyncio.gather(meetings[0].exchange(b"", timeout=0.2), *others, return_exceptions=True)
    for error in outcomes:
        assert isinstance(error, RendezvousTimeoutError)
        assert error.missing == (silent,)


async def test_missing_rank_0_times_out(meet_as, tmp_path):
    port = free_port()
    for init_method in (f"tcp://127.0.0.1:{port}", f"file://{tmp_path}"):
        begun = time.monotonic()
        with pytest.raises(RendezvousTimeoutError) as caught:
            await meet_as(init_method, 1, 4, timeout=0.3)
        assert time.monotonic() - begun > 0.2
        assert (caught.value.joined, caught.value.missing, caught.value.world_size) == ((1,), (0,), 4)
        assert "rank 1 of 4 had not found rank 0 at" in str(caught.value)


async def test_waiting_rank_says_for_whom_it_waits_ever_more_rarely(meet_as, monkeypatch):
    for module in (sessions, joining):
        monkeypatch.setattr(module, "FIRST_NOTICE", 0.1)
    notices: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(logging.getLogger("asyncdist"), "warning", lambda text, *args: notices.put_nowait(text % args))
    where = f"tcp://127.0.0.1:{free_port()}"
    early = asyncio.ensure_future(meet_as(where, 1, 4))
    assert (await notices.get()).startswith(f"rank 1 is still waiting for rank 0 at {where}: ")
    leader, other = await meet_as(where, 0, 4), await early
    waiting = asyncio.gather(leader.exchange(b""), other.exchange(b""), return_exceptions=True)
    await leader.store.underlying_store.wait([leader.keys("part0", 0, rank) for rank in (0, 1)])
    begun = time.monotonic()
    while not notices.empty():
        notices.get_nowait()
    assert [await notices.get() for _ in range(2)] == [f"still waiting for rank 2-3 at {where}: 2 of 4 have joined"] * 2
    assert time.monotonic() - begun > 0.2
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_rank_0_without_time_left_times_out(meet_as, tmp_path):
    for init_method in ("tcp://127.0.0.1:0", f"file://{tmp_path}"):
        with pytest.raises(RendezvousTimeoutError, match=r"after 0 s only 0 of 3 ranks .*missing 0-2") as caught:
            await meet_as(init_method, 0, 3, timeout=0)
        assert (caught.value.joined, caught.value.missing) == ((), (0, 1, 2))


async def one_attempt(*_):
    yield 0


async def test_world_of_another_name_times_out(meet_as, monkeypatch):
    leader = await meet_as("tcp://127.0.0.1:0", 0, name="red")
    connect = joining.WorldSpec.connect

    async def connect_with_short_requests(world, *where):
        client = await connect(world, *where)
        client.set_timeout(0.1)
        return client

    monkeypatch.setattr(joining.WorldSpec, "connect", connect_with_short_requests)
    monkeypatch.setattr(joining, "_FIRST_TRY", LONG)
    monkeypatch.setattr(joining, "Backoff", one_attempt)
    with pytest.raises(RendezvousTimeoutError, match="does not hold the world 'blue'"):
        await meet_as(leader.where, 1, name="blue")


async def test_different_world_size_is_refused(meet_as):
    leader = await meet_as("tcp://127.0.0.1:0", 0, 3)
    waiting = asyncio.ensure_future(leader.exchange(b""))
    reason = "rank 1 was started with world_size 4, and rank 0 with 3"
    with pytest.raises(RendezvousError, match=reason):
        await meet_as(leader.where, 1, 4)
    with pytest.raises(RendezvousError, match="rank 3 was started with world_size 4, and rank 0 with 3"):
        await meet_as(leader.where, 3, 4)
    other = await meet_as(leader.where, 2, 3)
    for each in (waiting, other.exchange(b"")):
        with pytest.raises(RendezvousError, match=reason):
            await each


async def test_second_process_with_the_same_rank_is_refused(meet_as):
    meetings = await world_of(meet_as, 2, "tcp://127.0.0.1:0")
    with pytest.raises(RendezvousError, match=r"rank 1 is taken at tcp://.*a second job another name"):
        await meet_as(meetings[0].where, 1)
    answers = await asyncio.gather(*(meeting.exchange(b"still") for meeting in meetings))
    assert answers == [[b"still"] * 2] * 2, "the first ranks continue"


async def test_second_rank_0_is_refused(meet_as, tmp_path):
    url = f"file://{tmp_path}"
    meetings = await world_of(meet_as, 2, url)
    with pytest.raises(RendezvousError, match=r"rank 0 is taken at file://.*two processes were started as rank 0"):
        await meet_as(url, 0)
    direct = await meet_as("tcp://127.0.0.1:0", 0)
    with pytest.raises(RendezvousError, match="rank 0 is taken at tcp://"):
        await meet_as(direct.where, 0)
    await close_all(meetings)
    assert (await meet_as(url, 0, 1)).world_size == 1, "the ended world was found"


async def test_slow_rank_0_is_not_replaced(meet_as, monkeypatch):
    """The second attempt to connect finds that rank 0 still leads."""
    store, tries = HashStore(), []
    leader = await meet_as(rank=0, store=store)
    with Proxy("127.0.0.1", leader.server.port) as proxy:
        proxy.clog()
        record = AddressRecord.decode(store.get("asyncdist/"))
        store.set("asyncdist/", dataclasses.replace(record, port=proxy.address[1]).encode())

        async def probe(*where):
            tries.append(where)
            if len(tries) == 2:
                await asyncio.to_thread(proxy.unclog)
            await addresses.probe(*where)

        monkeypatch.setattr(joining, "_PREDECESSOR_TRIES", (0.1, 10.0))
        monkeypatch.setattr(joining, "probe", probe)
        with pytest.raises(RendezvousError, match="rank 0 is taken at"):
            await meet_as(rank=0, store=store, timeout=60)
        assert len(tries) == 2
    store.close()


async def test_rank_0_on_a_lost_host_is_replaced_before_the_timeout(meet_as, monkeypatch):
    monkeypatch.setattr(joining, "_PREDECESSOR_TRIES", (0.05, 0.1))
    store = HashStore()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store.set("asyncdist/", AddressRecord(*silent.getsockname(), "a token", "0123", 2).encode())
        meetings = await asyncio.gather(*(meet_as(rank=rank, store=store, timeout=60) for rank in range(2)))
    assert await asyncio.gather(*(meeting.exchange(b"") for meeting in meetings)) == [[b"", b""]] * 2
    await close_all(meetings)
    store.close()


@pytest.mark.usefixtures("no_such_name")
async def test_host_that_does_not_resolve_is_reported(meet_as, monkeypatch):
    monkeypatch.setattr(dialling, "NAME_GRACE", 0.0)
    for rank in range(2):
        with pytest.raises(AddressError, match=r"host 'no-such-host\.invalid' does not resolve"):
            await meet_as("tcp://no-such-host.invalid:1", rank, config=Config(token="t"))


# -- tokens ---------------------------------------------------------------------------------------


async def test_address_beyond_loopback_requires_a_token(meet_as):
    for rank in range(2):
        with pytest.raises(
            AuthenticationError, match=r"not a loopback address.*ALLOW_UNAUTHENTICATED=1.*ASYNCDIST_TOKEN"
        ):
            await meet_as("tcp://203.0.113.1:4000", rank)


async def test_wildcard_address_listens_on_every_interface(meet_as):
    meetings = await world_of(meet_as, 2, "tcp://0.0.0.0:0", config=Config(token="t"))
    assert not meetings[0].where.startswith("tcp://0.0.0.0")


async def test_allow_unauthenticated_requires_no_token(meet_as):
    leader = await meet_as("tcp://0.0.0.0:0", 0, config=Config(allow_unauthenticated=True))
    assert leader.token is None


async def test_token_of_the_user_is_shared_and_never_written_to_the_file(meet_as, tmp_path):
    config = Config(token="the user's own")
    meetings = await world_of(meet_as, 2, f"file://{tmp_path}", config=config)
    assert meetings[1].token == "the user's own"
    assert "the user's own" not in next(tmp_path.iterdir()).read_text()


@pytest.mark.parametrize(("leads", "follows"), [("one", "two"), ("one", None), (None, "two")])
@pytest.mark.parametrize("ends", ["address", "grace", "deadline"])
async def test_different_tokens_are_refused(meet_as, tmp_path, monkeypatch, leads, follows, ends):
    """A rank reads a record again until a grace period or its deadline ends, because the record may be stale."""
    url = "tcp://127.0.0.1:0" if ends == "address" else f"file://{tmp_path}"
    leader = await meet_as(url, 0, config=Config(token=leads))
    if ends == "grace":
        monkeypatch.setattr(joining, "_REFUSAL_GRACE", 0.1)
    elif ends == "deadline":
        monkeypatch.setattr(joining, "Backoff", one_attempt)
    with pytest.raises(AuthenticationError, match="set ASYNCDIST_TOKEN to the same value"):
        await meet_as(leader.where if ends == "address" else url, 1, config=Config(token=follows), timeout=LONG)


# -- leaving --------------------------------------------------------------------------------------


@pytest.mark.each_loop
@pytest.mark.parametrize(("end", "says"), [("dies", "rank 0 left or died"), ("gives up", "rank 0 gave up before")])
async def test_before_exchange_fails_with_the_exchange(meet_as, end, says):
    leader = await meet_as("tcp://127.0.0.1:0", 0, 2)
    other = await meet_as(leader.where, 1, 2)
    await asyncio.gather(leader.exchange(b"", more=True), other.exchange(b"", more=True))
    assert await other.before_exchange(asyncio.sleep(0, "done")) == "done"
    doing = asyncio.Event()
    waiting = asyncio.ensure_future(other.before_exchange(doing.wait()))
    if end == "dies":
        await asyncio.wrap_future(background_loop().submit(leader.server.close()))
    closing = asyncio.ensure_future(leader.close())
    with pytest.raises(RendezvousError, match=says):
        await waiting
    await other.close()
    await closing


async def test_rank_0_serves_until_the_others_are_done(meet_as):
    leader, other = await world_of(meet_as, 2, "tcp://127.0.0.1:0")
    closing = asyncio.ensure_future(leader.close(LONG))
    await other.store.underlying_store.wait([leader.keys("left", 0)])
    assert not closing.done()
    await other.store.set("still", b"served")
    assert await other.store.get("still") == b"served"
    await other.close()
    since = Stopwatch()
    await closing
    assert since.seconds() < LONG / 2


async def test_rank_0_close_waits_for_the_others_with_a_timeout(meet_as):
    leader, _ = await world_of(meet_as, 2, "tcp://127.0.0.1:0")
    begun = time.monotonic()
    await leader.close(timeout=0.2)
    assert time.monotonic() - begun > 0.15


@pytest.mark.each_loop
async def test_rank_0_close_does_not_wait_for_dead_ranks(meet_as):
    leader, other = await world_of(meet_as, 2, "tcp://127.0.0.1:0")
    await other.store.underlying_store.close()
    since = Stopwatch()
    await leader.close(LONG)
    assert since.seconds() < LONG / 2


@pytest.mark.each_loop
async def test_cancelled_rank_can_join_again(meet_as, tmp_path):
    for init_method in (f"tcp://127.0.0.1:{free_port()}", f"file://{tmp_path}"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(meet_as(init_method, 1), 0.05)
        leader, again = await asyncio.gather(meet_as(init_method, 0), meet_as(init_method, 1))
        await again.close()
        third = await meet_as(init_method, 1)
        assert await asyncio.gather(leader.exchange(b"a"), third.exchange(b"b")) == [[b"a", b"b"]] * 2
        await close_all([leader, third])


@pytest.mark.parametrize("leaver", [0, 2])
async def test_waiting_rank_is_told_that_a_rank_gave_up(meet_as, leaver):
    leader = await meet_as("tcp://127.0.0.1:0", 0, 4)
    meetings = [leader, *[await meet_as(leader.where, rank, 4) for rank in (1, 2)]]
    waiting = [asyncio.ensure_future(meeting.exchange(b"")) for meeting in meetings]
    await leader.store.underlying_store.wait([leader.keys("part0", 0, rank) for rank in range(3)])
    waiting[leaver].cancel()
    closing = asyncio.ensure_future(meetings[leaver].close())
    for rank in {0, 1, 2} - {leaver}:
        with pytest.raises(RendezvousError, match=f"rank {leaver} gave up before the world was complete"):
            await waiting[rank]
    await asyncio.gather(closing, *(meeting.close() for meeting in meetings))


async def test_late_rank_is_told_that_a_rank_gave_up(meet_as):
    leader = await meet_as("tcp://127.0.0.1:0", 0, 3)
    first = await meet_as(leader.where, 1, 3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first.exchange(b""), 0.05)
    await first.close()
    with pytest.raises(RendezvousError, match="rank 1 gave up before the world was complete"):
        await (await meet_as(leader.where, 2, 3)).exchange(b"")
    with pytest.raises(RendezvousError, match="rank 1 gave up"):
        await leader.exchange(b"")


@pytest.mark.each_loop
@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_cancellation_at_any_point_leaves_no_state(meet_as, tmp_path, steps):
    ranks = [asyncio.ensure_future(meet_as(f"file://{tmp_path}", rank, timeout=5)) for rank in range(2)]
    for _ in range(steps):
        await asyncio.sleep(0)
    for each in ranks:
        each.cancel()
    await asyncio.gather(*ranks, return_exceptions=True)
    await asyncio.gather(*(meeting.close() for meeting in meet_as.meetings))
    assert list(tmp_path.iterdir()) == []


async def test_ranks_on_loops_of_different_threads_meet(meet_as, in_thread):
    leader = await meet_as("tcp://127.0.0.1:0", 0)

    async def follow():
        meeting = await meet(leader.where, rank=1, world_size=2, config=Config(), launch=Launch(), timeout=LONG)
        try:
            return await meeting.exchange(b"1")
        finally:
            await meeting.close()

    assert await asyncio.gather(leader.exchange(b"0"), in_thread(asyncio.run, follow())) == [[b"0", b"1"]] * 2


async def test_local_user_without_the_token_cannot_end_a_forming_world(meet_as, in_thread):
    config = Config(token="secret")
    leader = await meet_as("tcp://127.0.0.1:0", 0, 2, config=config)
    waiting = asyncio.create_task(leader.exchange(b"of 0"))
    await asyncio.sleep(0)

    def intrude():
        with Peer(leader.server.port) as stranger:
            key = f"/{leader.keys('part0', 0, 1)}".encode()
            stranger.ask(Code.SET, key, b'\x00{"reason": "a sentence of the stranger\'s choice"}')

    with pytest.raises(ConnectionError):
        await in_thread(intrude)
    follower = await meet_as(leader.where, 1, 2, config=config)
    assert await asyncio.gather(waiting, follower.exchange(b"of 1")) == [[b"of 0", b"of 1"]] * 2
