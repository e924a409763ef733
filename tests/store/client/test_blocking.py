"""TCPStore: connections, leaders and followers, the embedded server."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import socket
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import AddressError, StoreConnectionError, StoreError, StoreTimeoutError, UsageError
from asyncdist.store import TCPStore
from asyncdist.store.base import Subscription
from asyncdist.store.client.blocking import BlockingConnection
from asyncdist.store.server.server import StoreServer
from tests.support.faults import Proxy
from tests.support.frames import frames_of
from tests.support.ports import free_port, refuses
from tests.support.stores import LONG, TOKEN

UNIT = 0.05
CONFIG = Config(token=TOKEN)


def test_call_uses_only_the_calling_thread(master, other):
    before = threading.enumerate()
    other.set("k", "v")
    other.get("k")
    assert threading.enumerate() == before
    # The others are threads of the process, which tests before this one may have started.
    shared = ("asyncdist-futures", "asyncdist-observer")
    ours = {thread.name for thread in before if thread.name.startswith("asyncdist")}
    assert {name for name in ours if not name.startswith(shared)} == {"asyncdist-runtime"}  # the master's


def test_get_enters_few_frames(master, other):
    other.set("k", "v")
    assert min(frames_of(partial(other.get, "k")) for _ in range(100)) <= 31


def test_leader_that_has_its_answer_passes_the_lead_on(master, other, threads):
    for turn in range(20):
        waiting = [threads.submit(other.get, f"{turn}/{number}") for number in range(8)]
        for number in range(8) if turn % 2 else reversed(range(8)):
            master.set(f"{turn}/{number}", str(number))
        assert [future.result(LONG) for future in waiting] == [str(number).encode() for number in range(8)]
    assert not other.connection.protocol.open_requests()


def test_leader_or_follower_that_times_out_passes_the_lead_on(master, other, threads):
    short = [threads.submit(other.get, "never", UNIT * (1 + number % 3) / 2) for number in range(12)]
    long = [threads.submit(other.get, "k") for _ in range(12)]
    for future in short:
        with pytest.raises(StoreTimeoutError):
            future.result(LONG)
    master.set("k", "v")
    assert {future.result(LONG) for future in long} == {b"v"}
    assert other.check(["k"])
    assert not other.connection.protocol.open_requests()


def test_large_values_both_ways_at_once(master, other, threads):
    """Neither side may wait for the other to read while it writes."""
    value = os.urandom(8 << 20)

    def work(number: int) -> None:
        for _ in range(3):
            other.set(f"k{number}", value)
            assert other.get(f"k{number}") == value

    for future in [threads.submit(work, number) for number in range(4)]:
        future.result(LONG * 6)


def test_item_whose_pop_was_refused_is_not_lost(master, other, monkeypatch):
    server, item = master.server.server, bytes(200_000)
    master.queue_push("q", item)
    with monkeypatch.context() as smaller:
        smaller.setattr(server, "limit", 100_000)
        with pytest.raises(StoreError, match="would exceed"):
            other.queue_pop("q")
    other.close()
    assert master.queue_pop("q") == item


def test_an_interrupted_wait_leaves_nothing_behind(master, other, monkeypatch):
    wait = other.connection.sock.wait
    calls = []

    def interrupted(deadline: Deadline) -> None:
        calls.append(deadline)
        if len(calls) == 1:
            raise KeyboardInterrupt
        wait(deadline)

    monkeypatch.setattr(other.connection.sock, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.get("k")
    master.set("k", "v")
    assert other.get("k") == b"v"
    assert not other.connection.protocol.open_requests()


@contextlib.contextmanager
def busy(connection: BlockingConnection) -> Iterator[None]:
    """Another thread is stuck in sending."""
    began, over = threading.Event(), threading.Event()

    def send() -> None:
        with connection.send_lock:
            began.set()
            over.wait(LONG)
        connection.give_up(0)  # as a thread that sends, which checks the queue again after the release

    sender = threading.Thread(target=send)
    sender.start()
    began.wait(LONG)
    try:
        yield
    finally:
        over.set()
        sender.join(LONG)


def test_cancellation_is_sent_after_another_thread_has_sent(master, other, threads, until):
    state = master.server.server.state
    popping = threads.submit(other.queue_pop, "q", timeout=10 * UNIT)
    until(lambda: state.num_open == 1)
    with busy(other.connection), pytest.raises(StoreTimeoutError):
        popping.result(LONG)
    until(lambda: state.num_open == 0)
    master.queue_push("q", b"item")
    assert master.queue_pop("q", block=False) == b"item"


def test_acknowledgement_is_sent_after_another_thread_has_sent(master, other, threads, until):
    state = master.server.server.state
    popping = threads.submit(other.queue_pop, "q")
    until(lambda: state.num_open == 1)
    with busy(other.connection):
        master.queue_push("q", b"item")
        assert popping.result(LONG) == b"item"
    until(lambda: state.num_open == 0)
    assert master.queue_len("q") == 0


@pytest.mark.parametrize("sent", [0, 1])
def test_long_value_that_times_out_half_sent_leaves_the_connection_usable(sent, master, other, monkeypatch):
    value = os.urandom(600_000)  # three parts
    sock = other.connection.sock
    writable, calls = sock.outbox._sock, itertools.count()

    class FullAfterSome:
        send = writable.send

        def sendmsg(self, buffers: list[memoryview]) -> int:
            if next(calls) == sent:
                raise BlockingIOError
            return writable.sendmsg(buffers)

    def wait_until_overdue(deadline: Deadline, poll: object) -> None:
        threading.Event().wait(deadline.remaining())
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(sock.outbox, "_sock", FullAfterSome())
        patch.setattr(sock, "wait", wait_until_overdue)
        other.set_timeout(UNIT)
        with pytest.raises(StoreTimeoutError):
            other.set("k", bytes(600_000))
    other.set_timeout(LONG)
    other.set("another", value)
    assert other.get("another") == value
    assert not other.check(["k"])
    assert other.connection.sock is sock


# -- connecting ------------------------------------------------------------------------------------


def test_master_waits_for_workers(threads):
    port = free_port()
    arguments = {"world_size": 3, "timeout": timedelta(seconds=LONG), "config": CONFIG}
    workers = [threads.submit(TCPStore, "127.0.0.1", port, **arguments) for _ in range(2)]
    with TCPStore("127.0.0.1", port, is_master=True, **arguments) as master:
        stores = [worker.result(LONG) for worker in workers]
        assert master.add("init/", 0) == 3
        for store in stores:
            store.close()


def test_missing_workers_time_out():
    with pytest.raises(StoreTimeoutError, match="1 of 2 workers connected"):
        TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=1.0, config=CONFIG)  # it has to reach itself in that time
    with TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=LONG), False, config=CONFIG) as store:
        assert store.num_keys() == 0


def test_a_port_in_use(master):
    with pytest.raises(AddressError, match="in use"):
        TCPStore("127.0.0.1", master.port, is_master=True, config=CONFIG)
    with TCPStore("127.0.0.1", master.port, is_master=True, multi_tenant=True, config=CONFIG) as tenant:
        tenant.set("k", "v")
        assert master.get("k") == b"v"


def test_listening_beyond_loopback_needs_a_token():
    with pytest.raises(UsageError, match="ASYNCDIST_TOKEN"):
        TCPStore("0.0.0.0", 0, is_master=True, config=Config())
    with TCPStore("0.0.0.0", 0, is_master=True, timeout=LONG, config=CONFIG) as store:
        assert store.add("n", 1) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST"])
def test_master_with_a_loopback_name_listens_on_loopback_only(host):
    with TCPStore(host, 0, is_master=True, timeout=LONG, config=CONFIG) as store, pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), LONG).close()  # where it does not listen


def test_a_bound_socket_to_listen_on():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    with TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=sock.detach(), config=CONFIG) as store:
        assert store.port == port
        assert store.add("n", 1) == 1


def test_requests_time_out_at_a_server_that_does_not_read(threads):
    """Even a request that can be neither sent nor answered ends with its timeout."""
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    other = TCPStore("127.0.0.1", server.port, timeout=LONG, config=Config(store_reconnect=0))
    background_loop().call(server.pause_reading)
    other.set_timeout(UNIT)
    for call in (lambda: other.get("k"), lambda: other.set("k", bytes(64 << 20)), lambda: other.get("k")):
        with pytest.raises(StoreTimeoutError):
            call()
    other.close()
    background_loop().run(server.close())


def test_collected_store_disconnects_and_stops_serving(until):
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG, config=CONFIG)
    port = store.port
    store.set("k", "v")
    del store
    gc.collect()
    until(lambda: refuses(port))


def num_sockets_at(port: int) -> int:
    """Return the number of this process's connections to and listeners at a port."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the folder
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    found += sock.family == socket.AF_INET and sock.getsockname()[1] == port
    return found


