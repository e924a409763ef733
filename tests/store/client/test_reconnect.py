"""Connections that break under a client: it goes on over another one, does nothing twice, and says so where it cannot."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import ProtocolError, StoreConnectionError, StoreError, StoreTimeoutError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.client import blocking, connect
from asyncdist.store.client.blocking_socket import BlockingSocket
from asyncdist.store.client.pending import PendingRequest
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.client_protocol import ClientProtocol
from asyncdist.store.protocol.codec import Encoder, Request, decode_request, hello, messages_in
from asyncdist.store.protocol.operations import Op, OperationKind, Reason, Reply
from asyncdist.store.state.change_log import ChangeLog, replay
from asyncdist.store.state.model import KEPT_ANSWERS, Contents
from asyncdist.store.state.sessions import SessionTable
from asyncdist.testing.faults import Proxy
from tests.support.ports import free_port

pytestmark = pytest.mark.each_loop

TOKEN, LONG, SHORT = "a token for tests", 20.0, 0.2
CONFIG = Config(token=TOKEN)


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", server.port) as proxy:
        yield proxy


async def through(proxy: Proxy, **settings) -> AsyncStore:
    config = CONFIG.with_(**settings)
    return await AsyncStore.connect(*proxy.address, token=TOKEN, timeout=LONG, config=config)


# -- cut anywhere -----------------------------------------------------------------------------------


async def every_operation(store: AsyncStore, turn: int) -> None:
    key = f"{turn}/"
    await asyncio.gather(*(store.add(key + "n", 1) for _ in range(5)))
    assert await store.add(key + "n", 0) == 5
    await store.append(key + "a", b"x")
    await store.append(key + "a", b"y")
    assert await store.get(key + "a") == b"xy"
    assert await store.compare_set(key + "c", b"", b"1") == b"1"
    assert await store.compare_set(key + "c", b"1", b"2") == b"2"
    await store.multi_set([key + "m", key + "e"], [b"1", b"2"])
    await store.queue_push(key + "q", b"item")
    assert await store.queue_len(key + "q") == 1
    assert await store.delete_key(key + "m") is True
    waiting = store.get(key + "later")
    await store.set(key + "later", b"now")
    assert await waiting == b"now"
    await store.barrier(key + "b", 1)


@pytest.mark.exhaustive
async def test_a_cut_after_any_number_of_bytes_changes_no_outcome(server, proxy, monkeypatch):
    """Each turn goes over a connection that is reset a little later than that of the turn before."""
    monkeypatch.setattr(connect, "STEADY", 0.0)  # or so many cuts would be taken for our own fault
    store = await through(proxy)
    await every_operation(store, -1)
    begun = proxy.passed_nbytes
    await every_operation(store, -2)
    length = proxy.passed_nbytes - begun
    for turn, cut in enumerate(range(0, length, 2)):
        proxy.cut_after(proxy.passed_nbytes + cut)
        await every_operation(store, turn)
    await store.close()
    assert turn > 100


async def test_retried_request_is_applied_once(server, proxy, eventually):
    store = await through(proxy)
    proxy.clog()
    adding = [store.add("n", 1) for _ in range(100)]
    await asyncio.sleep(0)
    proxy.unclog()
    await eventually(lambda: server.state.keys.peek("n") is not None)
    proxy.cut()
    assert sorted(await asyncio.gather(*adding)) == list(range(1, 101))
    assert server.state.keys.peek("n") == b"100"
    await store.close()


async def test_random_cuts_under_many_tasks(server, proxy):
    store, dice = await through(proxy), random.Random(1)

    async def work(number: int) -> list[int]:
        return [await store.add(f"k{number % 3}", 1) for _ in range(60)]

    async def cut() -> None:
        for _ in range(12):
            await asyncio.sleep(dice.uniform(0, 0.05))
            proxy.cut()

    *sums, _ = await asyncio.gather(*(work(number) for number in range(12)), cut())
    for which in range(3):
        found = sorted(total for number, mine in enumerate(sums) if number % 3 == which for total in mine)
        assert found == list(range(1, 241))
    await store.close()


def test_random_cuts_under_many_threads():
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, token=TOKEN))
    dice = random.Random(2)
    with Proxy("127.0.0.1", server.port) as proxy, ThreadPoolExecutor(8) as threads:
        store = TCPStore(*proxy.address, timeout=LONG, config=CONFIG)
        waiting = threads.submit(store.get, "at last")
        working = [threads.submit(lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(6)]
        for _ in range(12):
            time.sleep(dice.uniform(0, 0.05))
            proxy.cut()
        assert sorted(total for each in working for total in each.result(LONG)) == list(range(1, 601))
        store.set("at last", b"v")
        assert waiting.result(LONG) == b"v"
        store.close()
    background_loop().run(server.close())


def test_requests_of_other_threads_are_sent_again_though_the_leader_times_out():
    with (
        TCPStore("127.0.0.1", 0, is_master=True, config=CONFIG) as master,
        TCPStore("127.0.0.1", master.port, timeout=LONG, config=CONFIG) as store,
        ThreadPoolExecutor(1) as another,
    ):
        connection, other = store.connection, PendingRequest()
        connection.begin(operations.get("later"), other, Deadline.never())
        connection.sock.wake()
        another.submit(connection.send_lock.acquire).result(LONG)  # as a thread does that sends over a slow connection
        with pytest.raises(StoreTimeoutError):
            store.get("never", timeout=SHORT)
        another.submit(connection.send_lock.release).result(LONG)
        connection.give_up(0)  # as a thread that sends looks at the queue once more
        master.set("later", b"v")
        connection.wait_for(other, Deadline.after(LONG / 4))
        assert other.value == b"v"


def test_calls_with_short_timeouts_wait_for_one_and_the_same_attempt_to_connect(monkeypatch):
    """Else a client that polls would never come back where connecting takes longer than one of its calls."""
    answered, begun, greet = threading.Event(), [], blocking.shake_hands

    def shake_hands(wire: BlockingSocket, token: str | None, deadline: Deadline) -> bytes:
        begun.append(deadline)
        if not answered.wait(deadline.remaining()):
            raise TimeoutError
        return greet(wire, token, deadline)

    with (
        TCPStore("127.0.0.1", 0, is_master=True, config=CONFIG) as master,
        TCPStore("127.0.0.1", master.port, timeout=LONG, config=CONFIG.with_(store_reconnect=LONG)) as store,
    ):
        monkeypatch.setattr(blocking, "shake_hands", shake_hands)
        store.connection.sock.wake()
        for _ in range(5):
            with pytest.raises(StoreTimeoutError):
                store.get("k", timeout=SHORT / 10)
        answered.set()
        store.set("k", b"v")
        assert store.get("k") == b"v"
        assert len(begun) == 1


def test_closing_wakes_threads_that_wait_for_another_connection():
    with (
        TCPStore("127.0.0.1", 0, is_master=True, config=CONFIG) as master,
        Proxy("127.0.0.1", master.port) as proxy,
        TCPStore(*proxy.address, timeout=LONG, config=CONFIG) as store,
        ThreadPoolExecutor(1) as others,
    ):
        waiting = others.submit(store.get, "k")
        proxy.clog()  # so that the next connection is taken, and hears nothing
        proxy.cut()
        proxy.until(lambda: proxy.num_connections)
        store.close()
        with pytest.raises(StoreConnectionError, match="closed by this process"):
            waiting.result(LONG / 4)


async def test_request_to_an_unreachable_server_times_out(server, proxy):
    store = await through(proxy)
    proxy.clog()
    with pytest.raises(StoreTimeoutError):
        await store.get("k", timeout=SHORT)
    proxy.unclog()
    await store.set("k", b"v")
    assert await store.get("k") == b"v"
    await store.close()


async def test_a_client_that_was_forgotten_does_not_claim_to_know_what_it_did(server, proxy, store, eventually):
    other = await through(proxy, store_lease=0.0)
    await other.check([])
    proxy.clog()
    adding, setting = other.add("n", 1), other.set("k", b"v")
    waiting = other.get("later")
    await asyncio.sleep(0)  # the client writes them
    proxy.cut()
    proxy.unclog()
    with pytest.raises(StoreConnectionError, match=r"whether add\('n'\) was done is unknown"):
        await adding
    await setting  # which may be done twice
    await store.set("later", b"now")
    assert await waiting == b"now"
    assert await other.add("n", 1) == 1
    await other.close()


async def test_a_change_that_was_not_sent_is_made_also_for_a_client_that_was_forgotten(server, proxy, eventually):
    other = await through(proxy, store_lease=0.0)
    assert await other.add("n", 1) == 1
    proxy.clog()
    proxy.cut()
    await eventually(lambda: other.connection.link is None)
    adding = other.add("n", 1)
    proxy.unclog()
    assert await adding == 2
    await other.close()


async def test_closing_while_it_tries_again(server, eventually):
    with Proxy("127.0.0.1", server.port) as proxy:
        store = await through(proxy)
        waiting = store.get("k")
        await store.check([])
        proxy.clog()  # so that the next connection is taken, and hears nothing
        proxy.cut()
        await eventually(lambda: proxy.num_connections)
        await store.close()
        with pytest.raises(StoreConnectionError, match="closed by this process"):
            await waiting


async def test_a_subscription_says_that_messages_may_have_been_missed(server, proxy):
    store = await through(proxy)
    async with store.subscribe("news") as messages:
        await store.publish("news", b"1")
        assert await anext(messages) == b"1"
        proxy.cut()
        with pytest.raises(StoreConnectionError, match="'news' may have been missed"):
            await anext(messages)
    async with store.subscribe("news") as messages:
        await store.publish("news", b"2")
        assert await anext(messages) == b"2"
    await store.close()


async def test_acknowledged_answers_are_not_kept(server, store):
    for _ in range(5):
        await asyncio.gather(*(store.add("n", 1) for _ in range(400)))
    ((_, answers, _),) = server.sessions.contents().values()
    assert len(answers) < 1000


@pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
async def test_connections_that_break_at_once_share_the_patience_of_one(server, monkeypatch, eventually, kind):
    def hang_up(*_) -> None:
        raise ProtocolError("said by a test")

    monkeypatch.setattr(connect, "STEADY", LONG)
    config, where = CONFIG.with_(store_reconnect=SHORT), ("127.0.0.1", server.port)
    if kind is AsyncStore:
        store = await AsyncStore.connect(*where, token=TOKEN, timeout=LONG, config=config)
        asking = store.get("k")
    else:
        store = await asyncio.to_thread(TCPStore, *where, timeout=LONG, config=config)
        asking = asyncio.create_task(asyncio.to_thread(store.get, "k"))
    await eventually(lambda: server.state.num_open == 1)
    monkeypatch.setattr(server, "resume", hang_up)
    server.drop_all()
    with pytest.raises(StoreConnectionError, match=r"as did \d+ further connections within 0.2 s"):
        await asking
    await store.close() if kind is AsyncStore else store.close()


@pytest.mark.parametrize(
    ("error", "stays", "ends"),
    [
        (ConnectionResetError("reset"), False, None),
        (ConnectionRefusedError("refused"), True, None),
        (ConnectionRefusedError("refused"), False, r"broke \(it hung up\)"),
        (ProtocolError("garbage"), True, r"broke \(it hung up; then: garbage\)"),
    ],
)
def test_failures_after_which_a_client_does_not_connect_again(error, stays, ends, clock):
    policy = policy_of(stays=stays)
    assert policy.lost("it hung up") is None
    with pytest.raises(StoreConnectionError, match=ends) if ends else nullcontext():
        policy.failed(error)


def policy_of(**attributes) -> connect.ReconnectPolicy:
    """Return the policy of a client whose session has these attributes, with a patience of 30 s."""
    session = {"where": "here", "lost": None, "resumable": True, "stays": True, "answered": False, **attributes}
    return connect.ReconnectPolicy(SimpleNamespace(**session), "here", 1, 30.0)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that moves only during pauses and when a test moves it."""
    clock = SimpleNamespace(now=1000.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", sleep)
    return clock


def test_patience_begins_with_the_first_attempt(clock):
    policy = policy_of()
    for _ in range(2):
        assert policy.lost("it hung up") is None
        clock.now += 100.0
        assert policy.retry.deadline.at == clock.now + 30.0


@pytest.mark.parametrize(("answered", "seconds"), [(True, 0.0), (False, connect.STEADY), (False, 3.0)])
def test_connection_that_the_store_has_served_renews_the_patience(answered, seconds, clock):
    policy = policy_of(answered=answered)
    for _ in range(20):
        assert policy.lost("it hung up") is None
        for number in policy.retry:
            if number == 4:  # pauses of 0.075 s at least
                break
            policy.failed(ConnectionRefusedError("refused"))
        policy.succeeded()
        clock.now += seconds
    assert clock.now - 1000.0 > 20 * 0.075
    clock.now += 31.0
    assert policy.lost("it hung up") is None
    assert next(policy.retry) == 0


def test_connections_that_break_unserved_share_the_patience_and_the_pauses(clock):
    policy, begun = policy_of(), []
    assert policy.lost("it hung up") is None
    for _ in policy.retry:
        begun.append(clock.now - 1000.0)
        policy.succeeded()
        assert policy.lost("it hung up") is None
    assert 70 > len(begun) > 30
    assert begun[-1] == pytest.approx(30.0)
    assert re.search(
        rf"broke \(it hung up, as did {len(begun)} further connections within 30 s, before", str(policy.overdue())
    )


def test_store_that_accepts_no_connection_is_said_not_to_have_answered(clock):
    policy = policy_of()
    assert policy.lost("it hung up") is None
    for _ in policy.retry:
        policy.failed(ConnectionRefusedError("refused"))
    assert "it hung up; then: no store answered at here:1 within 30.0 s (refused)" in str(policy.overdue())


@pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
async def test_clients_outlast_their_patience_at_a_store_that_restarts_every_few_seconds(
    server, kind, monkeypatch, eventually
):
    """The clock of the clients runs ahead by 3 s in each life of the store; their patience is 20 s in all."""
    ahead, monotonic = 0.0, time.monotonic
    config, where = CONFIG.with_(store_reconnect=LONG), ("127.0.0.1", server.port)
    if kind is AsyncStore:
        store = await AsyncStore.connect(*where, token=TOKEN, timeout=None, config=config)
        asking = store.get("k")
    else:
        store = await asyncio.to_thread(TCPStore, *where, timeout=None, config=config)
        asking = asyncio.create_task(asyncio.to_thread(store.get, "k"))
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead)
    dropped: set[object] = set()
    for _ in range(10):
        await eventually(lambda: server.state.num_open == 1 and dropped.isdisjoint(server.admission.connections))
        dropped.update(server.admission.connections)
        ahead += 3.0
        server.drop_all()
    other = await AsyncStore.connect(*where, token=TOKEN, timeout=LONG, config=CONFIG)
    await other.set("k", b"v")
    assert await asking == b"v"
    await other.close()
    await store.close() if kind is AsyncStore else store.close()


