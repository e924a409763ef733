"""Rows on stores."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asyncdist import store
from tests.differences.rows.row import Side, raised, row

STORES = "Stores"


def _tcp_store(side: Side) -> Any:
    limit = timedelta(seconds=10)
    if side.ours:
        return store.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)


def _closed(client: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.closing(client) if hasattr(client, "close") else contextlib.nullcontext(client)


@row(STORES, "`HashStore.wait` for an absent key with a negative timeout")
def negative_timeout(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        words = raised(lambda: client.wait(["absent"], timedelta(seconds=-1)))
    return words if side.ours else f"looks once: {words}"


@row(STORES, "`TCPStore.compare_set` of an absent key with an expected value")
def compare_set_of_an_absent_key(side: Side) -> str:
    with _closed(_tcp_store(side)) as client:
        answer = client.compare_set("absent", "old", "new")
        stored = "and stores nothing" if not client.check(["absent"]) else "and stores it"
        return f"returns `{bytes(answer)!r}`, {stored}"


@row(STORES, "`set_timeout` of a store below a `PrefixStore` that was made before")
def timeout_of_a_prefix(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        prefixed = side.stores.PrefixStore("prefix", client)
        before = prefixed.timeout
        client.set_timeout(timedelta(seconds=17))
        return "does not change it: it has its own" if prefixed.timeout == before else "changes both"


@row(STORES, "`HashStore.add` to an empty text")
def add_to_a_text(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        client.set("text", "")
        words = raised(lambda: client.add("text", 2))
        return f"counts it as 0: `{client.get('text')!r}`" if words == "carried" else f"{words}; the text stays"


@row(STORES, "`TCPStore.set` of 9 MiB")
def large_value(side: Side) -> str:
    with _closed(_tcp_store(side)) as client:
        words = raised(lambda: (client.set("large", "v" * (9 << 20)), client.get("large")))
        return "stores it" if words == "carried" else f"drops the connection: {words}"


@row(STORES, "`FileStore.delete_key` of an absent key")
def delete_of_an_absent_key(side: Side) -> str:
    with tempfile.TemporaryDirectory() as folder, _closed(side.stores.FileStore(f"{folder}/store", 1)) as client:
        return f"`{client.delete_key('absent')}`"


def _waits(client: Any, timeout: timedelta) -> bool:
    """Return whether a wait ends with its key, which is set a fifth of a second later, and not with its timeout."""
    setter = threading.Timer(0.2, client.set, ("late", "value"))
    setter.start()
    words = raised(lambda: client.wait(["late"], timeout))
    setter.join()
    return words == "carried"


@row(STORES, "`wait` with a timeout of 0")
def timeout_of_zero(side: Side) -> str:
    found = []
    for name, make in (("HashStore", side.stores.HashStore), ("TCPStore", lambda: _tcp_store(side))):
        with _closed(make()) as client:
            found.append(f"`{name}` waits without a limit" if _waits(client, timedelta(0)) else f"`{name}` looks once")
    return ", ".join(found)


@row(STORES, "`HashStore.wait` with a timeout of half a millisecond")
def timeout_of_half_a_millisecond(side: Side) -> str:
    with _closed(side.stores.HashStore()) as client:
        is_endless = _waits(client, timedelta(microseconds=500))
    return "becomes 0, and waits without a limit" if is_endless else "ends after it"


@row(STORES, "`FileStore.wait` for an absent key with a timeout of 100 ms")
def timeout_of_a_file(side: Side) -> str:
    with tempfile.TemporaryDirectory() as folder, _closed(side.stores.FileStore(f"{folder}/store", 1)) as client:
        start = time.monotonic()
        words = raised(lambda: client.wait(["absent"], timedelta(milliseconds=100)))
        return f"{words} after {'a second' if time.monotonic() - start >= 1 else '100 ms'}"
