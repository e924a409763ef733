"""TLS at the store and between ranks: only certificates of the job's authority are accepted.

The certificates in tests/tls are for tests only and valid for a hundred years. The authorities' keys were deleted.
"""

import asyncio
import contextlib
import itertools
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import AuthenticationError, CertificateError, PeerLostError, ProtocolError, StoreError, UsageError
from asyncdist.kernel.engine.work import Work
from asyncdist.net.security.tls import TlsSocket, client_context, rank_contexts, server_context
from asyncdist.store import AsyncStore, StoreServer, TCPStore
from asyncdist.store.protocol.c10d import Code
from asyncdist.testing.cluster import world_of
from asyncdist_transports.tcp.connection import Outbound
from tests.support.c10d_peer import Peer

FILES = Path(__file__).parents[1] / "tls"
TOKEN = "a token for tests"
LONG = 60.0


def config(name: str | None = "member", ca: str | None = "ca", **options) -> Config:
    files = {
        "tls_cert": str(FILES / f"{name}.crt") if name else None,
        "tls_key": str(FILES / f"{name}.key") if name else None,
        "tls_ca": str(FILES / f"{ca}.crt") if ca else None,
    }
    return Config(**files, **{"token": TOKEN, "store_reconnect": 0.0, **options})


# -- the store --------------------------------------------------------------------------------------


async def connect(server: StoreServer, settings: Config, timeout: float = LONG) -> AsyncStore:
    return await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=timeout, config=settings)


@pytest.mark.each_loop
async def test_store_over_tls():
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config()) as server:
        async with await connect(server, config()) as store:
            await store.set("k", b"v" * 1_000_000)
            assert await store.get("k") == b"v" * 1_000_000
            assert await asyncio.gather(*(store.add("n", 1) for _ in range(1000))) == list(range(1, 1001))

        def blocking() -> None:
            with TCPStore("127.0.0.1", server.port, timeout=LONG, config=config()) as store:
                assert store.get("k") == b"v" * 1_000_000
                store.set("l", b"w" * 3_000_000)
                assert store.get("l") == b"w" * 3_000_000

        await asyncio.to_thread(blocking)


async def test_threads_share_a_tls_connection():
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config()) as server:

        def shared() -> None:
            with (
                TCPStore("127.0.0.1", server.port, timeout=LONG, config=config()) as store,
                ThreadPoolExecutor(8) as threads,
            ):

                def write(number: int) -> None:
                    store.add("n", 1)
                    store.set(f"k{number}", b"v" * 50_000)

                assert list(threads.map(write, range(200))) == [None] * 200
                assert store.add("n", 0) == 200

        await asyncio.to_thread(shared)


UNTRUSTED = {
    "no certificate": (config(None), "required|unknown|handshake|did.not.return"),
    "certificate of another authority": (config("stranger"), "unknown|verify|CA"),
    "trusts another authority": (config(ca="other-ca"), "verif|certificate"),
}


@pytest.mark.each_loop
@pytest.mark.exhaustive
@pytest.mark.parametrize("client", UNTRUSTED)
async def test_client_without_a_valid_certificate_is_refused(client, caplog, eventually):
    settings, reason = UNTRUSTED[client]
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config()) as server:
        # If the store refuses, its log has the reason; the client may see only that the connection was closed.
        with pytest.raises((AuthenticationError, StoreError)) as refused:
            await connect(server, settings, timeout=1.0)
        expected = re.compile(f"(?i)the TLS handshake with the other side failed .*({reason})")
        await eventually(lambda: expected.search(f"{caplog.text} {refused.value}"))
        with pytest.raises((AuthenticationError, StoreError)):
            await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=0.5, config=settings)
        async with await connect(server, config()) as store:  # other clients are served
            await store.set("k", b"v")