# -- servers one after the other --------------------------------------------------------------------


@contextmanager
def daemon(port: int, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    command = [sys.executable, "-m", "asyncdist.cli", "store", "--port", str(port), *options]
    environment = {**os.environ, "ASYNCDIST_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            ready = process.stdout.readline().decode()
            yield process, port if port else int(ready.rpartition(":")[2].split()[0])
        finally:
            process.kill()


@pytest.mark.processes
def test_a_store_that_was_killed_and_kept_nothing_is_not_taken_for_the_one_before():
    with daemon(free_port()) as (process, port), TCPStore("127.0.0.1", port, timeout=LONG, config=CONFIG) as store:
        store.set("k", "v")
        process.kill()
        process.wait(LONG)
        with daemon(port), pytest.raises(StoreConnectionError, match="started anew and holds nothing"):
            store.get("k")
        with pytest.raises(StoreConnectionError, match="started anew"):
            store.set("k", "v")


@pytest.mark.exhaustive
@pytest.mark.processes
async def test_a_store_with_data_that_is_killed_again_and_again_carries_its_clients_on(tmp_path, eventually):
    """Requests wait while the store is down, and each is applied once: the journal also has the answers."""
    options = ("--data", str(tmp_path), "--fsync", "always")
    stop, done = False, 0

    async def add(store: AsyncStore) -> None:
        nonlocal done
        while not stop:
            await store.add("n", 1)
            done += 1

    async def at_work() -> None:
        goal = done + 20
        await eventually(lambda: done >= goal)

    with daemon(free_port(), *options) as (process, port):
        store = await AsyncStore.connect("127.0.0.1", port, token=TOKEN, timeout=LONG, config=CONFIG)
        working = [asyncio.create_task(add(store)) for _ in range(4)]
        waiting = store.get("at last")
        await at_work()
        process.kill()
        process.wait(LONG)
    for turn in range(4):
        with daemon(port, *options) as (process, _):
            await store.set(f"turn {turn}", b"1")
            assert await store.multi_get([f"turn {each}" for each in range(turn + 1)]) == [b"1"] * (turn + 1)
            await at_work()
            if turn == 3:
                stop = True
                await asyncio.gather(*working)
                assert await store.add("n", 0) == done
                await store.set("at last", b"v")
                assert await waiting == b"v"
                await store.close()
            process.kill()
            process.wait(LONG)


@pytest.mark.processes
def test_threads_wait_through_the_end_of_a_store_with_data(tmp_path):
    options = ("--data", str(tmp_path), "--fsync", "always")
    with ThreadPoolExecutor(8) as threads:
        with daemon(free_port(), *options) as (process, port):
            store = TCPStore("127.0.0.1", port, timeout=LONG, config=CONFIG)
            waiting = [threads.submit(store.get, f"k{number}") for number in range(3)]
            adding = [threads.submit(lambda: [store.add("n", 1) for _ in range(50)]) for _ in range(3)]
            assert store.add("n", 0) >= 0
            process.kill()
            process.wait(LONG)
        setting = threads.submit(store.set, "k0", b"0")
        with daemon(port, *options):
            setting.result(LONG)
            store.multi_set(["k1", "k2"], [b"1", b"2"])
            assert [future.result(LONG) for future in waiting] == [b"0", b"1", b"2"]
            assert sorted(total for each in adding for total in each.result(LONG)) == list(range(1, 151))
            store.close()


# -- leases -----------------------------------------------------------------------------------------


def test_a_lease_runs_from_when_the_connection_is_lost():
    members = SessionTable()
    member, known, _ = members.open(b"a", 10.0, "first")
    assert not known
    assert members.expire(1e9) == []
    members.disconnect(member, "first", 100.0)
    assert members.next_end() == 110.0
    assert members.expire(109.9) == []
    assert members.open(b"a", 10.0, "second") == (member, True, None)
    assert members.expire(110.0) == []  # it was back in time
    members.disconnect(member, "first", 120.0)  # the one that it has not any more
    assert members.expire(1e9) == []
    members.disconnect(member, "second", 130.0)
    assert members.expire(140.0) == [member]
    assert len(members) == 0
    assert members.open(b"a", 10.0, "third")[1] is False


def test_the_lease_that_a_client_said_last_counts():
    members = SessionTable()
    member, _, _ = members.open(b"a", 10.0, "first")
    members.open(b"a", 20.0, "second")
    members.disconnect(member, "second", 100.0)
    assert members.next_end() == 120.0


def test_a_client_that_is_waited_for_for_ever_says_a_long_time():
    protocol = ClientProtocol(lease=math.inf)
    protocol.receive(hello(1 << 20))
    ((_, _, _, lease_ms),) = messages_in(protocol.introduce())
    assert lease_ms > 86400e3


def test_leases_run_from_the_start_of_the_server_that_takes_over():
    members = SessionTable()
    members.restore({b"a": (10.0, {7: (OperationKind.RESULT, 1)}, 0)}, 100.0)
    assert members.expire(109.9) == []
    (member,) = members.expire(110.0)
    assert member.answer_to(7) == Reply(None, 7, OperationKind.RESULT, 1)


def test_answers_are_kept_until_they_have_been_heard_and_no_longer():
    member, _, _ = SessionTable().open(b"a", 10.0, "connection")
    for request in range(1, 6):
        member.remember(Reply("connection", request, OperationKind.RESULT, request))
    member.received(3)
    assert [member.answer_to(request) for request in (1, 2)] == [None, None]
    assert member.answer_to(3) == Reply(None, 3, OperationKind.RESULT, 3)  # and no connection is kept with it
    for request in range(10, 10 + KEPT_ANSWERS):
        member.remember(Reply("connection", request, OperationKind.RESULT, request))
    assert member.answer_to(5) is None
    assert member.answer_to(10) is not None


def test_a_later_server_knows_what_has_been_heard_and_who_has_left():
    log, contents = ChangeLog(), Contents()
    log.start(lambda: None)
    members = SessionTable(log=log)
    stays, leaves = [members.open(identity, 10.0, "connection")[0] for identity in (b"a", b"b")]
    for request in range(1, 6):
        stays.remember(Reply("connection", request, OperationKind.RESULT, request))
    stays.received(4)
    members.close(leaves)
    replay(b"".join(log.take()), contents)
    assert contents.members == members.contents() == {b"a": (10.0, {4: (0, 4), 5: (0, 5)}, 0)}


async def test_an_ephemeral_set_that_is_refused_owns_nothing(store, connect, config):
    other = await connect()
    await store.set("k", b"lasting")
    with pytest.raises(StoreError, match="the store takes"):
        await other.set("k", bytes(config.store_max_value_nbytes + 1), ephemeral=True)
    await other.close()
    assert await store.get("k") == b"lasting"


async def test_an_ephemeral_key_goes_when_its_client_closes(store, connect, eventually):
    other = await connect()
    await other.set("here", b"1", ephemeral=True)
    await other.set("stays", b"1")
    assert await store.get("here") == b"1"
    await other.close()
    await eventually_async(lambda: store.check(["here"]))
    assert await store.check(["stays"])


async def eventually_async(check) -> None:
    async with asyncio.timeout(LONG):
        while await check():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_an_ephemeral_key_is_kept_for_a_client_that_comes_back(server, proxy, store, eventually):
    other = await through(proxy, store_lease=LONG)
    await other.set("here", b"1", ephemeral=True)
    proxy.cut()
    assert await other.add("n", 1) == 1
    assert await store.get("here") == b"1"
    await other.close()
    await eventually_async(lambda: store.check(["here"]))


async def test_an_ephemeral_key_that_somebody_else_sets_is_no_longer_ephemeral(store, connect):
    other = await connect()
    await other.set("k", b"1", ephemeral=True)
    await other.set("l", b"1", ephemeral=True)
    await store.set("k", b"2")
    await store.delete_key("l")
    await store.set("l", b"2")
    await other.close()
    await store.barrier("b", 1)
    assert await store.multi_get(["k", "l"]) == [b"2", b"2"]


async def test_a_client_that_comes_back_late_has_its_keys_again_but_for_those_set_since(proxy, store):
    other = await through(proxy, store_lease=0.0)
    here, since = ["here", "here too"], ["set", "add", "append", "compare_set", "multi_set", "taken"]
    for key in here + since:
        await other.set(key, b"1", ephemeral=True)
    await other.set("set", b"2")
    await other.add("add", 1)
    await other.append("append", b"2")
    await other.compare_set("compare_set", b"1", b"2")
    await other.multi_set(["multi_set"], [b"2"])
    await store.set("taken", b"2")
    assert await other.compare_set("here", b"something else", b"1") == b"1"  # which sets nothing
    proxy.cut()
    await other.check([])
    assert await store.multi_get(here + since) == [b"1", b"1", b"2", b"2", b"12", b"2", b"2", b"2"]
    for key in since:
        await store.delete_key(key)
    proxy.cut()
    await other.check([])
    assert sorted(await store.list_keys()) == here
    await other.close()
    await eventually_async(lambda: store.check(["here"]))
    assert await store.list_keys() == []


def test_keys_are_restored_although_another_connection_breaks_before_the_store_has_heard_of_it():
    protocol = ClientProtocol()
    over_the_wire(protocol, known=False)
    request, _ = protocol.ask(a_sink(operations.set_ephemeral("k", b"1")))
    protocol.receive(Encoder().frame(request, OperationKind.RESULT, None))
    requests = [over_the_wire(protocol, known=known) for known in (False, True)]
    assert requests[0] == requests[1] == [decode_request([requests[0][0].id, Op.RESTORE_EPHEMERAL, "k", b"1"])]
    protocol.receive(Encoder().frame(requests[0][0].id, OperationKind.RESULT, True))
    assert over_the_wire(protocol, known=True) == []


@pytest.mark.parametrize("sent", [True, False])
def test_a_key_whose_deletion_was_given_up_is_restored_only_if_that_was_never_sent(sent):
    protocol = ClientProtocol()
    over_the_wire(protocol, known=False)
    request, _ = protocol.ask(a_sink(operations.set_ephemeral("k", b"1")))
    protocol.receive(Encoder().frame(request, OperationKind.RESULT, None))
    if not sent:
        protocol.interrupted()
    request, _ = protocol.ask(a_sink(operations.delete_key("k")))
    protocol.give_up(request)
    restored = [each.args for each in over_the_wire(protocol, known=False)]
    assert restored == ([] if sent else [("k", b"1")])


def test_nothing_is_asked_before_the_keys_are_back():
    protocol = ClientProtocol()
    over_the_wire(protocol, known=False)
    for key in ("k", "l"):
        request, _ = protocol.ask(a_sink(operations.set_ephemeral(key, b"1")))
        protocol.receive(Encoder().frame(request, OperationKind.RESULT, None))
    looking, _ = protocol.ask(a_sink(operations.check(["k"])))
    first, second = over_the_wire(protocol, known=False)
    deleting, message = protocol.ask(a_sink(operations.delete_key("k")))
    assert message == b""
    protocol.receive(Encoder().frame(first.id, OperationKind.RESULT, True))
    assert not protocol.output
    protocol.receive(Encoder().frame(second.id, OperationKind.RESULT, True))
    requests = [decode_request(message) for sent in protocol.data_to_send() for message in messages_in(sent)]
    assert [(each.id, each.op) for each in requests] == [(looking, Op.CHECK), (deleting, Op.DELETE_KEY)]
    assert over_the_wire(protocol, known=True) == requests


def test_a_change_that_the_store_may_have_made_before_it_forgot_us_is_not_asked_again_while_keys_come_back():
    protocol, told = ClientProtocol(), []
    over_the_wire(protocol, known=False)
    request, _ = protocol.ask(a_sink(operations.set_ephemeral("k", b"1")))
    protocol.receive(Encoder().frame(request, OperationKind.RESULT, None))
    protocol.ask(SimpleNamespace(command=operations.add("n", 1), reject=told.append))
    (restore,) = over_the_wire(protocol, known=False)
    assert over_the_wire(protocol, known=True) == [restore]
    protocol.receive(Encoder().frame(restore.id, OperationKind.RESULT, True))
    assert not protocol.output
    assert len(told) == 1


def test_a_key_that_a_smaller_store_does_not_take_back_is_done_without(caplog):
    protocol, lengths = ClientProtocol(), {"small": 1, "too much for a value": 1000, "too much for a message": 100_000}
    over_the_wire(protocol, known=False)
    for key, nbytes in lengths.items():
        request, _ = protocol.ask(a_sink(operations.set_ephemeral(key, bytes(nbytes))))
        protocol.receive(Encoder().frame(request, OperationKind.RESULT, None))
    looking, _ = protocol.ask(a_sink(operations.check(["other"])))
    first, second = over_the_wire(protocol, known=False, limit=70_000)
    protocol.receive(Encoder().frame(first.id, OperationKind.RESULT, True))
    protocol.receive(Encoder().frame(second.id, OperationKind.REFUSED, (int(Reason.TOO_LARGE), "as said by a test")))
    assert [decode_request(message).id for sent in protocol.data_to_send() for message in messages_in(sent)] == [
        looking
    ]
    assert [record.args[1:] for record in caplog.records] == [
        ("'too much for a message'", ANY), ("'too much for a value'", "as said by a test"),
    ]  # fmt: skip
    assert [each.args[0] for each in over_the_wire(protocol, known=False) if each.id != looking] == ["small"]


async def test_a_client_goes_on_without_the_key_that_a_smaller_store_does_not_take_back(tmp_path, caplog):
    config = CONFIG.with_(store_lease=0.0)
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, data=tmp_path, stays=True) as server:
        port = server.port
        store = await AsyncStore.connect("127.0.0.1", port, timeout=LONG, config=config)
        await store.set("here", bytes(200_000), ephemeral=True)
    small = Config(store_max_value_nbytes=1000, store_max_key_nbytes=100)
    async with await StoreServer.start("127.0.0.1", port, token=TOKEN, config=small, data=tmp_path):
        assert not await store.check(["here"])
        assert "refuses to restore the ephemeral key 'here'" in caplog.text
        await store.close()


def a_sink(command: operations.Command) -> SimpleNamespace:
    return SimpleNamespace(command=command, resolve=print, reject=print)


def over_the_wire(protocol: ClientProtocol, *, known: bool, limit: int = 1 << 20) -> list[Request]:
    """Give a session another connection, whose store knows it or does not, and return the requests that it sends."""
    protocol.interrupted()
    protocol.receive(hello(limit))
    (resume,) = messages_in(protocol.introduce())
    protocol.receive(Encoder().frame(resume[0], OperationKind.RESULT, ("lineage", known, False)))
    return [decode_request(message) for sent in protocol.data_to_send() for message in messages_in(sent)]


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_entries_of_a_dead_process_go_when_its_lease_is_over(server, store, how):
    program = (
        "import sys, time; from asyncdist.config import Config; from asyncdist.store import TCPStore\n"
        f"store = TCPStore('127.0.0.1', {server.port}, config=Config(token={TOKEN!r}, store_lease=0.3))\n"
        "store.set('rank 1', b'alive', ephemeral=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await store.get("rank 1", timeout=LONG) == b"alive"
    told = time.monotonic()
    process.send_signal(how)
    await process.wait()
    await eventually_async(lambda: store.check(["rank 1"]))
    assert time.monotonic() - told > 0.29
    assert len(server.sessions) == 1  # it is forgotten altogether


async def test_a_client_that_was_forgotten_puts_its_keys_back(server, proxy, store):
    other = await through(proxy, store_lease=0.0)
    await other.set("here", b"1", ephemeral=True)
    proxy.cut()
    assert await other.num_keys() == 1
    assert await store.get("here", timeout=LONG) == b"1"
    await other.close()


async def test_a_long_value_that_is_put_back_is_not_overtaken(server, proxy, store, eventually):
    other = await through(proxy, store_lease=0.0)
    await other.set("here", bytes(200_000), ephemeral=True)
    proxy.clog()
    proxy.cut()
    await eventually(lambda: other.connection.link is None)
    deleting = other.delete_key("here")
    proxy.unclog()
    assert await deleting is True
    assert not await store.check(["here"])
    await other.close()


def test_a_long_value_that_a_blocking_client_puts_back_is_not_overtaken(until):
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, token=TOKEN))
    with (
        Proxy("127.0.0.1", server.port) as proxy,
        TCPStore(*proxy.address, timeout=LONG, config=CONFIG.with_(store_lease=0.0)) as store,
    ):
        store.set("here", bytes(200_000), ephemeral=True)
        proxy.cut()
        until(lambda: len(server.sessions) == 0)
        assert store.check(["here"])
    background_loop().run(server.close())


