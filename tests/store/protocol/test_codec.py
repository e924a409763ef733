"""The wire format with any split of the stream, and malformed input, which raises only ProtocolError."""

import contextlib
import itertools
import struct

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError, UsageError
from asyncdist.net.connection.frames import HEADER, HEADER_NBYTES, SHORT
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.client_protocol import ClientProtocol
from asyncdist.store.protocol.codec import (
    TOGETHER_NBYTES,
    VERSION,
    decode_answer,
    decode_hello,
    decode_request,
    framed,
    hello,
    messages_in,
    packer,
)
from asyncdist.store.protocol.operations import FLAG, KEY, KEYS, NUMBER, VALUE, VALUES, Op, OperationKind
from tests.support.received_messages import ReceivedMessages, frame_of

LIMIT = 1000

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(1 << 63), (1 << 63) - 1)
arguments = {
    KEY: texts,
    KEYS: st.lists(texts, max_size=5),
    VALUE: st.binary(max_size=50),
    VALUES: st.lists(st.binary(max_size=50), max_size=5),
    NUMBER: numbers,
    FLAG: st.booleans(),
}
requests = st.one_of(
    *(st.tuples(st.integers(0, 1 << 63), st.just(op), st.tuples(*(arguments[kind] for kind in op.kinds))) for op in Op)
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def frames_in(data: bytes) -> list[bytes]:
    """Return the bodies of short frames."""
    found = []
    while data:
        nbytes, kind, *_ = HEADER.unpack_from(data)
        assert kind == SHORT
        found.append(data[HEADER_NBYTES : HEADER_NBYTES + nbytes])
        data = data[HEADER_NBYTES + nbytes :]
    return found


def requests_in(frame: bytes) -> list[object]:
    return [decode_request(message) for message in messages_in(frame)]


@given(st.lists(requests, max_size=8), st.lists(st.integers(0, 1 << 16), max_size=30))
def test_requests_arrive_from_any_split(sent, cuts):
    received = ReceivedMessages()
    data = b"".join(frame_of(number, op, *args) for number, op, args in sent)
    for piece in split(data, cuts):
        received.inbox.feed(piece)
    assert list(map(decode_request, received.messages)) == sent
    assert received.inbox.is_between_messages


results = st.one_of(st.none(), st.booleans(), numbers, st.binary(max_size=50), st.lists(st.binary(), max_size=5))
answers = st.one_of(
    st.tuples(st.integers(0, 1 << 63), st.just(OperationKind.RESULT), results),
    st.tuples(st.integers(0, 1 << 63), st.just(OperationKind.PUBLISHED), st.binary(max_size=50)),
)


@given(st.lists(answers, min_size=1, max_size=3))
def test_answers_split_at_every_place(sent):
    data = hello(LIMIT) + b"".join(frame_of(*answer) for answer in sent)
    for place in range(len(data) + 1):
        received = ReceivedMessages()
        received.inbox.feed(data[:place])
        received.inbox.feed(data[place:])
        greeting, *got = [tuple(decode_answer(message)) for message in received.messages]
        assert greeting == (0, 3, [VERSION, LIMIT])
        assert got == sent
        assert received.inbox.is_between_messages


@pytest.mark.parametrize("version", [3, VERSION + 1])
def test_store_of_another_version_is_named(version):
    """Version 3 had frames with a length of 8 bytes."""
    body = packer()((0, 3, (version, LIMIT)))
    protocol = ClientProtocol("there")
    with pytest.raises(ProtocolError, match=f"speaks version {version} .* version {VERSION}: run the same asyncdist"):
        protocol.receive(struct.pack("<Q", len(body)) + body)
    assert hello(LIMIT)[:8] == struct.pack("<Q", len(hello(LIMIT)) - 8)


def test_hello_is_decoded():
    assert decode_hello(hello(LIMIT)[8:], "there") == LIMIT
    with pytest.raises(ProtocolError, match="did not begin with a hello"):
        decode_hello(packer()((1, OperationKind.RESULT, b"v")), "there")


@given(st.lists(requests, min_size=1, max_size=20))
def test_requests_in_one_frame(sent):
    (frame,) = frames_in(framed([packer()((number, op, *args)) for number, op, args in sent]))
    assert requests_in(frame) == sent


def test_frame_of_several_messages_is_bounded():
    messages = [packer()((number, Op.SET, "k", bytes(20_000))) for number in range(10)]
    messages.insert(4, packer()((0, Op.SET, "k", bytes(2 * TOGETHER_NBYTES))))
    frames = frames_in(framed(messages))
    assert b"".join(frames) == b"".join(messages)
    assert [len(requests_in(frame)) for frame in frames] == [3, 1, 1, 3, 3]


@given(st.lists(requests, min_size=1, max_size=4), st.data())
def test_frame_whose_last_message_is_cut_short_is_refused(sent, data):
    messages = [packer()((number, op, *args)) for number, op, args in sent]
    cut = data.draw(st.integers(1, len(messages[-1]) - 1))
    with pytest.raises(ProtocolError):
        messages_in(b"".join(messages)[:-cut])


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
def test_noise_raises_protocol_error_only(data, cuts):
    received = ReceivedMessages(LIMIT)
    with contextlib.suppress(ProtocolError):
        for piece in split(data, cuts):
            received.inbox.feed(piece)
        list(map(decode_request, received.messages))


anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | texts | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(anything)
@example([0, 0, None])
def test_msgpack_that_is_not_a_message_is_refused(value):
    for decode in (decode_request, decode_answer):
        try:
            message = decode(value)
        except ProtocolError:
            continue
        # The first field of a request and of an answer is the number of the request.
        assert isinstance(message[0], int)


@given(st.sampled_from(Op), st.lists(anything, max_size=4))
def test_arguments_of_wrong_types_are_refused(op, args):
    try:
        (request,) = requests_in(msgpack.packb([1, op, *args]))
    except ProtocolError:
        return
    python_types = {KEY: str, VALUE: bytes, NUMBER: int, FLAG: bool, KEYS: list, VALUES: list}
    assert [type(arg) for arg in request.args] == [python_types[kind] for kind in op.kinds]


@pytest.mark.parametrize("before", [b"", frame_of(1, Op.NUM_KEYS)])
@pytest.mark.parametrize("claimed", [1 << 20, (1 << 32) - 1])
def test_length_beyond_the_limit_is_refused_before_its_frame_arrives(before, claimed):
    with pytest.raises(ProtocolError, match=str(claimed)):
        ReceivedMessages().inbox.feed(before + HEADER.pack(claimed, SHORT, 0, 0))


@pytest.mark.parametrize("bomb", [b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc1", b""])
def test_malicious_msgpack_is_refused(bomb):
    with pytest.raises(ProtocolError):
        requests_in(bomb)


@pytest.mark.parametrize(
    "make",
    [
        lambda: operations.get(b"\xff"),
        lambda: operations.set_("k", 5),
        lambda: operations.set_("\udc80", b""),
        lambda: operations.set_("k", "\udc80"),
        lambda: operations.command(operations.Op.WAIT, "not a list"),
        lambda: operations.command(operations.Op.WAIT, ["a", 1]),
        lambda: operations.add("k", 1.5),
        lambda: operations.add("k", True),
        lambda: operations.add("k", 1 << 63),
        lambda: operations.barrier("k", 0),
        lambda: operations.multi_set(["a", "b"], ["1"]),
    ],
)
def test_wrong_arguments_are_usage_errors(make):
    with pytest.raises(UsageError):
        make()


def test_command_under_a_prefix():
    assert operations.multi_set(["a", "b"], ["1", "2"]).under("p/").args == (["p/a", "p/b"], [b"1", b"2"])
    assert operations.command(operations.Op.NUM_KEYS).under("p/").args == ()
    assert operations.command(operations.Op.COMPARE_SET, "a", "x", "y").under("p/").keys == ("p/a",)