@pytest.mark.each_loop
@pytest.mark.exhaustive
@pytest.mark.parametrize("client", ["no certificate", "certificate of another authority"])
async def test_untrusted_client_stops_retrying(client):
    """The client's side of the handshake is complete before the store has seen its certificate."""
    settings, _ = UNTRUSTED[client]
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config()) as server:
        with pytest.raises(CertificateError, match="hung up after the handshake, 8 times in a row"):
            await connect(server, settings, timeout=60.0)
        with pytest.raises(CertificateError, match="hung up after the handshake, 8 times in a row"):
            await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=60.0, config=settings)


async def test_closed_connections_are_retried(monkeypatch):
    """A store closes its connections when it ends, and another store may take its place."""
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config()) as server:
        dialled = 0
        original_admit = server.admission.admit

        def admit(connection):
            nonlocal dialled
            dialled += 1
            return dialled % 4 == 0 and original_admit(connection)

        monkeypatch.setattr(server.admission, "admit", admit)
        async with await connect(server, config()) as store:
            await store.set("k", b"v")
        await asyncio.to_thread(lambda: TCPStore("127.0.0.1", server.port, timeout=LONG, config=config()).close())
        assert dialled == 8


@pytest.mark.each_loop
async def test_certificate_for_another_name_is_refused():
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config("elsewhere", None)) as server:
        with pytest.raises(AuthenticationError, match="IP address mismatch"):
            await connect(server, config(None))
        async with await connect(server, config(None, tls_check_hostname=False)) as store:
            await store.set("k", b"v")


@pytest.mark.each_loop
async def test_plain_clients_are_refused_except_local_c10d_clients(caplog):
    settings = config(store_c10d="loopback")
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=settings) as server:
        plain = Config(token=TOKEN, store_reconnect=0.0)
        with pytest.raises(ProtocolError, match="the store requires TLS: set ASYNCDIST_TLS_CA"):
            await connect(server, plain)
        with pytest.raises(ProtocolError, match="the store requires TLS: set ASYNCDIST_TLS_CA"):
            await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=LONG, config=plain)
        assert "a connection without TLS: set ASYNCDIST_TLS_CA in its process" in caplog.text
        assert "ASYNCDIST_TOKEN" not in caplog.text

        def c10d_client() -> None:
            with Peer(server.port) as peer:
                assert peer.ask(Code.ADD, b"/n", 2) == 2

        await asyncio.to_thread(c10d_client)
        assert server.state.keys.peek("n") == b"2"


@pytest.mark.each_loop
async def test_silent_connections_block_no_client_and_are_dropped():
    settings = config(handshake_timeout=0.3)
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=settings) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        begun = socket.create_connection(("127.0.0.1", server.port))
        begun.sendall(b"\x16\x03\x01")
        async with await connect(server, config()) as store:
            assert await store.add("n", 1) == 1
        for sock in [*silent, begun]:
            sock.settimeout(LONG)
            assert await asyncio.to_thread(_ended, sock)
            sock.close()


def _ended(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(100):
            pass
    return True


def test_unusable_certificate_files_raise_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"ASYNCDIST_TLS_CERT.*No such file"):
        server_context(config("absent"))
    (tmp_path / "ca").write_text("no certificate")
    with pytest.raises(UsageError, match="ASYNCDIST_TLS_CA"):
        client_context(Config(tls_ca=str(tmp_path / "ca")))
    with pytest.raises(UsageError, match="this server has no certificate"):
        server_context(config(None))
    assert client_context(Config()) is None
    assert rank_contexts(config(None)) is None


# -- ranks ------------------------------------------------------------------------------------------


async def all_reduce(groups, count: int) -> None:
    size = len(groups)
    tensors = [torch.full((count,), float(rank + 1)) for rank in range(size)]
    await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
    assert all(torch.equal(tensor, torch.full((count,), size * (size + 1) / 2)) for tensor in tensors)


