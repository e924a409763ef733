"""The awaited client against a real server over loopback."""

import asyncio
import contextlib
import gc
import pickle
import re
import socket
import threading
import weakref

import pytest

from asyncdist.config import Config
from asyncdist.errors import (
    AddressError,
    AuthenticationError,
    LookUpTimeoutError,
    ProtocolError,
    QueueEmptyError,
    StoreConnectionError,
    StoreError,
    StoreTimeoutError,
    UsageError,
)
from asyncdist.store import AsyncPrefixStore, AsyncStore, StoreServer, TCPStore
from asyncdist.store.client import connect as dialling
from asyncdist.store.protocol import operations
from asyncdist.store.protocol.operations import Op, command
from tests.support.ports import free_port
from tests.support.stores import LONG, TOKEN, open_store

pytestmark = pytest.mark.each_loop

UNIT = 0.05
"""Seconds: a timeout that expires."""
EACH_KIND = pytest.mark.parametrize("kind", [AsyncStore, TCPStore])


async def test_every_operation(store):
    await store.set("k", "text")
    assert await store.get("k") == b"text"
    assert await store.add("n", 2) == 2
    await store.wait(["k", "n"])
    assert await store.check(["k", "missing"]) is False
    assert await store.compare_set("k", b"text", b"other") == b"other"
    await store.append("k", b"!")
    assert await store.multi_get(["k", "n"]) == [b"other!", b"2"]
    await store.multi_set(["x", "y"], [b"1", bytearray(b"2")])
    assert await store.list_keys() == ["k", "n", "x", "y"]
    assert await store.delete_key("x") is True
    assert await store.num_keys() == 3
    await store.queue_push("q", b"item")
    assert await store.queue_len("q") == 1
    assert await store.queue_pop("q") == b"item"
    with pytest.raises(QueueEmptyError):
        await store.queue_pop("q", block=False)
    await store.barrier("b", 1)
    assert await store.publish("c", b"") == 0


async def test_waiting_get_does_not_block_other_requests(store):
    waiting = store.get("later")
    for _ in range(100):
        await store.add("n", 1)
    assert not waiting.done()
    await store.set("later", b"now")
    assert await waiting == b"now"


async def test_many_in_flight_on_one_connection(store, server):
    waiting = [store.get(f"key{number}") for number in range(1000)]
    await asyncio.gather(*(store.set(f"key{number}", str(number)) for number in reversed(range(1000))))
    assert await asyncio.gather(*waiting) == [str(number).encode() for number in range(1000)]
    assert server.num_connections == 1


async def test_a_get_takes_one_round_trip(store, server):
    await store.set("k", b"v")
    before = server.num_requests
    assert await store.get("k") == b"v"
    assert server.num_requests == before + 1