def _use_after_fork(store: TCPStore, news: Subscription) -> None:
    try:
        store.get("k")
    except UsageError:
        try:
            news.get()
        except UsageError:
            assert num_sockets_at(store.port) == 0
            store.close()
            os._exit(17)
    os._exit(1)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_cannot_use_the_store(master):
    master.set("k", "v")
    with master.subscribe("news") as news:
        assert num_sockets_at(master.port) > 0
        master.publish("news", "for the parent")
        child = multiprocessing.get_context("fork").Process(target=_use_after_fork, args=(master, news))
        child.start()
        child.join(LONG)
        assert child.exitcode == 17
        assert master.get("k") == b"v"  # the child's close() was of its own copy
        assert news.get(LONG) == b"for the parent"


def _ask_after_fork(store: TCPStore) -> None:
    for ask in store.get, store.subscribe:
        with pytest.raises(UsageError, match="before a fork"):
            ask("k")
    store.close()
    os._exit(17)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_child_forked_during_a_reconnect_cannot_use_the_store(master, threads):
    with Proxy("127.0.0.1", master.port) as proxy, TCPStore(*proxy.address, timeout=LONG, config=CONFIG) as other:
        waiting = threads.submit(other.get, "k")
        proxy.clog()
        proxy.cut()
        proxy.until(lambda: proxy.num_connections)
        with other.connection.lock:  # as the thread that connects may have it then
            child = multiprocessing.get_context("fork").Process(target=_ask_after_fork, args=(other,))
            child.start()
        child.join(LONG)
        assert child.exitcode == 17
        proxy.unclog()
        master.set("k", "v")
        assert waiting.result(LONG) == b"v"


def test_connections_are_closed_when_an_attempt_fails(master, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("no luck")

    monkeypatch.setattr("asyncdist.store.client.blocking.shake_hands", broken)
    with pytest.raises(StoreConnectionError, match="no luck"):
        TCPStore("127.0.0.1", master.port, timeout=UNIT, config=CONFIG)
    gc.collect()
