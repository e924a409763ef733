"""Chunked messages are sent in order, one chunk per iteration of the loop, while the socket accepts them."""

import asyncio

import pytest

from asyncdist.store.protocol.chunk_sender import ChunkSender
from asyncdist.store.protocol.chunking import PIECE_NBYTES, ChunkedMessage, request_piece
from asyncdist.store.protocol.codec import Encoder, framed
from asyncdist.store.protocol.operations import Op


def long_message(request: int) -> ChunkedMessage:
    """Return a message of three chunks."""
    return ChunkedMessage(Encoder().pack, (request, Op.SET, "key", bytes(3 * PIECE_NBYTES)), request_piece)


def frames_of(message: ChunkedMessage) -> list[bytes]:
    return [framed([part]) for part in message]


@pytest.fixture
def written() -> list[bytes]:
    return []


async def test_messages_are_sent_in_order_one_chunk_per_iteration(written):
    turns: list[int] = []
    done: list[int] = []
    sender = ChunkSender(written.append, lambda request: True, asyncio.get_running_loop().call_soon)
    for request in (1, 2):
        sender.send(long_message(request), lambda sent: done.append(sent.request))
    assert sender.nbytes_under_way == len(long_message(1))
    for _ in range(9):
        turns.append(len(written))
        await asyncio.sleep(0)
    assert turns == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert not sender.busy
    assert written == frames_of(long_message(1)) + frames_of(long_message(2))
    assert done == [1, 2]
    assert sender.nbytes_under_way == 0


async def test_paused_sender_sends_nothing(written):
    sender = ChunkSender(
        lambda frame: (written.append(frame), sender.pause()),
        lambda request: True,
        asyncio.get_running_loop().call_soon,
    )
    sender.send(long_message(1))
    for count in range(1, 5):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(written) == count
        sender.resume()
    assert not sender.busy


async def test_cancelled_message_is_abandoned_or_never_begun(written):
    wanted, done = {1, 2, 3}, []
    sender = ChunkSender(written.append, wanted.__contains__, asyncio.get_running_loop().call_soon)
    for request in (1, 2, 3):
        sender.send(long_message(request), lambda sent: done.append(sent.request))
    await asyncio.sleep(0)
    wanted -= {1, 2}
    for _ in range(6):
        await asyncio.sleep(0)
    assert not sender.busy
    abandoned = long_message(1)
    first = framed([next(abandoned)])
    assert written == [first, framed([abandoned.abandoned()]), *frames_of(long_message(3))]
    assert done == [1, 2, 3]


async def test_dropped_sender_sends_nothing(written):
    sender = ChunkSender(written.append, lambda request: True, asyncio.get_running_loop().call_soon)
    sender.send(long_message(1))
    sender.drop()
    await asyncio.sleep(0)
    assert not written
    assert not sender.busy