async def test_values_larger_than_any_buffer(store, config):
    value = bytes(range(256)) * (config.store_max_value_nbytes // 256)
    await asyncio.gather(*(store.set(f"k{number}", value) for number in range(8)))
    for got in await asyncio.gather(*(store.get(f"k{number}") for number in range(8))):
        assert got == value


async def test_a_timeout_names_the_keys_and_leaves_nothing_at_the_server(store, server):
    with pytest.raises(StoreTimeoutError, match=r"wait\('a', 'b'\) timed out after 0.05 s") as caught:
        await store.wait(["a", "b"], timeout=UNIT)
    assert caught.value.keys == ("a", "b")
    assert isinstance(caught.value, TimeoutError)
    await store.check([])
    assert server.state.num_open == 0


@pytest.mark.parametrize("port", [-1, 70000, "7"])
async def test_port_that_no_store_can_have_is_refused_at_once(port):
    with pytest.raises(AddressError, match=f"a store cannot have the port {port!r}: ports go from 1 to 65535"):
        await AsyncStore.connect("127.0.0.1", port, timeout=LONG)
    if isinstance(port, int):
        with pytest.raises(AddressError, match="a store cannot have the port"):
            TCPStore("127.0.0.1", port, timeout=LONG)


DONE = "the store at WHERE did not answer; the change may have been made; read the value before you repeat it"
WAITED = "the keys were not set, or the store at WHERE had not sent the whole answer"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (operations.set_("k", "v"), f"store set('k') timed out after 0.05 s: {DONE}"),
        (command(Op.QUEUE_PUSH, "k", "v"), f"store queue_push('k') timed out after 0.05 s: {DONE}"),
        (
            command(Op.LIST_KEYS, ""),
            "store list_keys('') timed out after 0.05 s: the store at WHERE did not answer; check whether the store",
        ),
        (operations.get("k"), f"store get('k') timed out after 0.05 s: {WAITED}"),
        (command(Op.QUEUE_POP, "k", True), "store queue_pop('k') timed out after 0.05 s: the queue stayed empty, or"),
        (operations.barrier("k", 2), "store barrier('k') timed out after 0.05 s: not all have come, or the store at"),
    ],
    ids=lambda given: given.name if isinstance(given, operations.Command) else "",
)
async def test_timeout_of_a_store_that_does_not_answer(store, server, command, said):
    def blocking() -> None:
        config = Config(token=TOKEN, store_reconnect=0.0)
        with TCPStore("127.0.0.1", server.port, timeout=LONG, config=config) as other:
            asyncio.run_coroutine_threadsafe(pause(), loop).result(LONG)
            with pytest.raises(StoreTimeoutError, match=f"^{re.escape(said)}") as caught:
                other.request(command, UNIT)
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    async def pause() -> None:
        server.pause_reading()

    loop = asyncio.get_running_loop()
    said = said.replace("WHERE", f"127.0.0.1:{server.port}")
    await pause()
    with pytest.raises(StoreTimeoutError, match=f"^{re.escape(said)}"):
        await store.request(command, UNIT)
    await asyncio.to_thread(blocking)
    server.resume_reading()


async def test_timeout_of_a_stream_of_a_store_that_does_not_answer(store, server):
    store.set_timeout(UNIT)
    server.pause_reading()
    for stream in (store.subscribe("k"), store.watch("k"), store.watch_keys("k")):
        with pytest.raises(
            StoreTimeoutError, match=r"\('k'\) timed out after 0.05 s: the store at 127.*:\d+ did not answer"
        ):
            await stream
    server.resume_reading()
    store.set_timeout(LONG)
    await store.check([])
    assert server.state.num_open == 0


@pytest.mark.parametrize(
    "start",
    [
        lambda store: store.get("k"),
        lambda store: store.wait(["k"]),
        lambda store: store.multi_get(["k"]),
        lambda store: store.barrier("k", 2),
        lambda store: store.queue_pop("k"),
    ],
)
async def test_cancelling_a_wait_cancels_it_at_the_server(store, server, start, eventually):
    task = asyncio.ensure_future(start(store))
    await eventually(lambda: server.state.num_open == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: server.state.num_open == 0)
    await store.set("k", b"1")
    assert await store.get("k") == b"1"


async def test_item_is_not_lost_when_its_pop_is_cancelled(store, connect):
    other = await connect()
    for number in range(50):
        taking = asyncio.create_task(store.queue_pop("q"))
        await store.check([])
        pushing = other.queue_push("q", str(number))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        taking.cancel()
        await pushing
        try:
            assert await taking == str(number).encode()
        except asyncio.CancelledError:
            assert await other.queue_pop("q", timeout=LONG) == str(number).encode()
    assert await other.queue_len("q") == 0


async def test_item_goes_to_the_next_pop_when_its_client_dies(store, connect, server, eventually):
    dying = await connect(store_reconnect=0)
    taking = asyncio.create_task(dying.queue_pop("q"))
    await eventually(lambda: server.state.num_open == 1)
    dying.connection.link.transport.pause_reading()  # the server answers, and the client does not read the answer
    await store.queue_push("q", b"item")
    waiting = asyncio.create_task(store.queue_pop("q", timeout=LONG))
    dying.connection.link.abort()
    assert await waiting == b"item"
    with pytest.raises(StoreConnectionError):
        await taking


async def test_a_refusal_does_not_end_the_connection_however_long_the_key_is(store):
    with pytest.raises(QueueEmptyError, match=r"'kkk.*… is empty"):
        await store.queue_pop("k" * 300_000, block=False)
    assert await store.add("n", 1) == 1


