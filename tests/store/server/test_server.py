"""The server against hostile, dead and slow clients: it logs and drops them, and other clients are unaffected."""

import asyncio
import logging
import socket
import struct
import threading

import pytest

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import AddressError, LookUpTimeoutError, StoreConnectionError, UsageError
from asyncdist.net.connection.frames import CHUNK, GOODBYE, HEADER, SHORT, STAGING, pack_opening
from asyncdist.net.security.auth import MAGIC, NONCE_NBYTES, PROOF_NBYTES
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.client.connect import ConnectRetry
from asyncdist.store.protocol.long_messages import LONG_NBYTES
from asyncdist.store.protocol.operations import CHANGED, Op, OperationKind
from asyncdist.store.server import listener
from asyncdist.store.server.accept import PendingConnection
from asyncdist.store.server.session import Session
from tests.support.packets import deafen, needs_packet_filters
from tests.support.received_messages import frame_of

UNIT, LONG = 0.05, 60.0
TOKEN = "a token for tests"

LOGGER = "asyncdist.store.server.server"


GARBAGE = {
    "noise": bytes(range(256)) * 4,
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost:29500\r\nUser-Agent: a browser, or a scanner\r\n\r\n",
    "almost torch's own client": struct.pack("<BIBI", 0, 0x3C85F7CF, 0x0D, 1234) + bytes(64),
    "nothing but zeros": bytes(500),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_instead_of_a_handshake_is_dropped(server, store, caplog, garbage, raw):
    peer = await raw(server)
    await peer.send(garbage)
    assert await peer.ended()
    assert "speaks another protocol" in caplog.text
    assert await store.add("n", 1) == 1


async def test_wrong_proof_is_refused(server, store, caplog, raw):
    peer = await raw(server)
    await peer.send(MAGIC + bytes(NONCE_NBYTES) + bytes(PROOF_NBYTES) + frame_of(1, Op.SET, "k", b"v"))
    assert await peer.ended()
    assert "did not hold the token of this process" in caplog.text
    assert await store.check(["k"]) is False


HARM = {
    "a frame of 2^32 bytes": HEADER.pack((1 << 32) - 1, SHORT, 0, 0),
    "a frame just above the limit": HEADER.pack((1 << 20) + (64 << 10) + 1, SHORT, 0, 0),
    "a frame of noise": HEADER.pack(5, SHORT, 0, 0) + b"\xc1\xc1\xc1\xc1\xc1",
    "an empty frame": HEADER.pack(0, SHORT, 0, 0),
    "a long message of no request": pack_opening(0, b"\xc1", [1 << 17]),
    "two long messages at once": pack_opening(0, b"\x01", [1 << 17]) + pack_opening(1, b"\x02", [1 << 17]),
    "a part of no message": HEADER.pack(5, CHUNK, 0, 0) + bytes(5),
    "shared memory": HEADER.pack(6, STAGING, 0, 0) + bytes(6),
    "a frame of channels": HEADER.pack(0, GOODBYE, 0, 0),
    "no array": HEADER.pack(1, SHORT, 0, 0) + b"\x05",
    "an unknown operation": frame_of(1, 999),
    "no operation": frame_of(1),
    "wrong arguments": frame_of(1, Op.SET, "k", 5),
    "too many arguments": frame_of(1, Op.GET, "k", "l"),
    "an id that is not an integer": frame_of("one", Op.NUM_KEYS),
    "an identity, twice": frame_of(1, Op.RESUME, b"identity", 0) + frame_of(2, Op.RESUME, b"another", 0),
    "nested a thousand deep": HEADER.pack(2000, SHORT, 0, 0) + b"\x91" * 2000,
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
async def test_bad_frame_after_the_handshake_drops_the_client(server, store, caplog, harm, raw):
    """The rule holds for clients with the token, too. Requests before the bad frame are answered."""
    waiting = store.get("k")
    peer = await raw(server, proven=True)
    await peer.send(frame_of(1, Op.SET, "before", b"1") + harm + frame_of(2, Op.SET, "after", b"1"))
    assert await peer.ended()
    assert "refused" in caplog.text
    assert await store.check(["after"]) is False
    await store.set("k", b"v")
    assert await waiting == b"v"


async def test_requests_at_the_old_connection_of_a_reconnected_client_are_not_applied(server, eventually, raw):
    """The client sends unanswered requests again; the server does not apply those left at the old connection."""
    earlier = await raw(server, proven=True)
    await earlier.send(frame_of(1, Op.RESUME, b"identity", 1000))
    await eventually(lambda: server.sessions.get(b"identity") is not None)
    session = server.sessions.get(b"identity").connection
    session.pause_writing()
    await earlier.send(frame_of(2, Op.ADD, "n", 1))
    await eventually(lambda: session.unfinished)
    await raw(server, proven=True)
    (new,) = server.admission.connections - {session}
    new.resume(b"identity", 1000)
    session.resume_writing()
    assert server.state.keys.peek("n") is None
    assert await earlier.ended()
    assert server.sessions.get(b"identity").connection is new


@pytest.mark.each_loop
async def test_client_vanishes_in_the_middle_of_a_frame(server, store, caplog, eventually, raw):
    peer = await raw(server, proven=True)
    with caplog.at_level(logging.INFO, LOGGER):
        await peer.send(frame_of(1, Op.SET, "k", bytes(1000))[:500])
        await eventually(lambda: any(c.unfinished for c in server.admission.connections))
        await peer.leave()
        await eventually(lambda: server.num_connections == 1)
    assert "ended in the middle of a request" in caplog.text
    assert await store.check(["k"]) is False


async def test_waits_of_a_vanished_client_are_removed(server, store, eventually, raw):
    dying = await raw(server, proven=True)
    await dying.send(frame_of(1, Op.GET, "k") + frame_of(2, Op.BARRIER, "b", 2) + frame_of(3, Op.QUEUE_POP, "q", True))
    await eventually(lambda: server.state.num_open == 3)
    await dying.leave()
    await eventually(lambda: server.state.num_open == 0)
    with pytest.raises(TimeoutError):
        await store.barrier("b", 2, timeout=UNIT)


@pytest.mark.each_loop
async def test_handshake_without_proof_times_out(caplog, raw):
    config = Config(handshake_timeout=UNIT)
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config) as server:
        silent, slow = await raw(server), await raw(server)
        await slow.send(MAGIC[:5])
        assert await silent.ended()
        assert await slow.ended()
        assert caplog.text.count("no proof of the token within 0.05 s") == 1
        async with await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN) as store:
            later = await raw(server)
            assert await later.ended()  # the limit does not apply to the authenticated store
            assert await store.add("n", 1) == 1
    assert "refused 2 connections in 1 s: no proof of the token within 0.05 s (2)" in caplog.text


