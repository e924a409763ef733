"""Conversations over a socket whose bytes a coroutine awaits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncdist.config import Config
from asyncdist.errors import ProtocolError
from asyncdist.net import LoopSocket, Security, accept, dial_tcp, listen_tcp, rank_contexts
from asyncdist.net.loop_socket import ready

TLS = Path(__file__).parent.parent / "tls"
CONFIG = Config(tls_cert=str(TLS / "member.crt"), tls_key=str(TLS / "member.key"), tls_ca=str(TLS / "ca.crt"))

each_carrier = pytest.mark.parametrize("tls", [False, True], ids=["tcp", "tls"])


@contextlib.asynccontextmanager
async def conversation(tls: bool = False) -> AsyncIterator[tuple[LoopSocket, LoopSocket]]:
    """Yield the two ends of a connection."""
    security = Security("token", "test", *((rank_contexts(CONFIG) or ()) if tls else ()))

    async def accepted() -> LoopSocket:
        await ready(listening)
        return await accept(listening.accept()[0], security)

    with listen_tcp("127.0.0.1") as listening:
        ends = await asyncio.gather(dial_tcp(*listening.getsockname(), security), accepted())
    with contextlib.closing(ends[0]), contextlib.closing(ends[1]):
        yield ends


@pytest.mark.each_loop
@each_carrier
async def test_answers_follow_their_questions(tls):
    async with conversation(tls) as (asking, answering):
        for question in ({1: "one"}, b"x" * (3 << 20), None):
            answer = asyncio.ensure_future(asking.ask(question))
            assert await answering.receive_message(4 << 20) == question
            await answering.send_message([question])
            assert await answer == [question]


@pytest.mark.parametrize(
    ("sent", "says"),
    [(b"\x65\x00\x00\x00", "a message of 101 bytes where at most 100"), (b"\x01\x00\x00\x00\xc1", "is not legible")],
)
async def test_message_that_is_too_long_or_no_data_is_refused(sent, says):
    async with conversation() as (near, far):
        await near.send(sent)
        with pytest.raises(ProtocolError, match=says):
            await far.receive_message(100)


@pytest.mark.each_loop
@each_carrier
async def test_coroutine_that_waits_is_told_of_the_end(tls):
    async with conversation(tls) as (near, far):
        receiving, sending = [asyncio.ensure_future(each) for each in (near.receive(1), far.send(bytes(64 << 20)))]
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        far.close()
        far.close()
        with pytest.raises((EOFError, OSError)):
            await sending
        with pytest.raises((EOFError, OSError)):
            await near.receive(64 << 20)


async def test_end_of_the_other_side_in_the_middle_of_a_message_is_no_message():
    async with conversation() as (near, far):
        await near.send(b"\x05\x00\x00\x00\x01")
        near.sock.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError, match="the other side closed the connection"):
            await far.receive_message(100)