async def test_errors_of_the_store_do_not_end_the_connection(store):
    await store.set("k", b"no number")
    with pytest.raises(StoreError, match="not an integer"):
        await store.add("k", 1)
    with pytest.raises(UsageError):  # at the call
        store.set("k", 1)
    with pytest.raises(UsageError, match="ASYNCDIST_STORE_MAX_VALUE_NBYTES"):
        store.set("k", bytes(2 << 20))
    assert await store.get("k") == b"no number"


async def test_reply_beyond_the_limit_is_refused(store):
    await store.set("k", bytes(1 << 20))
    with pytest.raises(StoreError, match="fewer keys"):
        await store.multi_get(["k"] * 100_000)
    assert len(await store.get("k")) == 1 << 20


async def test_publish_and_subscribe(store, connect):
    other = await connect()
    async with store.subscribe("news") as messages:
        assert await other.publish("news", b"1") == 1
        assert await other.publish("news", b"2") == 1
        assert [await anext(messages), await anext(messages)] == [b"1", b"2"]
    assert await store.publish("news", b"3") == 0
    messages = await store.subscribe("news")
    await store.publish("news", b"4")
    assert await anext(messages) == b"4"


async def test_a_subscription_ends_with_its_connection(store, server):
    async with store.subscribe("news") as messages:
        waiting = asyncio.create_task(anext(messages))
        await asyncio.sleep(0)
        await server.close()
        with pytest.raises(StoreConnectionError):
            await waiting


async def test_under_a_prefix(store):
    part = AsyncPrefixStore("world/1", store)
    await part.set("k", b"1")
    assert await store.get("world/1/k") == b"1"
    assert await part.list_keys() == ["k"]
    assert await AsyncPrefixStore("deeper", part).add("n", 1) == 1
    assert await store.check(["world/1/deeper/n"])
    with pytest.raises(StoreTimeoutError):
        await part.get("never", timeout=UNIT)
    async with part.subscribe("c") as messages:
        await store.publish("world/1/c", b"!")
        assert await anext(messages) == b"!"
    async with AsyncPrefixStore("deeper", part).watch_keys() as changes:
        assert await anext(changes) == ("n", b"1")
    part.timeout = UNIT
    with pytest.raises(StoreTimeoutError):
        await part.queue_pop("q")
    await part.close()
    assert await store.get("world/1/k") == b"1"


# -- connections that fail ---------------------------------------------------------------------------


@EACH_KIND
async def test_requests_fail_when_the_server_is_closed(connect, server, kind, eventually):
    store = await connect(kind=kind)
    waiting = [store.get("k"), store.barrier("b", 2)]
    await eventually(lambda: server.state.num_open == 2)
    await server.close()
    for future in (*waiting, store.get("k")):
        with pytest.raises(StoreConnectionError, match="broke"):
            await future


async def test_use_after_close(store):
    waiting = store.get("k")
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    for future in (waiting, store.set("k", b"")):
        with pytest.raises(StoreConnectionError, match="closed"):
            await future
    assert "closed" in repr(store)


async def test_client_that_starts_before_its_server(config, monkeypatch):
    refused, failed = asyncio.Event(), dialling.ConnectRetry.failed

    def note(retry, error):
        refused.set()
        failed(retry, error)

    monkeypatch.setattr(dialling.ConnectRetry, "failed", note)
    port = free_port()
    connecting = asyncio.create_task(AsyncStore.connect("127.0.0.1", port, token=TOKEN, timeout=LONG))
    await refused.wait()
    async with await StoreServer.start("127.0.0.1", port, token=TOKEN, config=config), await connecting as store:
        assert await store.add("n", 1) == 1


@EACH_KIND
@pytest.mark.parametrize("listens", [False, True])
async def test_no_store_answers(listens, kind):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        why = "it accepts connections and does not answer.*torchrun, whose TCPStore" if listens else ".*was started"
        with pytest.raises(StoreConnectionError, match=rf"no store answered at 127.0.0.1:\d+ within .* s \({why}"):
            await open_store(kind, *silent.getsockname(), timeout=UNIT)


@EACH_KIND
@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\nthis is a web server, not a store\r\n", bytes(100)])
async def test_another_program_answers(data, kind):
    async def answer(reader, writer):
        writer.write(data)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        with pytest.raises(ProtocolError, match="did not come from an asyncdist store"):
            await open_store(kind, *other.sockets[0].getsockname())