# -- watching ---------------------------------------------------------------------------------------


async def test_a_watch_goes_on_over_another_connection(server, proxy, store, eventually):
    watcher = await through(proxy)
    async with watcher.watch("k") as values:
        assert await anext(values) is None
        await store.set("k", b"1")
        assert await anext(values) == b"1"
        proxy.cut()
        await watcher.check([])
        await store.set("k", b"2")
        assert await anext(values) == b"2"
        waiting = asyncio.create_task(anext(values))
        proxy.cut()
        await watcher.check([])
        assert not waiting.done()  # what it knows already is not told again
        await store.delete_key("k")
        assert await waiting is None
    await watcher.close()
    await eventually(lambda: server.state.num_open == 0)


async def test_a_watch_of_many_keys_tells_what_changed_between_two_connections(server, proxy, store, eventually):
    watcher = await through(proxy)
    await store.multi_set(["job/a", "other"], ["1", "x"])
    async with watcher.watch_keys("job/") as changes:
        assert await anext(changes) == ("job/a", b"1")
        await store.set("job/b", b"2")
        await store.set("other", b"y")
        await store.append("job/a", b"1")
        await store.delete_key("job/b")
        assert [await anext(changes) for _ in range(3)] == [("job/b", b"2"), ("job/a", b"11"), ("job/b", None)]
        proxy.clog()  # so that the next connection is taken, and hears nothing
        proxy.cut()
        await store.multi_set(["job/c", "job/d"], ["3", "4"])
        await store.delete_key("job/a")
        proxy.unclog()
        assert sorted([await anext(changes) for _ in range(3)], key=str) == [
            ("job/a", None), ("job/c", b"3"), ("job/d", b"4"),
        ]  # fmt: skip
        other = await through(proxy)
        await other.set("job/e", b"5", ephemeral=True)
        await other.close()
        assert [await anext(changes) for _ in range(2)] == [("job/e", b"5"), ("job/e", None)]
    await watcher.close()
    await eventually(lambda: server.state.num_open == 0)


