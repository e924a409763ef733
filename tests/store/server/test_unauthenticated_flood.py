"""Floods of unauthenticated or silent connections: the server keeps serving authenticated clients."""

import asyncio
import contextlib
import gc
import socket
import struct
from pathlib import Path

import pytest

from asyncdist.config import Config
from asyncdist.net.security.auth import MAGIC
from asyncdist.store import AsyncStore, StoreServer

TOKEN = "a token for tests"
LONG = 60.0
TLS = Path(__file__).parents[2] / "tls"
FILES = {"tls_cert": str(TLS / "member.crt"), "tls_key": str(TLS / "member.key"), "tls_ca": str(TLS / "ca.crt")}
SAYINGS = [b"", MAGIC[:4], MAGIC + bytes(32), b"\x00\xce\xf7", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n" * 5]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_flood_of_unauthenticated_connections(tls):
    config = Config(store_max_connections=40, handshake_timeout=1000.0, store_reconnect=0.0, **(FILES if tls else {}))
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config) as server:

        async def connect() -> AsyncStore:
            return await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=LONG, config=config)

        strangers: list[socket.socket] = []

        async def flood() -> None:
            while True:
                sock = socket.create_connection(("127.0.0.1", server.port))
                strangers.append(sock)
                if len(strangers) > 200:
                    strangers[-200].close()
                with contextlib.suppress(OSError):
                    sock.sendall(SAYINGS[len(strangers) % len(SAYINGS)])
                await asyncio.sleep(0)

        first = await connect()
        flooding = asyncio.ensure_future(flood())
        try:
            for number in range(20):
                assert await asyncio.wait_for(first.add("n", 1), LONG) == 2 * number + 1
                async with await asyncio.wait_for(connect(), LONG) as store:
                    assert await asyncio.wait_for(store.add("n", 1), LONG) == 2 * number + 2
            assert len(strangers) > 40
        finally:
            flooding.cancel()
            await asyncio.wait([flooding])
            for sock in strangers:
                sock.close()
            await first.close()
        assert server.num_connections <= 40


async def test_authenticated_client_is_not_evicted(eventually):
    config = Config(store_max_connections=3, store_reconnect=0.0)
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config) as server:
        stores = [
            await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, timeout=LONG, config=config)
            for _ in range(3)
        ]
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(LONG)
            await eventually(lambda: server.refusals.count == 1)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(stranger.recv, 1) == b""
        for store in stores:
            assert await store.check(["k"]) is False
            await store.close()


@pytest.mark.parametrize("said", [b"\x16\x03\x01", b"\x00\xce\xf7"], ids=["tls", "plain"])
async def test_reset_connections_are_counted_without_a_traceback(caplog, eventually, said):
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=Config(**FILES)) as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(said)
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await eventually(lambda: server.refusals.count == 20 or "never retrieved" in caplog.text)
        gc.collect()
        assert server.refusals.count == 20
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_refusals_of_many_connections_are_logged_together(caplog, eventually, tls):
    async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=Config(**FILES if tls else {})) as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.sendall(b"\x16" * 200)
                await eventually(lambda: _has_ended(stranger))
        assert server.refusals.count == 20
        assert caplog.text.count("the store refused 127.0.0.1:") == 1
    assert caplog.text.count("the store refused 19 connections") == 1
    assert len(caplog.messages) == 2


def _has_ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        while sock.recv(1 << 10):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True
