"""c10d clients at the asyncdist server: access rules, malformed requests, and clients that vanish or stop reading."""

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

import pytest

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.client.connect import accepts_c10d_clients
from asyncdist.store.protocol.c10d import MAGIC, STOP_WAITING, Code
from asyncdist.store.server import accept
from tests.support.c10d_peer import Peer, encode
from tests.support.raw_connection import RawConnection

LONG, UNIT = 60.0, 0.05
TOKEN = "a token for tests"
CERTIFICATES = Path(__file__).parents[2] / "tls"
HELLO = struct.pack("<BIBI", 0, MAGIC, 0x0D, 1234)


@pytest.fixture
def call(server, raw):
    @contextlib.asynccontextmanager
    async def call(said: bytes = HELLO):
        caller = await raw(server)
        await caller.send(said)
        if said == HELLO:
            assert await caller.receive(4) == HELLO[-4:]
        yield caller
        await caller.leave()

    return call


async def test_greeting_is_read_byte_by_byte(call):
    async with call(b"") as caller:
        for byte in HELLO + encode(Code.SET, b"/k", b"v") + encode(Code.GET, b"/k"):
            await caller.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await caller.receive(4 + 9) == HELLO[-4:] + struct.pack("<Q", 1) + b"v"


def _own_address() -> str | None:
    """Return an address of this machine other than loopback; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None


TLS = {"tls_cert": str(CERTIFICATES / "member.crt"), "tls_key": str(CERTIFICATES / "member.key")}


@pytest.mark.parametrize(
    ("token", "settings", "taken"),
    [
        (None, {}, True),
        (TOKEN, {}, False),
        (None, TLS, False),
        (TOKEN, TLS, False),
        (None, {"store_c10d": "off"}, False),
        (TOKEN, {"store_c10d": "loopback"}, True),
        (TOKEN, {"store_c10d": "any"}, True),
        (TOKEN, {"store_c10d": "loopback", **TLS}, True),
    ],
)
async def test_store_with_token_or_tls_accepts_c10d_from_loopback_only_if_set(caplog, token, settings, taken, raw):
    async with await StoreServer.start("127.0.0.1", 0, token=token, config=Config(**settings)) as server:
        caller = await raw(server)
        await caller.send(HELLO + encode(Code.SET, b"/k", b"v") + encode(Code.CHECK, [b"/k"]))
        if taken:
            assert await caller.receive(4 + 1) == HELLO[-4:] + b"\x00"
        else:
            assert await caller.ended()
        assert server.state.keys.peek("k") == (b"v" if taken else None)
        assert ("ASYNCDIST_STORE_C10D=loopback" in caplog.text) is not taken


@pytest.mark.parametrize("said", [None, "off", "loopback"])
def test_store_of_a_rank_accepts_c10d_only_if_set(said):
    config = Config() if said is None else Config(store_c10d=said)
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG, config=config) as store:
        store.set("secret", b"of the ranks")
        assert accepts_c10d_clients("127.0.0.1", store.port, LONG) is (said == "loopback")
        assert store.num_keys() == 1


@pytest.mark.parametrize("allowed", [False, True], ids=["not allowed", "allowed"])
async def test_c10d_clients_of_other_hosts_are_refused_unless_allowed(caplog, monkeypatch, allowed, raw):
    monkeypatch.setattr(accept, "is_loopback", lambda host: False)  # as for a peer on another host
    config = Config(store_c10d="any" if allowed else "loopback")
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config) as server:
        caller = await raw(server)
        await caller.send(HELLO + encode(Code.ADD, b"/n", 1))
        if allowed:
            assert await caller.receive(4 + 8) == HELLO[-4:] + struct.pack("<q", 1)
        else:
            assert await caller.ended()
        assert ("--c10d any" in caplog.text) is not allowed
        assert "ASYNCDIST_TOKEN" not in caplog.text  # torch's format has no tokens
        async with await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=LONG) as store:
            assert await store.check(["n"]) is allowed  # a client with the token may come from anywhere


@pytest.mark.skipif(_own_address() is None, reason="this machine has no address but loopback")
async def test_external_address_of_this_host_is_not_loopback(caplog):
    address = _own_address()
    config = Config(store_c10d="loopback")
    async with await StoreServer.start("0.0.0.0", 0, token=TOKEN, config=config) as server:
        caller = await RawConnection.to(server.port, address)
        await caller.send(HELLO)
        assert await caller.ended()
        assert "from another machine" in caplog.text
        await caller.leave()


def reset(port: int, said: bytes) -> None:
    """Connect, send and reset the connection before the test's loop accepts it."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(said)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def test_requests_of_a_reset_connection_are_not_applied(server, store, monkeypatch, eventually):
    """Some event loops no longer know the peer address of such a connection."""
    monkeypatch.setattr(accept, "is_loopback", lambda host: False)
    for _ in range(20):
        reset(server.port, HELLO[:5] + encode(Code.SET, b"/k", b"v"))
    await eventually(lambda: server.refusals.count == 20)
    assert await store.check(["k"]) is False