async def test_connections_beyond_the_limit_are_refused(caplog, monkeypatch, eventually, raw):
    failed = ConnectRetry.failed

    def end_after_first_attempt(retry, error):
        retry.deadline = Deadline.after(0)
        failed(retry, error)

    monkeypatch.setattr(ConnectRetry, "failed", end_after_first_attempt)
    config = Config(store_max_connections=2)
    async with await StoreServer.start("127.0.0.1", 0, config=config) as server:
        stores = [await AsyncStore.connect("127.0.0.1", server.port) for _ in range(2)]
        refused = [await raw(server) for _ in range(3)]
        for peer in refused:
            assert await peer.ended()
        assert caplog.text.count("ASYNCDIST_STORE_MAX_CONNECTIONS") == 1
        with pytest.raises(StoreConnectionError, match=r"may have as many .* ASYNCDIST_STORE_MAX_CONNECTIONS allows"):
            await AsyncStore.connect("127.0.0.1", server.port, timeout=LONG)
        with pytest.raises(StoreConnectionError, match=r"may have as many .* ASYNCDIST_STORE_MAX_CONNECTIONS allows"):
            await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=LONG)
        assert await stores[0].add("n", 1) == 1
        await stores[1].close()
        await eventually(lambda: server.num_connections == 1)
        async with await AsyncStore.connect("127.0.0.1", server.port) as store:  # there is room again
            assert await store.add("n", 1) == 2
        await stores[0].close()


