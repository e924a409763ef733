"""Clients whose connections break: they reconnect, apply no change twice, and raise an error where they cannot continue."""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import ProtocolError, StoreConnectionError, StoreError, StoreTimeoutError
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.client import blocking, blocking_socket, link
from asyncdist.store.client import connect as connecting
from asyncdist.store.client.blocking_socket import BlockingSocket
from asyncdist.store.client.pending import PendingRequest
from asyncdist.store.protocol import operations
from asyncdist.store.server.session import Session
from tests.support.faults import Proxy
from tests.support.ports import free_port
from tests.support.stores import LONG, TOKEN, open_store

SHORT = 0.2
CONFIG = Config(token=TOKEN)
EACH_KIND = pytest.mark.parametrize("kind", [AsyncStore, TCPStore])


# -- broken connections -----------------------------------------------------------------------------


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


@pytest.mark.each_loop
@pytest.mark.exhaustive
async def test_cut_after_any_number_of_bytes_changes_no_result(proxy, connect, monkeypatch):
    """In each turn the connection is reset a little later than in the turn before."""
    monkeypatch.setattr(connecting, "STEADY", 0.0)  # otherwise so many cuts would exhaust the client's patience
    store = await connect(proxy.address)
    await every_operation(store, -1)
    begun = proxy.passed_nbytes
    await every_operation(store, -2)
    length = proxy.passed_nbytes - begun
    for turn, cut in enumerate(range(0, length, 2)):
        proxy.cut_after(proxy.passed_nbytes + cut)
        await every_operation(store, turn)
    assert turn > 100


@pytest.mark.each_loop
async def test_retried_request_is_applied_once(server, proxy, connect, eventually):
    store = await connect(proxy.address)
    proxy.clog()
    adding = [store.add("n", 1) for _ in range(100)]
    await asyncio.sleep(0)
    proxy.unclog()
    await eventually(lambda: server.state.keys.peek("n") is not None)
    proxy.cut()
    assert sorted(await asyncio.gather(*adding)) == list(range(1, 101))
    assert server.state.keys.peek("n") == b"100"


@pytest.mark.each_loop
@EACH_KIND
async def test_requests_during_random_cuts_are_applied_once(proxy, connect, kind):
    store, dice = await connect(proxy.address, kind=kind), random.Random(1)
    waiting = asyncio.ensure_future(store.get("at last"))

    async def work(number: int) -> list[int]:
        return [await store.add(f"k{number % 3}", 1) for _ in range(60)]

    async def cut() -> None:
        for _ in range(12):
            await asyncio.sleep(dice.uniform(0, 0.05))
            proxy.cut()

    *sums, _ = await asyncio.gather(*(work(number) for number in range(12)), cut())
    for key in range(3):
        found = sorted(total for number, totals in enumerate(sums) if number % 3 == key for total in totals)
        assert found == list(range(1, 241))
    await store.set("at last", b"v")
    assert await waiting == b"v"


def test_requests_of_other_threads_are_sent_again_although_the_leader_times_out(master, other):
    with ThreadPoolExecutor(1) as another:
        connection, pending = other.connection, PendingRequest()
        connection.begin(operations.get("later"), pending, Deadline.never())
        connection.sock.wake()
        another.submit(connection.send_lock.acquire).result(LONG)  # as a thread that sends over a slow connection
        with pytest.raises(StoreTimeoutError):
            other.get("never", timeout=SHORT)
        another.submit(connection.send_lock.release).result(LONG)
        connection.give_up(0)  # as that thread, which checks the queue again after the release
        master.set("later", b"v")
        connection.wait_for(pending, Deadline.after(LONG / 4))
        assert pending.value == b"v"


