"""Parcels go one behind the other, a piece in each turn of the loop, while the socket takes them and they are wanted."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.store.protocol.chunk_sender import ChunkSender
from asyncdist.store.protocol.chunking import PIECE_NBYTES, ChunkedMessage, request_piece
from asyncdist.store.protocol.codec import Encoder, framed
from asyncdist.store.protocol.operations import Op


def parcel(request: int, pieces: int = 3) -> ChunkedMessage:
    return ChunkedMessage(Encoder().pack, (request, Op.SET, "key", bytes(pieces * PIECE_NBYTES)), request_piece)


def frames_of(what: ChunkedMessage) -> list[bytes]:
    return [framed([message]) for message in what]


@pytest.fixture
def written() -> list[bytes]:
    return []


async def test_parcels_go_one_behind_the_other_with_a_turn_for_others_between_pieces(written):
    turns: list[int] = []
    done: list[int] = []
    carrier = ChunkSender(written.append, lambda request: True, asyncio.get_running_loop().call_soon)
    for request in (1, 2):
        carrier.send(parcel(request), lambda sent: done.append(sent.request))
    assert carrier.nbytes_under_way == len(parcel(1))
    for _ in range(9):
        turns.append(len(written))
        await asyncio.sleep(0)
    assert turns == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert not carrier.busy
    assert written == frames_of(parcel(1)) + frames_of(parcel(2))
    assert done == [1, 2]
    assert carrier.nbytes_under_way == 0


async def test_nothing_goes_while_the_socket_takes_no_more(written):
    carrier = ChunkSender(
        lambda frame: (written.append(frame), carrier.pause()),
        lambda request: True,
        asyncio.get_running_loop().call_soon,
    )
    carrier.send(parcel(1))
    for count in range(1, 5):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(written) == count
        carrier.resume()
    assert not carrier.busy


async def test_what_nobody_wants_is_broken_off_or_never_begun(written):
    wanted, done = {1, 2, 3}, []
    carrier = ChunkSender(written.append, wanted.__contains__, asyncio.get_running_loop().call_soon)
    for request in (1, 2, 3):
        carrier.send(parcel(request), lambda sent: done.append(sent.request))
    await asyncio.sleep(0)
    wanted -= {1, 2}
    for _ in range(6):
        await asyncio.sleep(0)
    assert not carrier.busy
    broken_off = parcel(1)
    first = framed([next(broken_off)])
    assert written == [first, framed([broken_off.abandoned()]), *frames_of(parcel(3))]
    assert done == [1, 2, 3]


async def test_nothing_goes_after_the_connection(written):
    carrier = ChunkSender(written.append, lambda request: True, asyncio.get_running_loop().call_soon)
    carrier.send(parcel(1))
    carrier.drop()
    await asyncio.sleep(0)
    assert not written
    assert not carrier.busy