@needs_packet_filters
async def test_client_of_a_lost_host_is_detected_while_others_are_served(server, store, monkeypatch, eventually, raw):
    at_once = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 1))
    monkeypatch.setattr("asyncdist.net.host_watch.keepalive", lambda limit: at_once)
    gone = await raw(server, proven=True)
    introduction = frame_of(3, Op.RESUME, bytes(16), 0)
    await gone.send(introduction + frame_of(1, Op.SET_EPHEMERAL, "its", b"v") + frame_of(2, Op.BARRIER, "b", 2))
    await eventually(lambda: server.state.num_open == 1)
    deafen(gone.writer.get_extra_info("socket").fileno())
    assert await store.get("its") == b"v"
    assert server.num_connections == 2
    await eventually(lambda: server.num_connections == 1)
    await eventually(lambda: server.state.keys.peek("its") is None)
    assert server.state.num_open == 0


@pytest.mark.each_loop
async def test_client_that_does_not_read_replies_is_not_read_from(server, store, eventually, raw):
    """The server applies backpressure instead of buffering replies without bound."""
    await store.set("k", bytes(1 << 20))
    peer = await raw(server, proven=True)
    peer.writer.transport.pause_reading()
    peer.writer.write(b"".join(frame_of(number, Op.GET, "k") for number in range(1, 201)))
    await eventually(lambda: any(connection.paused for connection in server.admission.connections))
    (slow,) = [connection for connection in server.admission.connections if connection.paused]
    assert slow.waiting_nbytes < 4 << 20
    assert await store.add("n", 1) == 1
    peer.writer.transport.resume_reading()
    answered = []
    async for number, kind, value in peer.messages():
        if kind == OperationKind.RESULT:
            answered.append((number, len(value)))
        if len(answered) == 200:
            break
    assert answered == [(number, 1 << 20) for number in range(1, 201)]


@pytest.fixture
def on_listing(server, monkeypatch):
    """Call a hook before each listing of all keys, with the client and the number of calls so far."""

    def on_listing(call):
        execute, count = server.state.execute, 0

        def counted(client, request, op, args):
            nonlocal count
            if op is Op.LIST_KEYS:
                call(client, count)
                count += 1
            return execute(client, request, op, args)

        monkeypatch.setattr(server.state, "execute", counted)

    return on_listing


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.each_loop
async def test_repeated_listings_do_not_starve_other_clients(server, store, on_listing):
    turn, listed, answered = 0, [], []
    on_listing(lambda client, count: listed.append(turn))
    asked = []
    for number in range(10):
        asked += [store.list_keys(), store.set(f"{number}", b"")]
    for number, each in enumerate(asked):
        each.add_done_callback(lambda _, number=number: answered.append(number))
    while len(answered) < len(asked):
        turn += 1
        await asyncio.sleep(0)
    assert len(set(listed)) == 10
    assert [len(await each) for each in asked[::2]] == list(range(10))
    assert answered == list(range(20))


@pytest.mark.each_loop
async def test_queued_listing_is_not_executed_when_the_server_drains(server, connect, on_listing):
    draining, listed, store = [], [], await connect(store_reconnect=0.0)

    def drain(client: object, count: int) -> None:
        listed.append(count)
        if count == 2:
            draining.append(asyncio.ensure_future(server.drain(LONG)))

    on_listing(drain)
    asked = [store.list_keys() for _ in range(6)]
    assert await asyncio.gather(*asked[:3]) == [[]] * 3
    for each in asked[3:]:
        with pytest.raises(StoreConnectionError):
            await each
    await draining[0]
    await turns(20)
    assert listed == [0, 1, 2]