def test_calls_with_short_timeouts_share_one_attempt_to_connect(monkeypatch):
    """Otherwise a polling client would never reconnect where connecting takes longer than one of its calls."""
    answered, begun, shake_hands = threading.Event(), [], blocking.shake_hands

    def shake_hands_late(sock: BlockingSocket, token: str | None, deadline: Deadline) -> bytes:
        begun.append(deadline)
        if not answered.wait(deadline.remaining()):
            raise TimeoutError
        return shake_hands(sock, token, deadline)

    with (
        TCPStore("127.0.0.1", 0, is_master=True, config=CONFIG) as master,
        TCPStore("127.0.0.1", master.port, timeout=LONG, config=CONFIG.with_(store_reconnect=LONG)) as store,
    ):
        monkeypatch.setattr(blocking, "shake_hands", shake_hands_late)
        store.connection.sock.wake()
        for _ in range(5):
            with pytest.raises(StoreTimeoutError):
                store.get("k", timeout=SHORT / 10)
        answered.set()
        store.set("k", b"v")
        assert store.get("k") == b"v"
        assert len(begun) == 1


@pytest.mark.each_loop
@EACH_KIND
async def test_close_during_a_reconnect_ends_waiting_requests(server, proxy, connect, kind, eventually):
    store = await connect(proxy.address, kind=kind)
    waiting = asyncio.ensure_future(store.get("k"))
    await eventually(lambda: server.state.num_open == 1)
    proxy.clog()  # so that the next connection is accepted, and gets no answer
    proxy.cut()
    await eventually(lambda: proxy.num_connections)
    await store.close()
    with pytest.raises(StoreConnectionError, match="closed by this process"):
        await asyncio.wait_for(waiting, LONG / 4)


async def test_change_has_an_unknown_outcome_once_the_server_has_dropped_the_session(proxy, connect, store):
    other = await connect(proxy.address, store_lease=0.0)
    await other.check([])
    proxy.clog()
    adding, setting = other.add("n", 1), other.set("k", b"v")
    waiting = other.get("later")
    await asyncio.sleep(0)  # the client writes the requests
    proxy.cut()
    proxy.unclog()
    with pytest.raises(StoreConnectionError, match=r"whether add\('n'\) was done is unknown"):
        await adding
    await setting  # may be repeated
    await store.set("later", b"now")
    assert await waiting == b"now"
    assert await other.add("n", 1) == 1


async def test_unsent_change_is_applied_although_the_server_has_dropped_the_session(proxy, connect, eventually):
    other = await connect(proxy.address, store_lease=0.0)
    assert await other.add("n", 1) == 1
    proxy.clog()
    proxy.cut()
    await eventually(lambda: other.connection.link is None)
    adding = other.add("n", 1)
    proxy.unclog()
    assert await adding == 2


async def test_subscription_ends_with_an_error_because_messages_may_be_lost(proxy, connect):
    store = await connect(proxy.address)
    async with store.subscribe("news") as messages:
        await store.publish("news", b"1")
        assert await anext(messages) == b"1"
        proxy.cut()
        with pytest.raises(StoreConnectionError, match="'news' may have been missed"):
            await anext(messages)
    async with store.subscribe("news") as messages:
        await store.publish("news", b"2")
        assert await anext(messages) == b"2"


async def test_server_drops_acknowledged_answers(server, store):
    for _ in range(5):
        await asyncio.gather(*(store.add("n", 1) for _ in range(400)))
    ((_, answers, _),) = server.sessions.gather()().values()
    assert len(answers) < 1000


# -- how long a client tries ------------------------------------------------------------------------


@EACH_KIND
async def test_connections_that_break_at_once_share_the_patience_of_one(server, connect, monkeypatch, eventually, kind):
    def hang_up(*_) -> None:
        raise ProtocolError("raised by a test")

    monkeypatch.setattr(connecting, "STEADY", LONG)
    store = await connect(kind=kind, store_reconnect=SHORT)
    waiting = asyncio.ensure_future(store.get("k"))
    await eventually(lambda: server.state.num_open == 1)
    monkeypatch.setattr(Session, "resume", hang_up)
    server.drop_all()
    with pytest.raises(StoreConnectionError, match=r"as did \d+ further connections within 0.2 s"):
        await waiting


