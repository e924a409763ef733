"""Long messages in parts: other messages pass between them, and withdrawn ones leave no memory behind."""

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.base.deadline import Deadline
from asyncdist.config import Config
from asyncdist.errors import ProtocolError, StoreError, StoreTimeoutError
from asyncdist.net.connection.frames import CHUNK, CHUNK_NBYTES, OPENING, SHORT, frame, pack_opening
from asyncdist.net.connection.outbox import Flushed, Outbox
from asyncdist.store import AsyncStore, TCPStore
from asyncdist.store.client.blocking_socket import BlockingSocket
from asyncdist.store.protocol import long_messages
from asyncdist.store.protocol.codec import framed, packer
from asyncdist.store.protocol.long_messages import LONG_NBYTES, LongMessage
from asyncdist.store.protocol.operations import Op
from asyncdist.store.server.session import Session
from tests.support.received_messages import ReceivedMessages
from tests.support.stores import LONG, TOKEN

LARGE_NBYTES = 200 << 20
CONFIG = Config(token=TOKEN)
EACH_KIND = pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
SMALL_STORE = pytest.mark.parametrize("config", [CONFIG.with_(store_max_nbytes=8 << 20)], ids=["8 MiB"])


@pytest.fixture
def config() -> Config:
    return CONFIG


