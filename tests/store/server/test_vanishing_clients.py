"""Clients that die at any byte of any operation: the operation is applied or not, and no other state remains."""

import contextlib
import os

import pytest

from asyncdist.store.protocol.c10d import MAGIC, Code
from asyncdist.store.protocol.client_protocol import IDENTITY_NBYTES
from asyncdist.store.protocol.operations import FLAG, KEY, KEYS, LEASED, NUMBER, VALUE, VALUES, Op
from tests.support.c10d_peer import encode
from tests.support.raw_connection import RawConnection
from tests.support.received_messages import frame_of

TOKEN = "a token for tests"

ANY = {KEY: "mine", VALUE: b"v", NUMBER: 1, FLAG: True, KEYS: ["k", "never"], VALUES: [b"1", b"1"]}
OURS = {op: tuple(ANY[kind] for kind in op.kinds) for op in Op} | {
    Op.GET: ("never",),
    Op.ADD: ("n", 1),
    Op.MULTI_SET: (["x", "y"], [b"1", b"1"]),
    Op.QUEUE_POP: ("queue", True),
    Op.BARRIER: ("barrier", 2),
    Op.SUBSCRIBE: ("channel",),
    Op.SET_EPHEMERAL: ("ephemeral", b"v"),
    Op.RESTORE_EPHEMERAL: ("ephemeral", b"v"),
    Op.ACQUIRE_LEASE: ("leased/",),
    Op.RELEASE_LEASE: ("leased/",),
    Op.OPEN_SCOPED_STORE: ("leased/",),
    Op.RESUME: (b"who", 0),
}
"""The arguments of each operation; an operation that can block does."""

ANY_OF_TORCH = {"u": MAGIC, "k": b"/mine", "v": b"v", "i": 1, "K": [b"/k", b"/never"], "P": {b"/x": b"1", b"/y": b"1"}}
THEIRS = {code: tuple(ANY_OF_TORCH[kind] for kind in code.shape) for code in Code} | {
    Code.ADD: (b"/n", 1),
    Code.QUEUE_POP: (b"/empty queue",),
    Code.BARRIER: (b"/barrier", 2),
}
"""The same in the c10d format, whose QUEUE_POP removes an item as soon as the request arrives."""

OPERATIONS = [*[("ours", op) for op in OURS], *[("theirs", code) for code in THEIRS]]


def said(format_: str, operation: Op | Code) -> bytes:
    if format_ == "theirs":
        return encode(Code.VALIDATE, MAGIC) + encode(operation, *THEIRS[operation])
    session = frame_of(2, Op.RESUME, os.urandom(IDENTITY_NBYTES), 0) if operation in LEASED else b""
    return session + frame_of(1, operation, *OURS[operation])


async def die_after(port: int, format_: str, words: bytes) -> None:
    """Connect, send, and close without reading, as the exit of a process does."""
    client = await RawConnection.to(port, token=TOKEN if format_ == "ours" else None)
    client.writer.write(words)
    client.writer.close()
    with contextlib.suppress(ConnectionError):
        await client.writer.wait_closed()


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