@EACH_KIND
async def test_client_connected_to_itself_tries_again(config, kind):
    """A socket connects to itself if its own port is the destination and no process listens there yet."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as port:
        port.setblocking(False)
        connecting = asyncio.create_task(open_store(kind, *port.getsockname()))
        other_end, _ = await loop.sock_accept(port)
        with other_end, contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(other_end, 1000):
                await loop.sock_sendall(other_end, data)
        async with await StoreServer.start("127.0.0.1", 0, token=TOKEN, config=config, sockets=[port.dup()]):
            store = await connecting
            assert await store.add("n", 1) == 1
            await store.close()


async def test_token_is_that_of_the_settings_by_default(server, monkeypatch):
    monkeypatch.setenv("ASYNCDIST_TOKEN", TOKEN)
    async with await AsyncStore.connect("127.0.0.1", server.port, timeout=LONG) as store:
        await store.set("k", b"v")
    with pytest.raises(AuthenticationError):
        await AsyncStore.connect("127.0.0.1", server.port, timeout=LONG, config=Config(token="another"))


@EACH_KIND
@pytest.mark.parametrize("token", [None, "", "another token"])
async def test_a_wrong_token_is_refused_at_once(server, token, kind, eventually):
    with pytest.raises(AuthenticationError, match="ASYNCDIST_TOKEN"):
        await open_store(kind, "127.0.0.1", server.port, token=token)
    await eventually(lambda: server.num_connections == 0)


async def test_a_host_that_does_not_resolve(monkeypatch):
    monkeypatch.setattr(dialling, "NAME_GRACE", 0.0)
    for host in ("no-such-host.invalid", "x" * 64 + ".invalid"):
        with pytest.raises(AddressError, match="does not resolve"):
            await AsyncStore.connect(host, 1, timeout=LONG)


@pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
async def test_name_server_that_does_not_answer_is_named_and_does_not_hold_the_loop(monkeypatch, kind):
    answer = threading.Event()

    def look_up(*name, **options):
        answer.wait(LONG)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        with pytest.raises(LookUpTimeoutError, match=r"the name server did not resolve host 'store.example' in time"):
            await open_store(kind, "store.example", 1, timeout=UNIT)
        # asyncio.run() joins the threads of the loop's own executor.
        await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), LONG)
        assert not answer.is_set()
    finally:
        answer.set()


@pytest.mark.parametrize("kind", [AsyncStore, TCPStore])
async def test_every_address_of_a_name_is_tried(server, monkeypatch, kind):
    real = socket.getaddrinfo

    def look_up(name, *args, **options):
        if name == "store.example":
            return [found for each in ("127.0.0.2", "127.0.0.1") for found in real(each, *args, **options)]
        return real(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    store = await open_store(kind, "store.example", server.port, token=TOKEN, timeout=LONG)
    await store.set("key", b"value")
    await store.close()


async def test_cancelled_connect_leaves_no_connection(server, eventually):
    for pauses in range(6):
        task = asyncio.create_task(AsyncStore.connect("127.0.0.1", server.port, token=TOKEN))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await eventually(lambda: server.num_connections == 0)
    gc.collect()


@pytest.mark.each_loop
async def test_stream_that_the_program_drops_ends(server, store, eventually):
    await store.set("k", "v")
    async for change in store.watch_keys():
        assert change == ("k", b"v")
        break
    async for value in await store.watch("k"):
        assert value == b"v"
        break
    await eventually(lambda: server.state.num_open == 0)
    await store.watch("k")  # no program can read this
    await eventually(lambda: server.state.num_open == 0)


async def test_stream_whose_store_is_lost_is_collected(eventually):
    """The error that the program has got must not keep the stream, and with it what the program's frames hold."""

    async def lose_the_store():
        server = await StoreServer.start("127.0.0.1", 0, token=TOKEN)
        store = await AsyncStore.connect("127.0.0.1", server.port, token=TOKEN, config=Config(store_reconnect=0.0))
        stream = await store.subscribe("channel")
        closing = asyncio.create_task(server.close())
        with contextlib.suppress(StoreConnectionError):
            await anext(stream)
        await closing
        await store.close()
        return weakref.ref(stream)

    stream = await lose_the_store()
    await eventually(lambda: gc.collect() is None or stream() is None)