async def test_more_keys_than_go_into_one_reply_are_not_watched(server, store):
    await store.set("a/1", bytes(600_000))
    await store.set("a/2", bytes(600_000))
    with pytest.raises(StoreError, match="watch a longer prefix"):
        await store.watch_keys("a/")
    async with store.watch_keys("a/1") as changes:
        assert await anext(changes) == ("a/1", bytes(600_000))


def test_a_blocking_watch_goes_on_over_another_connection():
    server = background_loop().run(StoreServer.start("127.0.0.1", 0, token=TOKEN))
    with (
        Proxy("127.0.0.1", server.port) as proxy,
        TCPStore(*proxy.address, timeout=LONG, config=CONFIG) as store,
        store.watch("k") as values,
    ):
        assert values.get(LONG) is None
        for number in range(5):
            proxy.cut()
            store.set("k", str(number))
            assert values.get(LONG) == str(number).encode()
    background_loop().run(server.close())


async def test_watch_of_an_ephemeral_key_yields_none_after_its_client_has_died(server, proxy, store):
    other = await through(proxy, store_lease=SHORT, store_reconnect=0.0)
    await other.set("rank 1", b"alive", ephemeral=True)
    async with store.watch("rank 1") as values:
        assert await anext(values) == b"alive"
        proxy.cut()
        assert await anext(values) is None
        third = await through(proxy)
        await third.set("rank 1", b"alive again", ephemeral=True)
        assert await anext(values) == b"alive again"
        await third.close()
        assert await anext(values) is None
    await other.close()
