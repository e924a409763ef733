"""The sending half of a channel over a socket pair whose other end the test reads."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import pytest

from asyncdist.errors import PeerLostError
from asyncdist.net.connection import frames
from asyncdist.net.connection.messages import OutgoingMessage
from asyncdist.net.connection.outbox import Flushed, Outbox


@pytest.fixture
def pair() -> Iterator[tuple[Outbox, socket.socket]]:
    """An outbox without shared memory, and the socket at which its frames arrive."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    outbox = Outbox(near, most_nbytes=1 << 30)
    yield outbox, far
    outbox.close(PeerLostError("the peer", "the test has ended"))
    near.close()
    far.close()


def add(outbox: Outbox, told: list[OutgoingMessage]) -> OutgoingMessage:
    """Add a message of one part, and note when its sender is told that it is done."""
    message = outbox.add(b"", [memoryview(bytes(frames.CHUNK_NBYTES))])
    assert message is not None
    message.on_done = told.append
    return message


def kinds(received: bytes) -> list[int]:
    """Return the kinds of the frames in what has arrived."""
    found, at = [], 0
    while at < len(received):
        nbytes, kind, _, _ = frames.HEADER.unpack_from(received, at)
        found.append(kind)
        at += frames.HEADER_NBYTES + nbytes
    assert at == len(received)
    return found


def read(sock: socket.socket) -> bytes:
    """Return all that has arrived."""
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := sock.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def read_all(outbox: Outbox, sock: socket.socket) -> bytes:
    """Flush and read in turns until all has been sent."""
    parts = [read(sock)]
    while not outbox.is_empty:
        outbox.flush()
        parts.append(read(sock))
    return b"".join(parts)


def fill(outbox: Outbox, told: list[OutgoingMessage]) -> list[OutgoingMessage]:
    """Add messages until one is sent in part; return all, that one the last but one."""
    messages = []
    while outbox.flush() is not Flushed.BLOCKED:
        messages.append(add(outbox, told))
    messages.append(add(outbox, told))
    return messages


@pytest.mark.parametrize("which", [-2, -1], ids=["in part", "not begun"])
def test_withdrawn_message_leaves_whole_frames(pair, which):
    """The peer gets the rest of a part, and learns of a message of which it does not get all."""
    outbox, far = pair
    told: list[OutgoingMessage] = []
    messages = fill(outbox, told)
    for _ in range(2):
        outbox.withdraw(messages[which])
    received = kinds(read_all(outbox, far))
    assert received.count(frames.CHUNK) == len(messages) - (which == -1)
    assert received.count(frames.WITHDRAWN) == (which == -1)
    assert sorted(map(id, told)) == sorted(map(id, messages))


def test_message_that_a_heartbeat_has_completed_is_withdrawn_without_a_word(pair):
    outbox, far = pair
    told: list[OutgoingMessage] = []
    messages = fill(outbox, told)
    received = read(far)
    outbox.pulse()
    outbox.withdraw(messages[-2])
    assert told[-1] is messages[-2]
    received += read_all(outbox, far)
    assert frames.WITHDRAWN not in kinds(received)
    assert told == messages


def test_sender_may_withdraw_another_message_when_one_is_done(pair):
    outbox, far = pair
    told: list[OutgoingMessage] = []
    first, second = outbox.add(b"", [memoryview(bytes(40_000))]), outbox.add(b"", [memoryview(bytes(40_000))])
    assert first is not None
    assert second is not None
    first.on_done = lambda _: outbox.withdraw(second)
    second.on_done = told.append
    outbox.flush()
    assert told == [second]
    assert frames.WITHDRAWN not in kinds(read_all(outbox, far))


def test_last_part_that_was_cut_off_by_a_broken_connection_has_failed(pair):
    outbox, far = pair
    told: list[OutgoingMessage] = []
    messages = fill(outbox, told)
    del told[:]
    far.close()
    for _ in range(3):
        outbox.flush()
        outbox.pulse()
    error = PeerLostError("the peer", "connection closed")
    outbox.close(error)
    assert set(map(id, told)) == set(map(id, messages[-2:]))
    assert {message.error for message in messages[-2:]} == {error}


def test_nothing_follows_a_frame_that_could_not_be_sent(pair, monkeypatch):
    """The system may refuse a frame of a connection that is not broken: the peer would miss it without a word."""
    outbox, far = pair
    add(outbox, [])

    def refuse(sock, buffers):
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "sendmsg", refuse)
        outbox.flush()
    outbox.add(b"next")
    outbox.flush()
    outbox.pulse()
    far.settimeout(10)
    received = b"".join(iter(lambda: far.recv(1 << 20), b""))
    assert frames.SHORT not in kinds(received)


def test_descriptor_that_cannot_be_duplicated_leaves_none(pair, monkeypatch):
    outbox, far = pair
    duplicate, left = os.dup, iter([True, True])

    def fail_at_the_third(descriptor):
        if next(left, False):
            return duplicate(descriptor)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", fail_at_the_third)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Too many open files"):
        outbox.add(b"", descriptors=[0, 0, 0])
    assert len(os.listdir("/proc/self/fd")) == before
    assert outbox.is_empty
    assert outbox.unsent_nbytes == 0
    outbox.flush()
    assert read(far) == b""
