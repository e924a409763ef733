"""Long messages over a transport: in order, one part in each turn of the loop, while the socket accepts them."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.net.connection.frames import CHUNK, CHUNK_NBYTES, HEADER_NBYTES, NUMBER, OPENING, WITHDRAWN, pack_opening
from asyncdist.net.connection.messages import OutgoingMessage
from asyncdist.net.connection.part_sender import PartSender


class Message(OutgoingMessage):
    """A message of three parts."""

    def __init__(self, number: int, ended: list[int]) -> None:
        super().__init__(number, [memoryview(bytes([number]) * (3 * CHUNK_NBYTES))])
        self.opening = pack_opening(number, b"", [3 * CHUNK_NBYTES])
        self.wanted = True
        self.on_done = lambda message: ended.append(message.number)

    def is_wanted(self) -> bool:
        return self.wanted


class Transport:
    """Notes the kinds of the frames that are written, with the first byte of the message."""

    def __init__(self) -> None:
        self.written: list[tuple[int, ...]] = []
        self.on_write = lambda: None
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def writelines(self, buffers) -> None:
        data, kinds = b"".join(buffers), []
        while data:
            nbytes = HEADER_NBYTES + int.from_bytes(data[:4], "little")
            kinds += [data[4], data[HEADER_NBYTES]]
            assert data[4] != CHUNK or nbytes == HEADER_NBYTES + NUMBER.size + CHUNK_NBYTES
            data = data[nbytes:]
        self.written.append(tuple(kinds))
        self.on_write()


@pytest.fixture
async def transport() -> Transport:
    return Transport()


@pytest.fixture
async def sender(transport) -> PartSender:
    return PartSender(transport, asyncio.get_running_loop().call_soon)


def parts(number: int) -> list[tuple[int, ...]]:
    return [(OPENING, number, CHUNK, number), (CHUNK, number), (CHUNK, number)]


async def test_messages_leave_in_order_one_part_in_each_turn(transport, sender):
    ended: list[int] = []
    messages = [Message(number, ended) for number in (1, 2)]
    for message in messages:
        sender.add(message)
    assert sender.first is messages[0]
    for count in range(7):
        assert len(transport.written) == count
        await asyncio.sleep(0)
    assert transport.written == parts(1) + parts(2)
    assert ended == [1, 2]
    assert sender.first is None


async def test_paused_sender_sends_nothing(transport, sender):
    transport.on_write = sender.pause
    sender.add(Message(1, []))
    for count in range(1, 4):
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(transport.written) == count
        sender.resume()
    assert sender.first is None


async def test_unwanted_message_is_withdrawn_or_never_begins(transport, sender):
    ended: list[int] = []
    messages = [Message(number, ended) for number in (1, 2, 3)]
    for message in messages:
        sender.add(message)
    await asyncio.sleep(0)
    messages[0].wanted = messages[1].wanted = False
    for _ in range(6):
        await asyncio.sleep(0)
    assert transport.written == [parts(1)[0], (WITHDRAWN, 1), *parts(3)]
    assert ended == [1, 2, 3]


async def test_dropped_sender_sends_nothing(transport, sender):
    ended: list[int] = []
    sender.add(Message(1, ended))
    sender.drop()
    await asyncio.sleep(0)
    sender.resume()
    await asyncio.sleep(0)
    assert transport.written == []
    assert ended == []


async def test_interrupt_in_the_middle_of_a_part_ends_the_connection(transport):
    """The peer would wait for the rest of the part, or take the next frame for it."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    scheduled: list[object] = []
    transport.on_write = interrupt
    sender = PartSender(transport, scheduled.append)
    sender.add(Message(1, []))
    with pytest.raises(KeyboardInterrupt):
        scheduled[0]()
    assert transport.is_aborted