@EACH_KIND
async def test_client_outlasts_its_patience_at_a_server_that_drops_it_every_few_seconds(
    server, connect, store, kind, monkeypatch, eventually
):
    """The clock runs ahead by 3 s in each life of the connection; the patience is 20 s in all."""
    ahead, monotonic = 0.0, time.monotonic
    client = await connect(kind=kind, timeout=None, store_reconnect=20.0)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + ahead)
    waiting = asyncio.ensure_future(client.get("k"))
    dropped: set[object] = set()
    for _ in range(10):
        await eventually(lambda: server.state.num_open == 1 and dropped.isdisjoint(server.admission.connections))
        dropped.update(server.admission.connections)
        ahead += 3.0
        server.drop_all()
    await store.set("k", b"v")
    assert await waiting == b"v"


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
    policy = broken_policy(stays=stays)
    with pytest.raises(StoreConnectionError, match=ends) if ends else nullcontext():
        policy.failed(error)


def broken_policy(**attributes) -> connecting.ReconnectPolicy:
    """Return the policy of a client whose connection has broken, with a patience of 30 s."""
    session = {"where": "here", "lost": None, "resumable": True, "stays": True, "answered": False, **attributes}
    policy = connecting.ReconnectPolicy(SimpleNamespace(**session), "here", 1, 30.0)
    assert policy.lost("it hung up") is None
    return policy


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
    policy = broken_policy()
    for _ in range(2):
        assert policy.lost("it hung up") is None
        clock.now += 100.0
        assert policy.retry.deadline.at == clock.now + 30.0


@pytest.mark.parametrize(("answered", "seconds"), [(True, 0.0), (False, connecting.STEADY), (False, 3.0)])
def test_connection_that_the_store_has_served_renews_the_patience(answered, seconds, clock):
    policy = broken_policy(answered=answered)
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
    policy, begun = broken_policy(), []
    for _ in policy.retry:
        begun.append(clock.now - 1000.0)
        policy.succeeded()
        assert policy.lost("it hung up") is None
    assert 70 > len(begun) > 30
    assert begun[-1] == pytest.approx(30.0)
    assert re.search(
        rf"broke \(it hung up, as did {len(begun)} further connections within 30 s, before", str(policy.overdue())
    )


def test_error_for_a_store_that_accepts_no_connection(clock):
    policy = broken_policy()
    for _ in policy.retry:
        policy.failed(ConnectionRefusedError("refused"))
    assert "it hung up; then: no store answered at here:1 within 30.0 s (refused)" in str(policy.overdue())


@EACH_KIND
async def test_client_asks_again_soon_for_a_connection_if_the_queue_of_the_server_is_full(kind, monkeypatch):
    for module in (blocking_socket, link):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT", 0.01)
    attempts, failed = [], connecting.ConnectRetry.failed
    monkeypatch.setattr(connecting.ConnectRetry, "failed", lambda *args: attempts.append(args) or failed(*args))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        port, options = server.getsockname()[1], {"token": TOKEN, "timeout": 1.0}
        connect = AsyncStore.connect if kind is AsyncStore else partial(asyncio.to_thread, TCPStore)
        with pytest.raises(StoreConnectionError):
            await connect("127.0.0.1", port, **options)
    assert len(attempts) > 2


def test_client_that_waits_long_for_a_store_says_so_once(clock, caplog):
    for _ in (retry := connecting.ConnectRetry("here", 1, 60.0)):
        if clock.now - 1000.0 < connecting.TELL_AFTER:
            assert not caplog.messages
        retry.failed(ConnectionRefusedError("refused"))
    assert [message.partition(":1 yet; ")[2] for message in caplog.messages] == [
        "this process goes on trying (refused): check that it was started, that host and port are right, and that no "
        "firewall is in between"
    ]


def test_server_that_accepts_and_is_silent_explains_more_than_a_refusal(clock):
    retry = connecting.ConnectRetry("here", 1, 60.0)
    for error in (ConnectionRefusedError("refused"), connecting.SilentServer(), TimeoutError()):
        retry.failed(error)
    assert "(it accepts connections and does not answer)" in str(retry.overdue())
    retry.failed(connecting.hung_up(None, secured=False))
    retry.failed(connecting.SilentServer())
    assert "(it hung up before it sent anything)" in str(retry.overdue())


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
def test_new_store_at_the_address_of_a_killed_one_is_recognized():
    with daemon(free_port()) as (process, port), TCPStore("127.0.0.1", port, timeout=LONG, config=CONFIG) as store:
        store.set("k", "v")
        process.kill()
        process.wait(LONG)
        with daemon(port), pytest.raises(StoreConnectionError, match="started anew and holds nothing"):
            store.get("k")
        with pytest.raises(StoreConnectionError, match="started anew"):
            store.set("k", "v")


