"""Clients that die at any byte of any operation: the operation is applied or not, and no other state remains."""

import contextlib
import os

import pytest

from asyncdist.store.protocol.c10d import MAGIC, Code
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES
from asyncdist.store.protocol.codec import Encoder
from asyncdist.store.protocol.operations import LEASED, Op
from tests.support.c10d_peer import encode
from tests.support.raw_connection import RawConnection

TOKEN = "a token for tests"

OURS = {
    Op.SET: ("mine", b"v"),
    Op.GET: ("never",),
    Op.ADD: ("n", 1),
    Op.WAIT: (["k", "never"],),
    Op.CHECK: (["k"],),
    Op.COMPARE_SET: ("mine", b"v", b"w"),
    Op.DELETE_KEY: ("mine",),
    Op.NUM_KEYS: (),
    Op.APPEND: ("mine", b"x"),
    Op.MULTI_GET: (["k", "never"],),
    Op.MULTI_SET: (["x", "y"], [b"1", b"1"]),
    Op.LIST_KEYS: ("",),
    Op.QUEUE_PUSH: ("other queue", b"item"),
    Op.QUEUE_POP: ("queue", True),
    Op.QUEUE_LEN: ("queue",),
    Op.BARRIER: ("barrier", 2),
    Op.PUBLISH: ("channel", b"message"),
    Op.SUBSCRIBE: ("channel",),
    Op.SET_EPHEMERAL: ("ephemeral", b"v"),
    Op.RESTORE_EPHEMERAL: ("ephemeral", b"v"),
    Op.ACQUIRE_LEASE: ("leased/",),
    Op.RELEASE_LEASE: ("leased/",),
    Op.WATCH: ("k",),
    Op.WATCH_KEYS: ("",),
    Op.CANCEL: (1,),
    Op.CONFIRM: (1,),
    Op.LEAVE: (),
    Op.OPEN_SCOPED_STORE: ("leased/",),
    Op.RESUME: (b"who", 0),
    Op.RECEIVED: (1,),
    Op.STATUS: (),
}
"""The arguments of each operation; an operation that can block does."""

THEIRS = {
    Code.SET: (b"/mine", b"v"),
    Code.COMPARE_SET: (b"/mine", b"v", b"w"),
    Code.GET: (b"/k",),
    Code.ADD: (b"/n", 1),
    Code.CHECK: ([b"/k"],),
    Code.WAIT: ([b"/k", b"/never"],),
    Code.GETNUMKEYS: (),
    Code.DELETE_KEY: (b"/mine",),
    Code.APPEND: (b"/mine", b"x"),
    Code.MULTI_GET: ([b"/k", b"/never"],),
    Code.MULTI_SET: ({b"/x": b"1", b"/y": b"1"},),
    Code.CANCEL_WAIT: (),
    Code.PING: (7,),
    Code.QUEUE_PUSH: (b"/other queue", b"item"),
    Code.QUEUE_POP: (b"/empty queue",),
    Code.QUEUE_LEN: (b"/queue",),
    Code.LIST_KEYS: (),
    Code.BARRIER: (b"/barrier", 2),
    Code.VALIDATE: (MAGIC,),
}
"""The same in the c10d format, whose QUEUE_POP removes an item as soon as the request arrives."""

OPERATIONS = [*[("ours", op) for op in OURS], *[("theirs", code) for code in THEIRS]]


def said(format_: str, operation: Op | Code) -> bytes:
    if format_ == "theirs":
        return encode(Code.VALIDATE, MAGIC) + encode(operation, *THEIRS[operation])
    session = Encoder().frame(2, Op.RESUME, os.urandom(IDENTITY_NBYTES), 0) if operation in LEASED else b""
    return session + Encoder().frame(1, operation, *OURS[operation])


async def die_after(port: int, format_: str, words: bytes) -> None:
    """Connect, send, and close without reading, as the exit of a process does."""
    client = await RawConnection.to(port, token=TOKEN if format_ == "ours" else None)
    client.writer.write(words)
    client.writer.close()
    with contextlib.suppress(ConnectionError):
        await client.writer.wait_closed()


def test_every_operation_is_covered():
    assert set(OURS) == set(Op)
    assert set(THEIRS) == set(Code)


@pytest.mark.parametrize(("format_", "operation"), OPERATIONS, ids=lambda each: getattr(each, "name", each))
async def test_client_dies_in_the_middle_of_an_operation(server, store, format_, operation, eventually):
    await store.set("k", b"v")
    await store.queue_push("queue", b"item")
    words = said(format_, operation)
    for nbytes in [*range(min(len(words), 60)), *range(60, len(words), 5000), len(words)]:
        await die_after(server.port, format_, words[:nbytes])
    await eventually(lambda: server.num_connections == 1)
    assert server.state.num_open == 0
    assert await store.queue_pop("queue", block=False) == b"item"
    assert await store.add("n", 0) in (0, 1)
    assert await store.check(["x"]) == await store.check(["y"])
    await eventually(lambda: server.state.keys.peek("ephemeral") is None)
    assert not await store.check(["barrier"])
    assert await store.publish("channel", b"") == 0
    assert await store.get("k") == b"v"