async def test_queued_listing_of_a_vanished_client_is_removed(server, store, connect, on_listing, eventually):
    listed, other = [], await connect(store_reconnect=0.0)
    there = server.num_connections

    def leave(client: Session, count: int) -> None:
        listed.append(count)
        if count == 2:
            assert client.unfinished
            client.abort()

    on_listing(leave)
    with pytest.raises(StoreConnectionError):
        await asyncio.gather(*(other.list_keys() for _ in range(6)))
    await eventually(lambda: server.num_connections == there - 1)
    await turns(20)
    assert listed == [0, 1, 2]
    assert await store.list_keys() == []


@pytest.mark.parametrize("nbytes", [LONG_NBYTES, 1 << 20])
async def test_client_with_many_requests_is_not_dropped_by_notifications(
    server, store, monkeypatch, eventually, raw, nbytes
):
    """Neither replies to its requests nor results of its waits count against it."""
    monkeypatch.setattr("asyncdist.store.server.connection.BACKLOG_NBYTES", 1 << 10)
    count = (24 << 20) // nbytes
    await store.set("there", bytes(nbytes))
    peer = await raw(server, proven=True)
    await peer.send(frame_of(1, Op.WATCH, "heartbeat"))
    await peer.send(b"".join(frame_of(number, Op.GET, "late") for number in range(2, 2 + count)))
    await eventually(lambda: server.state.num_open == 1 + count)
    peer.writer.transport.pause_reading()
    await store.set("late", bytes(nbytes))
    peer.writer.write(b"".join(frame_of(number, Op.GET, "there") for number in range(2 + count, 2 + 2 * count)))
    await eventually(lambda: any(connection.paused for connection in server.admission.connections))
    for number in range(10):
        await store.set("heartbeat", str(number))
    peer.writer.transport.resume_reading()
    lengths, published = [], b""
    async for number, _, value in peer.messages():
        if number > 1:
            lengths.append(len(value))
        elif number == 1:
            published = value
        if len(lengths) == 2 * count and published == CHANGED + b"9":
            break
    assert set(lengths) == {nbytes}
    assert server.refusals.count == 0


@pytest.mark.each_loop
@pytest.mark.parametrize("nbytes", [LONG_NBYTES - 100, 1 << 19])
async def test_subscriber_that_does_not_read_is_dropped(server, store, connect, caplog, monkeypatch, raw, nbytes):
    monkeypatch.setattr("asyncdist.store.server.connection.BACKLOG_NBYTES", 1 << 20)
    deaf, fine = await raw(server, proven=True), await connect()
    heard = await fine.subscribe("news")
    await deaf.send(frame_of(1, Op.SUBSCRIBE, "news"))
    while await store.publish("news", b"") < 2:
        assert await anext(heard) == b""
    assert await anext(heard) == b""
    deaf.writer.transport.pause_reading()
    sent = 0
    while "does not read" not in caplog.text:
        await store.publish("news", bytes(nbytes))
        assert len(await anext(heard)) == nbytes
        sent += nbytes
        assert sent < 100 << 20
    deaf.writer.transport.resume_reading()
    assert await deaf.ended()
    assert await store.publish("news", b"") == 1


@pytest.mark.each_loop
async def test_bug_in_an_operation_closes_one_connection(server, store, caplog, monkeypatch, raw):
    execute, other = server.state.execute, await raw(server, proven=True)

    def broken(client, request, op, args):
        if op is Op.LIST_KEYS:
            raise ZeroDivisionError
        return execute(client, request, op, args)

    monkeypatch.setattr(server.state, "execute", broken)
    await other.send(frame_of(1, Op.LIST_KEYS, ""))
    assert await other.ended()
    assert "could not be served" in caplog.text
    assert await store.add("n", 1) == 1


# -- where it listens ------------------------------------------------------------------------------