@EACH_KIND
@pytest.mark.processes
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
async def test_requests_survive_a_store_with_data_that_is_killed(tmp_path, kind, kills, eventually):
    """Requests wait while the store is down, and each is applied once: the journal also has the answers."""
    options = ("--data", str(tmp_path), "--fsync", "always")
    stop, sums = False, []

    async def add() -> None:
        while not stop:
            sums.append(await store.add("n", 1))

    with daemon(free_port(), *options) as (process, port):
        store = await open_store(kind, "127.0.0.1", port)
        working = [asyncio.create_task(add()) for _ in range(4)]
        waiting = [asyncio.ensure_future(store.get(f"k{number}")) for number in range(3)]
        await eventually(lambda: len(sums) >= 20)
        process.kill()
        process.wait(LONG)
    for turn in range(kills):
        setting = asyncio.ensure_future(store.set(f"turn {turn}", b"1"))
        with daemon(port, *options) as (process, _):
            await setting
            assert await store.multi_get([f"turn {each}" for each in range(turn + 1)]) == [b"1"] * (turn + 1)
            goal = len(sums) + 20
            await eventually(lambda goal=goal: len(sums) >= goal)
            if turn == kills - 1:
                stop = True
                await asyncio.gather(*working)
                assert sorted(sums) == list(range(1, len(sums) + 1))
                await store.multi_set(["k0", "k1", "k2"], [b"0", b"1", b"2"])
                assert await asyncio.gather(*waiting) == [b"0", b"1", b"2"]
                await store.close()
            process.kill()
            process.wait(LONG)


# -- ephemeral keys ---------------------------------------------------------------------------------


@pytest.fixture
def deleted(store, eventually):
    """Return a function that waits until a key does not exist."""

    async def deleted(key: str) -> None:
        async with asyncio.timeout(LONG):
            while await store.check([key]):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    return deleted


async def test_refused_ephemeral_set_leaves_the_key_as_it_was(store, connect, config):
    other = await connect()
    await store.set("k", b"lasting")
    with pytest.raises(StoreError, match="the store takes"):
        await other.set("k", bytes(config.store_max_value_nbytes + 1), ephemeral=True)
    await other.close()
    assert await store.get("k") == b"lasting"


async def test_ephemeral_key_survives_a_reconnect_and_is_deleted_with_its_client(proxy, connect, store, deleted):
    other = await connect(proxy.address, store_lease=LONG)
    await other.set("here", b"1", ephemeral=True)
    await other.set("stays", b"1")
    proxy.cut()
    assert await other.add("n", 1) == 1
    assert await store.get("here") == b"1"
    await other.close()
    await deleted("here")
    assert await store.check(["stays"])


async def test_ephemeral_key_that_another_client_sets_is_not_ephemeral_any_more(store, connect):
    other = await connect()
    await other.set("k", b"1", ephemeral=True)
    await other.set("l", b"1", ephemeral=True)
    await store.set("k", b"2")
    await store.delete_key("l")
    await store.set("l", b"2")
    await other.close()
    await store.barrier("b", 1)
    assert await store.multi_get(["k", "l"]) == [b"2", b"2"]


async def test_client_that_returns_after_expiry_restores_its_keys_unless_they_were_set_since(
    proxy, connect, store, deleted
):
    other = await connect(proxy.address, store_lease=0.0)
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
    await deleted("here")
    assert await store.list_keys() == []