@pytest.mark.parametrize("size", [2, 3])
async def test_ranks_over_tls(size):
    async with world_of(size, transport="tcp", config=config()) as groups:
        for count in (0, 1, 1000, 3_000_000):
            await all_reduce(groups, count)


@pytest.mark.parametrize(("name", "checks"), [("member", True), ("elsewhere", False), ("elsewhere", True)])
async def test_tls_check_ranks_refuses_a_certificate_for_another_address(name, checks):
    settings = config(name, tls_check_hostname=False, tls_check_ranks=checks)
    refused = pytest.raises(PeerLostError, match="IP address mismatch")
    with refused if (name, checks) == ("elsewhere", True) else contextlib.nullcontext():
        async with world_of(2, transport="tcp", config=settings) as groups:
            await all_reduce(groups, 4)


async def fill(groups) -> list[Work]:
    """Send from rank 1 to rank 0, which posts no receive, until rank 1 holds a TLS record; return the complete sends."""
    (tcp,) = groups[1].endpoint.transport_selector.transports
    sends = []
    while not any(connection.unsent for connection in tcp.connections.values() if isinstance(connection, Outbound)):
        sends.append(groups[1].send(torch.full((4000,), float(len(sends))), 0, tag=1))
        await asyncio.sleep(0)
    return [send for send in sends if send.is_completed()]


async def test_last_bytes_of_a_rank_that_leaves_arrive():
    async with world_of(2, transport="tcp", config=config(aside_nbytes=1 << 16)) as groups:
        await all_reduce(groups, 4)
        complete = await fill(groups)
        leaving = asyncio.create_task(groups[1].world.close())
        await asyncio.sleep(0)
        received = [torch.zeros(4000) for _ in complete]
        await asyncio.gather(*[groups[0].recv(tensor, 1, tag=1) for tensor in received])
        assert [tensor[-1].item() for tensor in received] == list(range(len(complete)))
        await leaving


async def test_rank_leaves_while_it_connects():
    async with world_of(2, transport="tcp", config=config()) as groups:
        groups[0].endpoint.progress.submit(lambda: groups[0].endpoint.link(1).open())
        (tcp,) = groups[0].endpoint.transport_selector.transports
        assert [connection.established for connection in tcp.connections.values()] == [False]
        groups[0].world.leave()


async def test_loop_goes_on_while_a_rank_leaves_a_peer_that_does_not_read(monkeypatch):
    async with world_of(2, transport="tcp", config=config(aside_nbytes=1 << 16)) as groups:
        await all_reduce(groups, 4)
        await fill(groups)
        (tcp,) = groups[1].endpoint.transport_selector.transports
        close, turns, turns_before = tcp.close, itertools.count(), []

        async def turn():
            while True:
                next(turns)
                await asyncio.sleep(0)

        def note_turns():
            turns_before.append(next(turns))
            close()

        monkeypatch.setattr(tcp, "close", note_turns)
        turning = asyncio.create_task(turn())
        await groups[1].world.close()
        turning.cancel()
        assert turns_before[0] > 100


def test_unsent_bytes_are_sent_when_the_socket_is_writable():
    near, far = socket.socketpair()
    near.setblocking(False)
    accepting, dialling = rank_contexts(config())
    dialler = TlsSocket(near, dialling, serves=False)
    with ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(accepting.wrap_socket, far, server_side=True)
        while not dialler.secured:
            with contextlib.suppress(BlockingIOError):
                dialler.secure()
        reader = accepted.result()
    data, sent = bytes(range(256)) * 40_000, 0
    while not dialler.unsent:
        sent += dialler.send(memoryview(data)[sent:])
    with pytest.raises(BlockingIOError):
        dialler.send(b"more")
    received = b""
    while len(received) < sent:
        received += reader.recv(1 << 20)
        if dialler.unsent:
            with contextlib.suppress(BlockingIOError):
                dialler.flush()
    assert received == data[:sent]
    dialler.close()
    reader.close()
