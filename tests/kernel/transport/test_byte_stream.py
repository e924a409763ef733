"""A message that is read without a posted receive, and arrives in parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncdist.config import Config
from asyncdist.kernel.transport.matching import MatchingQueue, Receive
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES, pack_header, pack_key
from asyncdist_transports.byte_stream import Ended, Reader

KEY, OTHER = pack_key(1, 2, 0), pack_key(1, 3, 0)
BODY = bytes(range(200)) * 3
SIZE = len(BODY)
FRAME = pack_header(KEY, 7, len(BODY)) + BODY
NEXT = pack_header(OTHER, 7, 4) + b"next"


class Stream:
    """A source to which the test adds bytes. After them it has no byte, an error, or an end."""

    def __init__(self):
        self.chunks, self.then = [], BlockingIOError()

    def recvmsg_into(self, buffers):
        if not self.chunks:
            if self.then is None:
                return (0,)
            raise self.then
        chunk, count = self.chunks.pop(0), 0
        for buffer in buffers:
            part = chunk[count : count + len(buffer)]
            buffer[: len(part)] = part
            count += len(part)
        if count < len(chunk):
            self.chunks.insert(0, chunk[count:])
        return (count,)

    def recv_into(self, buffer, nbytes):
        return self.recvmsg_into((buffer[:nbytes] if nbytes else buffer,))[0]


class Host:
    config = Config()
    expects_anybody = False

    def unclaimed(self, peer, key, fingerprint, nbytes):
        return None


class Side:
    """A stream, its reader, and the memory into which the test reads."""

    def __init__(self):
        self.stream = Stream()
        self.inbox = MatchingQueue(1, Host())
        self.reader = Reader(self.stream, 1, Host(), self.inbox)
        self.room = bytearray(len(BODY))

    def take(self, *chunks, header=FRAME[:HEADER_NBYTES], tries=1):
        self.stream.chunks += chunks
        return self.reader.take(header, memoryview(self.room), tries)

    def receive(self, key=KEY, nbytes=SIZE):
        """Post a receive, read, and return the memory of the receive if it has been filled."""
        room, finished = bytearray(nbytes), []
        owner = SimpleNamespace(transferred=lambda: finished.append(True))
        self.inbox.post(Receive(1, key, 7, memoryview(room), owner))
        self.reader.read()
        return bytes(room) if finished else None


@pytest.fixture
def side():
    return Side()


CUTS = [1, HEADER_NBYTES - 1, HEADER_NBYTES, HEADER_NBYTES + 1, len(FRAME) - 1]


def test_whole_message_is_taken_and_the_next_one_stays(side):
    assert side.take(FRAME + NEXT)
    assert side.room == BODY
    assert (side.reader.taken, side.reader.backlogged) == (0, False)
    assert side.receive(OTHER, 4) == b"next"


@pytest.mark.parametrize("cut", CUTS[2:])
def test_message_in_parts_is_taken_by_several_calls(side, cut):
    assert side.take(FRAME[:cut]) is None
    assert side.reader.taken == cut
    assert side.take() is None
    assert side.take(FRAME[cut:], NEXT)
    assert side.room == BODY
    assert side.receive(OTHER, 4) == b"next"


def test_each_part_gives_the_next_one_as_many_tries(side):
    parts = [FRAME[at : at + 100] for at in range(0, len(FRAME), 100)]
    assert side.take(*parts, tries=1)
    assert side.room == BODY


@pytest.mark.parametrize("cut", CUTS)
def test_part_of_a_message_leaves_the_memory_of_a_group_that_ends(side, cut):
    side.inbox.source = side.reader
    assert not side.take(FRAME[:cut])
    side.inbox.purge(KEY[:8])
    side.room[:] = bytes(SIZE)
    side.stream.chunks += [FRAME[cut:], NEXT]
    assert side.receive() == BODY
    assert side.receive(OTHER, 4) == b"next"
    assert side.room == bytes(SIZE)


@pytest.mark.parametrize("cut", CUTS)
def test_posted_receive_gets_a_message_of_which_a_part_was_taken(side, cut):
    assert not side.take(FRAME[:cut])
    side.stream.chunks += [FRAME[cut:], NEXT]
    assert side.receive() == BODY
    assert side.receive(OTHER, 4) == b"next"
    assert side.reader.taken == 0


@pytest.mark.parametrize("cut", [*CUTS, len(FRAME), len(FRAME) + 10])
def test_other_message_goes_to_its_receive(side, cut):
    stream = FRAME + NEXT
    side.stream.chunks += [stream[:cut], stream[cut:]] if cut < len(stream) else [stream]
    other = pack_header(OTHER, 7, len(BODY))
    assert side.reader.take(other, memoryview(side.room), 1) is False
    assert side.receive() == BODY
    assert side.receive(OTHER, 4) == b"next"


def test_call_with_another_header_gives_a_taken_part_back(side):
    assert side.take(FRAME[:300]) is None
    assert side.take(header=pack_header(OTHER, 7, len(BODY))) is False
    side.stream.chunks += [FRAME[300:]]
    assert side.receive() == BODY


@pytest.mark.parametrize("then", [None, ConnectionResetError("reset")], ids=["end", "error"])
def test_end_of_the_stream_in_a_message_is_reported_by_the_next_read(side, then):
    assert side.take(FRAME[:300]) is None
    side.stream.then = then
    assert side.take() is False
    with pytest.raises(Ended):
        side.receive()


@pytest.mark.parametrize("short_reads_empty", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_short_read_of_a_socket_is_the_last_one(cut, short_reads_empty):
    """A socket that returns less than wanted has no more: another read would cost a system call."""
    stream, inbox, room = Stream(), MatchingQueue(1, Host()), bytearray(SIZE)
    reader = Reader(stream, 1, Host(), inbox, short_reads_empty=short_reads_empty)
    inbox.post(Receive(1, KEY, 7, memoryview(room), SimpleNamespace(transferred=lambda: None)))
    stream.chunks = [FRAME[:cut], FRAME[cut:]]
    assert reader.read()
    assert stream.chunks == ([FRAME[cut:]] if short_reads_empty else [])
    assert reader.body_left == (0 if cut < HEADER_NBYTES or not short_reads_empty else len(FRAME) - cut)
    reader.read()
    assert room == BODY


def test_bytes_of_another_message_are_parsed_after_a_short_read():
    """They have left the socket, which is empty and will report nothing."""
    stream, inbox = Stream(), MatchingQueue(1, Host())
    reader = Reader(stream, 1, Host(), inbox, short_reads_empty=True)
    finished = []
    for key, nbytes in ((KEY, SIZE), (OTHER, 4)):
        owner = SimpleNamespace(transferred=lambda key=key: finished.append(key))
        inbox.post(Receive(1, key, 7, memoryview(bytearray(nbytes)), owner))
    stream.chunks = [NEXT]
    assert reader.read()
    assert finished == [OTHER]


@pytest.mark.parametrize("cut", [HEADER_NBYTES, HEADER_NBYTES + 1, len(FRAME) - 1])
def test_abandoned_receive_frees_its_memory_before_the_rest_arrives(side, cut):
    room = bytearray(SIZE)
    receive = Receive(1, KEY, 7, memoryview(room), SimpleNamespace(transferred=lambda: None))
    side.inbox.post(receive)
    side.stream.chunks = [FRAME[:cut]]
    side.reader.read()
    # The traceback of the old one has views of the memory.
    side.stream.then = BlockingIOError()
    receive.abandon()
    # It could not grow if a view of it were left.
    room.append(1)
    side.stream.chunks = [FRAME[cut:], NEXT]
    assert side.receive(OTHER, 4) == b"next"
    assert bytes(room[cut - HEADER_NBYTES : SIZE]) == bytes(SIZE - (cut - HEADER_NBYTES))


def test_bytes_read_ahead_survive_a_failure_of_the_expected_receive():
    """A message of another group has come, and while its header is matched, the expected receive is abandoned."""
    elsewhere = pack_key(9, 1, 0)
    expected = Receive(1, KEY, 7, memoryview(bytearray(SIZE)), SimpleNamespace(transferred=lambda: None))

    class FailingHost(Host):
        def unclaimed(self, peer, key, fingerprint, nbytes):
            expected.abandon()

    stream, inbox = Stream(), MatchingQueue(1, FailingHost())
    reader = Reader(stream, 1, Host(), inbox)
    inbox.post(expected)
    stream.chunks = [pack_header(elsewhere, 7, 4) + b"next"]
    reader.read()
    inbox.purge(KEY[:8])
    taken = bytearray(4)
    inbox.post(Receive(1, elsewhere, 7, memoryview(taken), SimpleNamespace(transferred=lambda: None)))
    reader.read()
    assert taken == b"next"