@pytest.mark.processes
async def test_ephemeral_key_of_a_killed_process_is_deleted_when_its_lease_expires(server, store, deleted):
    program = (
        "import time; from asyncdist.config import Config; from asyncdist.store import TCPStore\n"
        f"store = TCPStore('127.0.0.1', {server.port}, config=Config(token={TOKEN!r}, store_lease=0.3))\n"
        "store.set('rank 1', b'alive', ephemeral=True); time.sleep(60)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await store.get("rank 1", timeout=LONG) == b"alive"
    killed = time.monotonic()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await deleted("rank 1")
    assert time.monotonic() - killed > 0.29
    assert len(server.sessions) == 1


async def test_client_can_return_after_its_lease_has_passed_while_the_server_was_stopped(
    server, proxy, connect, eventually
):
    other = await connect(proxy.address, store_lease=0.6)
    await other.set("here", b"alive", ephemeral=True)
    (identity,) = (each for each, (lease, *_) in server.sessions.gather()().items() if lease == 0.6)
    session = server.sessions.get(identity)
    proxy.clog()
    proxy.cut()
    await eventually(lambda: session.connection is None)
    # The server runs on this loop.
    time.sleep(1.2)  # noqa: ASYNC251
    until = time.monotonic() + 0.6
    await eventually(lambda: session.until > until)
    assert server.sessions.get(identity) is session
    proxy.unclog()
    await other.check([])
    assert other.expiries == 0


@EACH_KIND
async def test_no_request_overtakes_a_long_ephemeral_value_that_is_restored(server, proxy, connect, kind, eventually):
    other = await connect(proxy.address, kind=kind, store_lease=0.0)
    await other.set("here", bytes(200_000), ephemeral=True)
    proxy.clog()
    proxy.cut()
    await eventually(lambda: len(server.sessions) == 0)
    checking = other.check(["here"])
    proxy.unclog()
    assert await checking


# -- watches ----------------------------------------------------------------------------------------


async def test_watch_continues_after_a_reconnect_without_repeating_a_value(server, proxy, connect, store, eventually):
    watcher = await connect(proxy.address)
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
        assert not waiting.done()
        await store.delete_key("k")
        assert await waiting is None
    await eventually(lambda: server.state.num_open == 0)


async def test_prefix_watch_yields_the_changes_during_a_reconnect(server, proxy, connect, store, eventually):
    watcher = await connect(proxy.address)
    await store.multi_set(["job/a", "other"], ["1", "x"])
    async with watcher.watch_keys("job/") as changes:
        assert await anext(changes) == ("job/a", b"1")
        await store.set("job/b", b"2")
        await store.set("other", b"y")
        await store.append("job/a", b"1")
        await store.delete_key("job/b")
        assert [await anext(changes) for _ in range(3)] == [("job/b", b"2"), ("job/a", b"11"), ("job/b", None)]
        proxy.clog()  # so that the next connection is accepted, and gets no answer
        proxy.cut()
        await store.multi_set(["job/c", "job/d"], ["3", "4"])
        await store.delete_key("job/a")
        proxy.unclog()
        assert sorted([await anext(changes) for _ in range(3)], key=str) == [
            ("job/a", None), ("job/c", b"3"), ("job/d", b"4"),
        ]  # fmt: skip
    await eventually(lambda: server.state.num_open == 0)


async def test_prefix_watch_of_more_than_fits_in_one_reply_is_refused(store):
    await store.set("a/1", bytes(600_000))
    await store.set("a/2", bytes(600_000))
    with pytest.raises(StoreError, match="watch a longer prefix"):
        await store.watch_keys("a/")
    async with store.watch_keys("a/1") as changes:
        assert await anext(changes) == ("a/1", bytes(600_000))


def test_blocking_watch_continues_after_a_reconnect():
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


async def test_watches_yield_none_when_an_ephemeral_key_expires(proxy, connect, store):
    other = await connect(proxy.address, store_lease=SHORT, store_reconnect=0.0)
    await other.set("rank 1", b"alive", ephemeral=True)
    async with store.watch("rank 1") as values, store.watch_keys("rank") as changes:
        assert await anext(values) == b"alive"
        proxy.cut()
        assert await anext(values) is None
        assert [await anext(changes) for _ in range(2)] == [("rank 1", b"alive"), ("rank 1", None)]
        third = await connect()
        await third.set("rank 1", b"alive again", ephemeral=True)
        assert await anext(values) == b"alive again"
        await third.close()
        assert await anext(values) is None