def patterned(nbytes: int) -> bytes:
    """Return bytes that differ between any two chunks."""
    row = b"".join(number.to_bytes(4, "little") for number in range(1 << 12))
    return b"".join(bytes([number % 251]) + row for number in range(nbytes // len(row) + 1))[:nbytes]


# -- the format -------------------------------------------------------------------------------------


def sent(*messages: LongMessage) -> bytes:
    """Return the bytes of messages that are sent one after the other."""
    frames: list[bytes] = []
    outbox = Outbox(Passing(frames.append), in_order=True)
    for message in messages:
        outbox.enqueue(message)
    while outbox.flush() is Flushed.MORE:
        pass
    assert outbox.is_empty
    return b"".join(frames)


class Passing:
    """A socket that takes all, and passes it to a function."""

    def __init__(self, written) -> None:
        self._written = written

    def sendmsg(self, buffers):
        data = b"".join(buffers)
        self._written(data)
        return len(data)

    def send(self, data):
        return self.sendmsg([data])


def long(*fields: object) -> LongMessage:
    return LongMessage(packer(), fields, lambda request: True)


def received(data: bytes, most_nbytes: int = 1 << 30) -> list[object]:
    """Return the messages in bytes, which arrive in several reads."""
    found = ReceivedMessages(most_nbytes)
    for start in range(0, len(data), 100_001):
        found.inbox.feed(data[start : start + 100_001])
    assert found.inbox.is_between_messages
    return found.messages


lengths = st.sampled_from([0, 1, 3, LONG_NBYTES, LONG_NBYTES + 1, CHUNK_NBYTES, 2 * CHUNK_NBYTES, 2 * CHUNK_NBYTES + 1])
fields = st.lists(lengths.map(bytes) | st.lists(lengths.map(bytes), max_size=3) | st.text(max_size=5), max_size=3)


@given(fields)
def test_parts_are_reassembled(content):
    assert received(sent(long(7, Op.SET, *content), long(8, Op.GET, "k"))) == [[7, Op.SET, *content], [8, Op.GET, "k"]]


def test_long_message_without_a_long_value_is_reassembled():
    keys = [f"key {number}" for number in range(100_000)]
    message = long(7, Op.MULTI_SET, keys, [b"x" * 100_000, b"y"])
    assert len(message) > 1_000_000
    assert received(sent(message)) == [[7, Op.MULTI_SET, keys, [b"x" * 100_000, b"y"]]]


def test_more_long_values_than_an_opening_names_are_reassembled(monkeypatch):
    monkeypatch.setattr(long_messages, "_MOST_VALUES", 2)
    values = [bytes([number]) * (LONG_NBYTES + 1) for number in range(4)]
    assert received(sent(long(7, Op.MULTI_SET, [], values))) == [[7, Op.MULTI_SET, [], values]]


@pytest.mark.parametrize(
    ("head", "values"),
    [
        ([], []),
        ([1], []),
        (["1"], [b"\x01"]),
        ([1, [1, Op.NUM_KEYS], [1, Op.NUM_KEYS]], []),
        ([1], [msgpack.packb([1, Op.NUM_KEYS]) * 2]),
        ([1, [1, Op.SET, "k", msgpack.ExtType(1, bytes(4))]], []),
        ([1, [1, Op.SET, "k", msgpack.ExtType(1, bytes([1, 0, 0, 0]))]], [b"x"]),
        ([1, [1, Op.SET, "k", msgpack.ExtType(2, bytes(4))]], [b"x"]),
    ],
)
def test_long_message_that_no_sender_makes_is_refused(head, values):
    data = pack_opening(0, b"".join(map(msgpack.packb, head)), list(map(len, values)))
    if values:
        data += frame(CHUNK, bytes(4) + b"".join(values))
    with pytest.raises(ProtocolError):
        received(data)


def test_long_message_is_bounded():
    message = sent(long(7, Op.SET, "k", bytes(1 << 20)))
    assert len(received(message, 1 << 20)) == 1
    with pytest.raises(ProtocolError, match="ASYNCDIST_STORE_MAX_VALUE_NBYTES"):
        received(message, (1 << 20) - 1)


# -- other messages between the chunks ----------------------------------------------------------------


async def small_requests_during(store: AsyncStore, large: asyncio.Future) -> int:
    """Return how many small requests were answered, one after the other, before a large one was."""
    count = 0
    while not large.done():
        await store.add("n", 1)
        count += 1
    return count


@pytest.mark.exhaustive
async def test_small_requests_pass_while_a_large_value_goes_through(server, store, connect):
    """Each request is answered before all of the value has arrived."""
    other, value = await connect(), patterned(LARGE_NBYTES)
    setting = asyncio.ensure_future(store.set("large", value))
    same, others = await asyncio.gather(small_requests_during(store, setting), small_requests_during(other, setting))
    assert min(same, others) > 20
    getting = asyncio.ensure_future(store.get("large"))
    same, others = await asyncio.gather(small_requests_during(store, getting), small_requests_during(other, getting))
    assert min(same, others) > 20
    assert await getting == value


def test_blocking_socket_sends_queued_requests_between_the_parts_of_a_large_value():
    """A request that another thread queues while a part is written is sent before the next part."""
    near, far = socket.socketpair()
    with near, far:
        blocking, kinds = BlockingSocket(near, None), []

        def written(data: bytes) -> None:
            kinds.append(data[4])
            if len(data) > CHUNK_NBYTES:
                blocking.outbox.enqueue(b"\x01")

        blocking.outbox = Outbox(Passing(written), in_order=True)
        blocking.outbox.enqueue(long(1, Op.SET, "large", bytes(4 * CHUNK_NBYTES)))
        blocking.drain(Deadline.after(LONG))
        assert kinds == [OPENING, SHORT, CHUNK, SHORT, CHUNK, SHORT, CHUNK, SHORT]


def test_deadline_ends_a_blocking_send_whose_socket_takes_every_part_at_once():
    """The next call goes on with the next part."""
    near, far = socket.socketpair()
    with near, far:
        blocking, sent = BlockingSocket(near, None), []
        blocking.outbox = Outbox(Passing(sent.append), in_order=True)
        blocking.outbox.enqueue(long(1, Op.SET, "large", bytes(4 * CHUNK_NBYTES)))
        with pytest.raises(TimeoutError):
            blocking.drain(Deadline.after(0))
        assert 0 < len(b"".join(sent)) < 2 * CHUNK_NBYTES
        assert not blocking.outbox.is_empty
        blocking.drain(Deadline.after(LONG))
        assert blocking.outbox.is_empty
        assert len(b"".join(sent)) > 4 * CHUNK_NBYTES


async def test_deadline_ends_a_blocking_get_whose_socket_is_always_readable(server, monkeypatch):
    store = await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=LONG, config=CONFIG)
    await asyncio.to_thread(store.set, "large", patterned(LARGE_NBYTES // 4))
    waited = []
    with monkeypatch.context() as patched:
        patched.setattr(BlockingSocket, "wait", lambda self, deadline, poll=None: waited.append(deadline))
        store.set_timeout(0.001)
        with pytest.raises(StoreTimeoutError):
            await asyncio.to_thread(store.get, "large")
    assert waited
    store.set_timeout(LONG)
    assert len(await asyncio.to_thread(store.get, "large")) == LARGE_NBYTES // 4
    await asyncio.to_thread(store.close)


async def test_large_values_in_a_row_and_in_lists(server, store):
    values = [patterned(nbytes) for nbytes in (LONG_NBYTES + 1, 3 << 20, 10, CHUNK_NBYTES, 0, 1 << 20)]
    keys = [f"k{number}" for number in range(len(values))]
    await asyncio.gather(*map(store.set, keys, values))
    assert await asyncio.gather(*map(store.get, keys)) == values
    await store.multi_set([f"m{key}" for key in keys], values)
    assert await store.multi_get([f"m{key}" for key in keys]) == values
    await asyncio.gather(*(store.append("a", value) for value in values[1:2]))
    await store.queue_push("q", values[1])
    assert await store.queue_pop("q") == await store.get("a") == values[1]
    assert await store.compare_set("a", values[1], values[5]) == values[5]
    many = [f"a key that is quite long {number}" for number in range(20_000)]
    await store.multi_set(many, [b"v"] * len(many))
    assert len(await store.list_keys("a key")) == len(many)


async def test_messages_of_a_channel_keep_their_order(store, connect):
    other, sent = await connect(), [bytes([number]) * (1 << 20 if number % 3 == 0 else 3) for number in range(12)]
    async with store.subscribe("news") as news, store.watch("k") as values:
        assert await anext(values) is None
        await other.set("k", sent[0])
        assert await anext(values) == sent[0]
        for message in sent:
            assert await other.publish("news", message) == 1
        assert [await anext(news) for _ in sent] == sent


# -- limits -----------------------------------------------------------------------------------------


@SMALL_STORE
@EACH_KIND
async def test_missing_room_is_reported_before_the_whole_value_has_arrived(server, connect, kind):
    store = await connect(kind=kind)
    with pytest.raises(StoreError, match="--max-memory"):
        await store.set("k", patterned(LARGE_NBYTES // 4))
    assert server.quota.arriving_nbytes == 0
    await store.set("k", patterned(6 << 20))
    with pytest.raises(StoreError, match="--max-memory"):
        await store.multi_set(["l", "m"], [patterned(1 << 20), patterned(2 << 20)])
    await store.delete_key("k")
    await store.set("k", patterned(7 << 20))
    assert await store.get("k") == patterned(7 << 20)


@SMALL_STORE
async def test_repeated_request_needs_no_room(server, store, connect, eventually):
    other = await connect()
    await other.set("most", bytes(4 << 20))
    store.connection.link.transport.pause_reading()
    appending = store.append("k", patterned(3 << 20))
    await eventually(lambda: server.state.keys.peek("k"))
    store.connection.link.abort()
    await appending
    assert await store.get("k") == patterned(3 << 20)


@SMALL_STORE
async def test_earlier_request_of_the_same_read_makes_room(server, store, eventually):
    pack = packer()
    await store.set("k", bytes(7 << 20))
    await store.set("l", bytes((1 << 20) - LONG_NBYTES))
    setting = long(102, Op.SET, "m", bytes(LONG_NBYTES + 1))
    store.connection.link.transport.write(framed([pack((101, Op.DELETE_KEY, "k"))]) + sent(setting))
    await eventually(lambda: server.state.keys.peek("m"))


# -- abandoned --------------------------------------------------------------------------------------


@SMALL_STORE
async def test_partial_value_is_dropped_with_its_connection(server, proxy, connect, eventually):
    store = await connect(proxy.address, store_reconnect=0.0)
    proxy.cut_after(proxy.passed_nbytes + (2 << 20))
    with pytest.raises(ConnectionError):
        await store.set("k", patterned(6 << 20))
    await eventually(lambda: server.num_connections == 0)
    assert server.quota.arriving_nbytes == 0
    assert server.state.keys.peek("k") is None
    other = await connect()
    await other.set("k", patterned(7 << 20))


@SMALL_STORE
async def test_partial_value_is_dropped_when_it_is_cancelled(server, store, eventually):
    value = patterned(6 << 20)
    for _ in range(5):
        setting = asyncio.ensure_future(store.set("k", value))
        await eventually(lambda: server.quota.arriving_nbytes > 0)
        setting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await setting
        await eventually(lambda: server.quota.arriving_nbytes == 0)
        assert await store.check(["k"]) is False
    await store.set("k", value)
    assert await store.get("k") == value


async def test_cancelled_large_reply_is_abandoned(server, store, eventually):
    value = patterned(LARGE_NBYTES // 4)
    await store.set("large", value)
    inbox = store.connection.protocol.inbox
    for _ in range(3):
        getting = asyncio.ensure_future(store.get("large"))
        await eventually(lambda: inbox.open_messages)
        getting.cancel()
        await eventually(lambda: not inbox.open_messages)
    assert await store.get("large") == value


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def all_freed(kind: type) -> Callable[[], bool]:
    """Return a condition that holds once no object of a class exists, whatever refers to it."""
    return lambda: not any(isinstance(each, kind) for each in gc.get_objects())


async def test_closed_session_is_freed_without_the_collector(server, connect, no_collector, eventually):
    other = await connect()
    await other.set("large", patterned(1 << 20))
    await other.get("large")
    await other.close()
    await eventually(all_freed(Session))


async def test_long_message_is_freed_without_the_collector(server, store, no_collector, eventually):
    value = patterned(LARGE_NBYTES // 4)
    await store.set("large", value)
    await eventually(all_freed(LongMessage))
    await store.get("large")
    await eventually(all_freed(LongMessage))
    setting = asyncio.ensure_future(store.set("large", value))
    await eventually(lambda: server.quota.arriving_nbytes > 0)
    setting.cancel()
    await eventually(all_freed(LongMessage))
    getting = asyncio.ensure_future(store.get("large"))
    await eventually(lambda: store.connection.protocol.inbox.open_messages)
    getting.cancel()
    await eventually(all_freed(LongMessage))


async def test_long_message_of_a_blocking_store_is_freed_without_the_collector(server, no_collector, eventually):
    value = patterned(LARGE_NBYTES // 4)
    store = await asyncio.to_thread(TCPStore, "127.0.0.1", server.port, timeout=LONG, config=CONFIG)
    await asyncio.to_thread(store.set, "large", value)
    await eventually(all_freed(LongMessage))
    await asyncio.to_thread(store.get, "large")
    await eventually(all_freed(LongMessage))
    store.set_timeout(0.001)
    with pytest.raises(StoreTimeoutError):
        await asyncio.to_thread(store.set, "large", value)
    await eventually(all_freed(LongMessage))
    await asyncio.to_thread(store.close)


async def test_timeout_in_the_middle_of_a_value_drops_it(server, store, eventually):
    await store.set("large", patterned(LARGE_NBYTES // 4))
    with pytest.raises(StoreTimeoutError):
        await store.get("large", timeout=0.001)
    store.set_timeout(0.001)
    with pytest.raises(StoreTimeoutError):
        await store.set("other", patterned(LARGE_NBYTES // 4))
    store.set_timeout(LONG)
    await eventually(lambda: server.quota.arriving_nbytes == 0)
    assert await store.check(["large", "other"]) is False


@EACH_KIND
@pytest.mark.parametrize("cut_mib", [1, pytest.param(3, marks=pytest.mark.exhaustive), 6, 9])
async def test_long_value_is_sent_again_after_the_connection_broke(proxy, connect, cut_mib, kind):
    value, store = patterned(5 << 20), await connect(proxy.address, kind=kind)
    await store.set("there", value)
    proxy.cut_after(proxy.passed_nbytes + (cut_mib << 20))
    appending, getting = store.append("k", value), store.get("there")
    adding = [store.add("n", 1) for _ in range(20)]
    await appending
    assert await getting == value
    await store.append("k", value)
    assert sorted(await asyncio.gather(*adding)) == list(range(1, 21))
    assert await store.get("k") == value + value


async def test_part_of_no_message_ends_the_connection(server, store, caplog):
    store.connection.link.transport.write(frame(CHUNK, bytes(4) + b"of nothing"))
    await store.set("k", b"v")  # over another connection
    assert "bytes of message 0, which is not open" in caplog.text
