"""The frames of channels, without a channel."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError
from asyncdist.net.connection import frames
from asyncdist.net.connection.frames import BufferCursor

buffers_of = st.lists(st.binary(max_size=40), max_size=6)


@given(st.binary(max_size=40), buffers_of)
def test_short_message_is_read_as_written(head, buffers):
    whole = frames.pack_short(head, [memoryview(each) for each in buffers], 2)
    nbytes, kind, num_descriptors, count = frames.HEADER.unpack_from(whole)
    assert (nbytes, kind, num_descriptors) == (len(whole) - frames.HEADER_NBYTES, frames.SHORT, 2)
    found, views = frames.unpack_short(whole[frames.HEADER_NBYTES :], count)
    assert (found, [bytes(view) for view in views]) == (head, buffers)


@given(st.integers(0, (1 << 32) - 1), st.binary(max_size=40), st.lists(st.integers(0, 1 << 20), max_size=9))
def test_opening_is_read_as_written(number, head, sizes):
    whole = frames.pack_opening(number, head, sizes)
    assert frames.unpack_opening(whole[frames.HEADER_NBYTES :], 1 << 40) == (number, head, tuple(sizes))


@given(buffers_of, st.integers(1, 50), st.integers(1, 4))
def test_cursor_takes_every_byte_once(buffers, most, most_views):
    cursor = BufferCursor([memoryview(each) for each in buffers])
    taken = b""
    while cursor.left:
        views = cursor.take(most, most_views)
        assert 0 < sum(view.nbytes for view in views) <= most
        assert len(views) <= most_views
        taken += b"".join(views)
    assert taken == b"".join(buffers)


@given(st.binary(max_size=60), st.integers(0, 1 << 16))
def test_foreign_bytes_raise_protocol_error_only(body, count):
    for read in (lambda: frames.unpack_short(body, count & 0xFFFF), lambda: frames.unpack_opening(body, 1 << 38)):
        try:
            read()
        except ProtocolError:
            continue


@pytest.mark.parametrize("header", [(1 << 30, 0), (0, 99), (1 << 30, frames.CHUNK), (1 << 31, frames.SHORT)])
def test_header_that_no_sender_makes_is_refused(header):
    with pytest.raises(ProtocolError, match="claims"):
        frames.check_header(*header)


@pytest.mark.parametrize(
    ("body", "says"),
    [(frames.pack_opening(1, b"", [1 << 60])[frames.HEADER_NBYTES :], f"claims {1 << 60} bytes"),
     (struct.pack("<II", 1, 1 << 31), "truncated")],
    ids=["more than the limit", "a count beyond its body"],
)  # fmt: skip
def test_opening_that_no_sender_makes_is_refused(body, says):
    with pytest.raises(ProtocolError, match=says):
        frames.unpack_opening(body, 1 << 38)
