"""The codec of torch's wire format: valid requests with any split, and malformed input."""

import contextlib
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError
from asyncdist.store.protocol.c10d import (
    MAX_KEY_NBYTES,
    MAX_KEYS,
    Code,
    Decoder,
    RequestCache,
    key_of,
    raw_key,
)
from tests.support.c10d_peer import encode

MOST, LIMIT = 1000, 4000

keys = st.one_of(st.text(max_size=12).map(lambda text: b"/" + text.encode()), st.binary(max_size=12))
values = st.binary(max_size=40)
FIELDS = {
    "u": st.integers(0, (1 << 32) - 1),
    "i": st.integers(-(1 << 63), (1 << 63) - 1),
    "k": keys,
    "v": values,
    "K": st.lists(keys, max_size=4),
    "P": st.dictionaries(keys, values, max_size=4),
}
requests = st.one_of(*(st.tuples(st.just(code), *(FIELDS[kind] for kind in code.shape)) for code in Code))


def decoded(code, *arguments):
    """Return the request as a decoder returns it."""
    if code == Code.MULTI_SET:
        return (code, [key_of(key) for key in arguments[0]], list(arguments[0].values()))
    if arguments and isinstance(arguments[0], list):
        return (code, [key_of(key) for key in arguments[0]])
    if arguments and isinstance(arguments[0], bytes):
        return (code, key_of(arguments[0]), *arguments[1:])
    return (code, *arguments)


def decoder():
    return Decoder(MOST, LIMIT)


def decode(decoder, *pieces):
    """Return the requests in pieces of a stream."""
    found = []
    for piece in pieces:
        decoder.decode(piece, found)
    return found


@given(st.lists(requests, max_size=6), st.data())
def test_any_requests_in_any_pieces(asked, data):
    stream = b"".join(encode(*each) for each in asked)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    parser = decoder()
    found = decode(parser, *(stream[start:end] for start, end in itertools.pairwise([0, *cuts, len(stream)])))
    assert found == [decoded(*each) for each in asked]
    assert not parser.pending
    assert decode(decoder(), *(stream[at : at + 1] for at in range(len(stream)))) == found


@given(st.binary(max_size=200), st.integers(0, 200))
def test_noise_raises_protocol_errors_only(noise, place):
    with contextlib.suppress(ProtocolError):
        decode(decoder(), noise[:place], noise[place:])


TOO_MUCH = {
    "an unknown code": (b"\x13", "0x13"),
    "a key": (b"\x03" + struct.pack("<Q", MAX_KEY_NBYTES + 1), "a key that claims 8193 bytes"),
    "a key among keys": (b"\x06" + struct.pack("<QQ", 1, 1 << 63), "a key that claims"),
    "a value": (b"\x01" + struct.pack("<Q", 2) + b"/k" + struct.pack("<Q", MOST + 1), "STORE_MAX_VALUE_NBYTES"),
    "keys": (b"\x06" + struct.pack("<Q", MAX_KEYS + 1), "about 131073 keys"),
    "all of it": (encode(Code.MULTI_SET, {b"/%d" % number: bytes(900) for number in range(5)}), "4000 bytes"),
}


@pytest.mark.parametrize(("data", "says"), TOO_MUCH.values(), ids=TOO_MUCH)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_length_beyond_a_limit_is_refused_at_once(data, says, piece):
    with pytest.raises(ProtocolError, match=says):
        decode(decoder(), *(data[start : start + piece] for start in range(0, len(data), piece)))


def test_lengths_at_the_limits_are_accepted():
    key, value = b"/" + b"k" * (MAX_KEY_NBYTES - 1), bytes(MOST)
    parser = Decoder(MOST, 1 << 30)
    assert decode(parser, encode(Code.SET, key, value)) == [(Code.SET, key_of(key), value)]
    many = [b"/k"] * MAX_KEYS
    assert decode(parser, encode(Code.WAIT, many)) == [(Code.WAIT, ["k"] * MAX_KEYS)]


def test_requests_before_a_malformed_one_are_returned():
    found = []
    with pytest.raises(ProtocolError):
        decoder().decode(encode(Code.SET, b"/k", b"v") + encode(Code.GET, b"/k") + b"\x77" + bytes(50), found)
    assert found == [(Code.SET, "k", b"v"), (Code.GET, "k")]


@given(keys, keys)
def test_keys_stay_apart_and_come_back(first, second):
    assert raw_key(key_of(first)) == first
    assert (key_of(first) == key_of(second)) == (first == second)


@given(st.text())
def test_every_store_key_has_a_torch_key(key):
    assert isinstance(raw_key(key), bytes)
    if not key.startswith("\x00"):
        assert raw_key(key) == b"/" + key.encode()
        assert key_of(raw_key(key)) == key


def remembering(code):
    """Return a maker of functions that return the request's code and arguments."""
    return lambda *arguments: lambda: (code, *arguments)


ANSWERS = {code: remembering(code) for code in (Code.GET, Code.ADD, Code.WAIT, Code.CHECK)}


@given(st.lists(requests, min_size=1, max_size=2), st.integers(0, 3))
def test_cached_request_equals_the_decoded_one(asked, missing):
    data = b"".join(encode(*each) for each in asked)
    data = data[: len(data) - missing]
    cache = RequestCache(ANSWERS)
    for _ in range(2):
        request = cache[data]()
        if request is not None:
            assert decode(decoder(), data) == [request]
    assert cache[encode(Code.GET, b"/k")]() == (Code.GET, "k")
    assert cache[encode(Code.WAIT, [b"/k"])]() == (Code.WAIT, ["k"])


def test_other_bytes_than_one_short_request_are_not_cached():
    cache = RequestCache(ANSWERS)
    once = encode(Code.GET, b"/k")
    for data in (b"", once[:-1], once * 2, encode(Code.SET, b"/k", b"v"), encode(Code.GET, b"/" + bytes(1000))):
        assert cache[data]() is None
    assert not cache


def test_cache_is_bounded():
    cache = RequestCache(ANSWERS)
    for number in range(10_000):
        assert cache[encode(Code.ADD, b"/%d" % number, 1)]() == (Code.ADD, str(number), 1)
    assert 0 < len(cache) <= 1024