BAD = {
    "an unknown code": (b"\x42", "0x42"),
    "another magic number": (encode(Code.VALIDATE, 7), "magic"),
    "a key of 2^60 bytes": (b"\x03" + struct.pack("<Q", 1 << 60), "a key that claims"),
    "a value above the limit": (encode(Code.SET, b"/big", bytes((1 << 20) + 1)), "STORE_MAX_VALUE_NBYTES"),
    "a value that grows above the limit": (encode(Code.APPEND, b"/v", bytes(1 << 20)), "STORE_MAX_VALUE_NBYTES"),
    "an add to what is no number": (encode(Code.ADD, b"/v", 1), "not an integer"),
    "an add beyond 64 bits": (encode(Code.ADD, b"/n", (1 << 63) - 1) * 2, "64 bits"),
    "a barrier of another size": (encode(Code.BARRIER, b"/b", 3), "one of 2, not of 3"),
    "a barrier at a value": (encode(Code.BARRIER, b"/v", 2), "not an integer"),
    "a barrier of zero clients": (encode(Code.BARRIER, b"/c", 0), "a barrier of 0"),
    "more than a reply takes": (encode(Code.SET, b"/l", bytes(1 << 20)) + encode(Code.MULTI_GET, [b"/l"] * 9), "fewer"),
}


@pytest.mark.parametrize(("bad", "says"), BAD.values(), ids=BAD)
async def test_bad_request_closes_the_connection(store, call, caplog, eventually, server, bad, says):
    """Requests before the bad one are applied, later ones are not, and other clients are unaffected."""
    async with call() as standing, call() as caller:
        await standing.send(encode(Code.BARRIER, b"/b", 2))
        await eventually(lambda: server.state.num_open == 1)
        with contextlib.suppress(ConnectionError):  # it may hang up before it has read all
            await caller.send(encode(Code.SET, b"/v", b"text") + bad + encode(Code.SET, b"/after", b""))
        assert await caller.ended()
        assert says in caplog.text
        assert await store.get("v") == b"text"
        assert await store.check(["after"]) is False
        await standing.send(encode(Code.PING, 7))
        assert await standing.receive(4) == struct.pack("<I", 7)


async def test_request_behind_a_wait_is_answered_first(store, call):
    async with call() as caller:
        await caller.send(encode(Code.WAIT, [b"/k", b"/k"]) + encode(Code.ADD, b"/n", 1))
        assert await caller.receive(8) == struct.pack("<q", 1)
        await store.set("k", b"")
        assert await caller.receive(1) == b"\x00"


async def test_asyncdist_pop_and_c10d_wait_for_the_same_queue(server, store, call, eventually):
    async with call() as caller:
        await caller.send(encode(Code.WAIT, [b"/q"]))
        await eventually(lambda: server.state.num_open == 1)
        popped = asyncio.create_task(store.queue_pop("q"))
        await eventually(lambda: server.state.num_open == 2)
        await store.queue_push("q", b"1")
        assert await popped == b"1"  # a blocked pop is served before a wait
        await store.queue_push("q", b"2")
        assert await caller.receive(1) == b"\x00"
        await caller.send(encode(Code.QUEUE_POP, b"/q"))
        assert await caller.receive(17) == struct.pack("<qQ", 1, 1) + b"2"


async def test_client_that_does_not_read_replies_is_not_read_from(server, store, call, eventually):
    await store.set("k", bytes(1 << 20))
    async with call() as caller:
        caller.writer.transport.pause_reading()
        caller.writer.write(encode(Code.GET, b"/k") * 40 + encode(Code.ADD, b"/n", 1))
        await eventually(lambda: any(connection.paused for connection in server.admission.connections))
        (slow,) = [connection for connection in server.admission.connections if connection.paused]
        assert slow.waiting_nbytes < 4 << 20
        assert await store.check(["n"]) is False
        caller.writer.transport.resume_reading()
        for _ in range(40):
            assert len(await caller.receive(8 + (1 << 20))) == 8 + (1 << 20)
        assert await caller.receive(8) == struct.pack("<q", 1)


async def test_client_with_many_requests_is_not_dropped_when_its_wait_ends(
    server, store, call, monkeypatch, eventually
):
    monkeypatch.setattr("asyncdist.store.server.connection.BACKLOG_NBYTES", 1 << 10)
    count, name_nbytes = 1 << 12, 4000
    await asyncio.gather(*(store.set(f"{number:0{name_nbytes}}", b"") for number in range(count)))
    async with call() as caller:
        caller.writer.transport.pause_reading()
        caller.writer.write(encode(Code.WAIT, [b"/late"]) + encode(Code.LIST_KEYS))
        await eventually(lambda: any(connection.paused for connection in server.admission.connections))
        await store.set("late", b"")
        caller.writer.transport.resume_reading()
        listed_nbytes = 8 + count * (8 + 1 + name_nbytes)
        assert (await caller.receive(listed_nbytes + 1))[listed_nbytes:] == STOP_WAITING
    assert server.refusals.count == 0


def test_three_hundred_clients_die_after_a_barrier():
    server = background_loop().run(StoreServer.start("127.0.0.1", 0))
    try:
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(Peer(server.port)) for _ in range(300)]
            for peer in peers:
                peer.send(Code.BARRIER, b"/b", 300)
            assert [peer.reply(Code.BARRIER) for peer in peers] == [0] * 300
    finally:
        background_loop().run(server.close())
    assert server.num_connections == server.state.num_open == 0