async def test_address_that_cannot_be_bound_is_refused(server):
    for host, port, reason in (
        ("127.0.0.1", server.port, f"port {server.port} is in use"),
        ("127.0.0.1", 70000, "port 70000"),
        ("no-such-host.invalid", 0, "does not resolve"),
        ("203.0.113.1", 0, "not an address of this machine"),  # reserved for documentation
    ):
        with pytest.raises(AddressError, match=reason):
            await StoreServer.start(host, port, token=TOKEN)


def test_slow_name_resolution_blocks_neither_caller_nor_loop_shutdown(monkeypatch, new_loop):
    """Neither a cancelled caller waits for the look-up, nor the end of the loop, which joins its own threads."""
    begun, proceed, ended = threading.Event(), threading.Event(), threading.Event()

    def look_up(host: str, port: int) -> None:
        begun.set()
        proceed.wait(LONG)
        ended.set()

    async def give_up():
        starting = asyncio.create_task(StoreServer.start("a-name", 0, token=TOKEN))
        while not begun.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.wait([starting])

    monkeypatch.setattr(listener, "resolve_listen_address", look_up)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(give_up())
    assert not ended.is_set()
    proceed.set()


def test_look_up_of_the_own_name_ends_without_an_answer(monkeypatch):
    proceed = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: proceed.wait(LONG) and [])
    monkeypatch.setattr(listener, "NAME_GRACE", 0.01)
    with pytest.raises(LookUpTimeoutError, match="'a-name' in time"):
        listener.resolve_listen_address("a-name", 0)
    proceed.set()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
async def test_address_beyond_loopback_needs_a_token(host):
    with pytest.raises(UsageError, match="ASYNCDIST_TOKEN"):
        await StoreServer.start(host, 0, token=None)
    with pytest.raises(UsageError, match="ASYNCDIST_ALLOW_UNAUTHENTICATED"):
        await StoreServer.start(host, 0, token="")


@pytest.mark.parametrize(
    ("token", "config"), [(TOKEN, Config()), (None, Config(allow_unauthenticated=True))], ids=["token", "allowed"]
)
async def test_server_listens_on_every_interface(token, config):
    async with await StoreServer.start("", 0, token=token, config=config) as server:
        hosts = ["127.0.0.1", "::1"] if ":" in server.address else ["127.0.0.1"]
        for host in hosts:
            async with await AsyncStore.connect(host, server.port, token=token, timeout=LONG) as store:
                assert await store.add("n", 0) == 0


async def test_localhost_listens_on_every_address_of_the_name():
    async with await StoreServer.start("localhost", 0) as server:
        assert server.host == "localhost"
        addresses = {found[4][0] for found in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)}
        for host in ("localhost", *addresses):
            async with await AsyncStore.connect(host, server.port, timeout=LONG) as store:
                await store.add("n", 1)


async def test_server_accepts_a_bound_socket():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    async with (
        await StoreServer.start("", 0, sockets=[sock]) as server,
        await AsyncStore.connect("127.0.0.1", port, timeout=LONG) as store,
    ):
        assert server.port == port
        assert await store.add("n", 1) == 1
    assert sock.fileno() == -1


@pytest.mark.each_loop
async def test_connection_accepted_during_close_is_closed(config):
    """An event loop sets up an accepted connection some turns later; a closed server must not keep it."""
    server = await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config)
    loop = asyncio.get_running_loop()
    accepted, peer = socket.socketpair()
    with peer:
        peer.setblocking(False)
        await server.close()
        await loop.connect_accepted_socket(lambda: PendingConnection(server), accepted)
        async with asyncio.timeout(LONG):
            assert await loop.sock_recv(peer, 1) == b""
    assert server.num_connections == 0


@pytest.mark.each_loop
async def test_port_is_free_after_close(config):
    first = await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config)
    store = await AsyncStore.connect("127.0.0.1", first.port, token=TOKEN)
    await first.close()
    await first.close()
    async with await StoreServer.start("127.0.0.1", first.port, token=TOKEN, config=config) as second:
        assert second.port == first.port
    await store.close()
