"""The operations of all blocking stores, and that `Store`, `AsyncStoreBase` and torch's stores have the same methods."""

import inspect
import threading
from asyncio import Future
from collections.abc import Iterator
from datetime import timedelta
from typing import get_origin, get_type_hints

import pytest

from asyncdist.config import Config
from asyncdist.errors import QueueEmptyError, StoreConnectionError, StoreError, StoreTimeoutError, UsageError
from asyncdist.store import AsyncStoreBase, FileStore, HashStore, PrefixStore, Store, TCPStore

UNIT, LONG = 0.05, 60.0
KINDS = ["hash", "tcp", "prefix of hash", "prefix of tcp"]
"""Stores with all operations; a file store has a part of them."""


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    yield from opened(request.param, tmp_path)


@pytest.fixture(params=["file", *KINDS])
def any_store(request, tmp_path):
    yield from opened(request.param, tmp_path)


def opened(kind: str, tmp_path) -> Iterator[Store]:
    with make(kind.removeprefix("prefix of "), tmp_path) as made:
        made.set_timeout(LONG)
        yield PrefixStore("part", made) if kind.startswith("prefix") else made


def make(kind: str, tmp_path) -> Store:
    if kind == "hash":
        return HashStore()
    if kind == "file":
        return FileStore(tmp_path / "store")
    return TCPStore("127.0.0.1", 0, is_master=True, config=Config(token="t"))


def test_stream_that_the_program_drops_ends(store, until):
    for message in iter_and_publish(store):
        assert message == b"m"
        break
    until(lambda: store.publish("channel", "m") == 0)
    kept = store.subscribe("channel")
    assert store.publish("channel", "m") == 1
    assert kept.get() == b"m"
    kept.close()
    until(lambda: store.publish("channel", "m") == 0)


def iter_and_publish(store):
    """Return a subscription with a message, which is in no variable."""
    subscription = store.subscribe("channel")
    assert store.publish("channel", "m") == 1
    return subscription


def test_key_operations(any_store):
    assert any_store.set("k", "text") is None
    assert any_store.get("k") == b"text"
    assert any_store.add("n", 2) == 2
    any_store.wait(["k", "n"])
    any_store.wait(["k", "n"], timedelta(seconds=1))
    assert any_store.check(["k", "missing"]) is False
    assert any_store.compare_set("k", "text", "other") == b"other"
    any_store.append("k", "!")
    assert any_store.multi_get(["k", "n"]) == [b"other!", b"2"]
    any_store.multi_set(["x", "y"], ["1", b"2"])
    assert any_store.list_keys() == ["k", "n", "x", "y"]
    assert any_store.delete_key("x") is True
    assert any_store.num_keys() == 3


def test_keys_may_be_bytes_as_in_torch(any_store):
    any_store.set(b"k", "v")
    assert any_store.get(b"k") == any_store.get("k") == b"v"
    any_store.wait([b"k"])
    assert any_store.check([b"k", "k"])
    with pytest.raises(UsageError, match="is not UTF-8"):
        any_store.set(b"\xff", "v")


def test_clone_is_the_same_store_with_its_own_timeout(any_store):
    clone = any_store.clone()
    assert clone.timeout == any_store.timeout
    clone.set_timeout(UNIT)
    any_store.set("k", "v")
    assert clone.get("k") == b"v"
    with pytest.raises(StoreTimeoutError):
        clone.get("never")
    assert any_store.timeout == timedelta(seconds=LONG)
    if not isinstance(any_store, HashStore):
        clone.close()
    assert any_store.get("k") == b"v"


def test_fresh_store_has_one_key_and_lists_none_as_in_torch():
    with TCPStore("127.0.0.1", 0, world_size=1, is_master=True, config=Config(token="t")) as store:
        assert (store.num_keys(), store.list_keys()) == (1, [])


def test_queue_barrier_and_channel_operations(store):
    store.queue_push("q", "item")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"item"
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", block=False)
    store.barrier("b", 1)
    assert store.publish("c", "no subscriber") == 0


def test_wrong_arguments_are_refused(any_store):
    any_store.set("k", "no number")
    with pytest.raises(StoreError, match="not an integer"):
        any_store.add("k", 1)
    with pytest.raises(UsageError, match="bytes or str"):
        any_store.set("k", 1)
    with pytest.raises(UsageError):
        any_store.set("\udc80", "")
    assert any_store.get("k") == b"no number"


def test_wait_and_get_time_out(any_store):
    with pytest.raises(StoreTimeoutError, match=r"timed out after 0.05 s") as caught:
        any_store.wait(["k", "l"], timedelta(seconds=UNIT))
    assert [key.removeprefix("part/") for key in caught.value.keys] == ["k", "l"]
    any_store.set_timeout(timedelta(seconds=UNIT))
    assert any_store.timeout == timedelta(seconds=UNIT)
    with pytest.raises(StoreTimeoutError):
        any_store.get("k")
    any_store.set_timeout(LONG)
    any_store.set("k", "still good")
    assert any_store.get("k") == b"still good"


def test_pop_and_barrier_that_time_out_leave_nothing_at_the_store(store):
    store.set_timeout(UNIT)
    for _ in range(2):  # the first caller of the barrier is not counted the second time
        with pytest.raises(StoreTimeoutError):
            store.queue_pop("k")
        with pytest.raises(StoreTimeoutError):
            store.barrier("k", 2)
    store.queue_push("k", "item")
    assert store.queue_pop("k", block=False) == b"item"


def test_waiting_threads_do_not_block_others(any_store, threads):
    waiting = [threads.submit(any_store.get, f"k{number}") for number in range(16)]
    for number in range(16):
        assert any_store.add("n", 1) == number + 1
    assert not any(future.done() for future in waiting)
    for number in reversed(range(16)):
        any_store.set(f"k{number}", str(number))
    assert [future.result(LONG) for future in waiting] == [str(number).encode() for number in range(16)]


def test_requests_of_many_threads(any_store, threads):
    rounds = 20 if isinstance(any_store, FileStore) else 100

    def work(number: int) -> None:
        for step in range(rounds):
            any_store.set(f"{number}/{step}", f"{number}.{step}")
            assert any_store.get(f"{number}/{step}") == f"{number}.{step}".encode()
            any_store.add("sum", 1)

    for future in [threads.submit(work, number) for number in range(16)]:
        future.result(LONG * 3)
    assert any_store.add("sum", 0) == 16 * rounds


def test_each_item_is_popped_once(store, threads):
    popping = [threads.submit(store.queue_pop, "q") for _ in range(20)]
    for number in range(20):
        store.queue_push("q", str(number))
    assert sorted(int(future.result(LONG)) for future in popping) == list(range(20))


def test_item_is_not_lost_to_a_pop_that_times_out(store, threads):
    for number in range(10):
        try:
            popping = threads.submit(store.queue_pop, "q", True, UNIT / 10)
            store.queue_push("q", str(number))
            assert popping.result(LONG) == str(number).encode()
        except StoreTimeoutError:
            assert store.queue_pop("q") == str(number).encode()


def test_barrier_of_threads(store, threads):
    with pytest.raises(StoreTimeoutError):
        store.barrier("b", 3, timedelta(seconds=UNIT))
    waiting = [threads.submit(store.barrier, "b", 3) for _ in range(3)]
    for future in waiting:
        assert future.result(LONG) is None


def test_publish_and_subscribe(store, threads):
    with store.subscribe("news") as messages:
        assert store.publish("news", "1") == 1
        assert store.publish("news", "2") == 1
        assert messages.get() == b"1"
        assert next(messages) == b"2"
        with pytest.raises(StoreTimeoutError):
            messages.get(UNIT)
        receiving = threads.submit(messages.get, LONG)
        store.publish("news", "3")
        assert receiving.result(LONG) == b"3"
    messages.close()


def test_subscriber_that_outlasts_another_threads_timeout_receives(store, threads):
    with store.subscribe("news") as messages:
        short = threads.submit(messages.get, UNIT)
        long = [threads.submit(messages.get, LONG) for _ in range(2)]
        with pytest.raises(StoreTimeoutError):
            short.result(LONG)
        store.publish("news", "1")
        store.publish("news", "2")
        assert {future.result(LONG) for future in long} == {b"1", b"2"}


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_close_ends_subscriptions_and_watches(kind, tmp_path, threads):
    store = make(kind, tmp_path)
    news, key = store.subscribe("news"), store.watch("k")
    assert key.get() is None
    receiving, watching = threads.submit(news.get, LONG), threads.submit(key.get, LONG)
    store.close()
    for future in (receiving, watching):
        with pytest.raises(StoreConnectionError, match="closed"):
            future.result(LONG)
    for listen in (store.subscribe, store.watch):
        with pytest.raises(StoreConnectionError, match="closed"):
            listen("other")
    news.close()
    key.close()


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_close_ends_waiting_calls(kind, tmp_path, threads):
    store = make(kind, tmp_path)
    waiting = [threads.submit(store.get, key) for key in ("k", "l")]
    store.add("n", 1)
    store.close()
    store.close()
    for future in waiting:
        with pytest.raises(StoreConnectionError, match="closed"):
            future.result(LONG)
    with pytest.raises(StoreConnectionError, match="closed"):
        store.get("k")


def test_prefix_store():
    whole = HashStore()
    part = PrefixStore("a", PrefixStore("b", whole))
    part.set("k", "1")
    with part.watch_keys("k") as changes:
        assert changes.get(LONG) == ("k", b"1")
    assert whole.list_keys() == ["b/a/k"]
    assert part.list_keys() == ["k"]
    assert part.underlying_store.underlying_store is whole
    part.set_timeout(UNIT)
    assert whole.timeout == timedelta(seconds=300)
    with pytest.raises(StoreTimeoutError):
        part.get("never")
    assert part.num_keys() == 1
    part.close()
    assert whole.get("b/a/k") == b"1"


@pytest.mark.parametrize("timeout", [timedelta(days=30), 1e10, timedelta.max, None])
def test_very_long_timeouts(store, threads, timeout):
    waiting = [threads.submit(store.get, "k", timeout) for _ in range(3)]
    store.set_timeout(timeout)
    assert store.timeout >= timedelta(days=30)
    store.set("k", "1")
    assert [future.result(LONG) for future in waiting] == [b"1"] * 3
    later = threads.submit(store.get, "l")
    store.set("l", "2")
    assert later.result(LONG) == b"2"
    with store.watch("k") as values:
        assert values.get(timeout) == b"1"


def test_wait_longer_than_one_poll_is_polled_again(monkeypatch):
    monkeypatch.setattr("asyncdist.store.client.blocking_socket.LONGEST_POLL", 1)
    with TCPStore("127.0.0.1", 0, is_master=True, timeout=LONG, config=Config(token="t")) as store:
        threading.Timer(UNIT, store.set, ("k", "1")).start()
        assert store.get("k") == b"1"
        with pytest.raises(StoreTimeoutError):
            store.get("never", UNIT)


# -- methods ---------------------------------------------------------------------------------------


def parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


PUBLIC = [name for name, value in vars(Store).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_blocking_and_awaited_stores_have_the_same_methods_and_arguments(name):
    blocking, awaited = getattr(Store, name), getattr(AsyncStoreBase, name)
    assert parameters(blocking) == parameters(awaited)
    awaitable = inspect.iscoroutinefunction(awaited) or get_origin(get_type_hints(awaited)["return"]) is Future
    assert awaitable is (name not in ("stream", "subscribe", "watch", "watch_keys", "set_timeout"))
    assert not inspect.iscoroutinefunction(blocking)


def test_stores_have_every_method_of_torchs_stores():
    import torch.distributed as torch_distributed

    private_to_torch = {"has_extended_api", "libuvBackend"}
    theirs = {name for name in dir(torch_distributed.TCPStore) if not name.startswith("_")} - private_to_torch
    assert theirs <= set(dir(TCPStore)) | {"underlying_store"}
    for ours, torchs in ((TCPStore, torch_distributed.TCPStore), (FileStore, torch_distributed.FileStore)):
        theirs_too = {"host_name", "port", "file_name", "world_size", "is_master", "timeout", "wait_for_workers"}
        documented = {name for name in theirs_too if f"{name}:" in (torchs.__init__.__doc__ or "")}
        assert documented <= set(parameters(ours.__init__))


def test_watch_yields_the_value_and_each_change(store, threads):
    with store.watch("k") as values:
        assert values.get(LONG) is None
        store.set("k", "1")
        assert values.get(LONG) == b"1"
        waiting = threads.submit(values.get, LONG)
        store.append("k", "2")
        assert waiting.result(LONG) == b"12"
        store.set("k", "12")  # no change
        store.set("other", "1")
        with pytest.raises(StoreTimeoutError):
            values.get(UNIT)
        store.delete_key("k")
        assert values.get(LONG) is None
    store.set("k", "3")
    with store.watch("k") as values:
        assert next(values) == b"3"


def test_watch_keeps_only_the_newest_value(store):
    with store.watch("k") as values:
        for number in range(100):
            store.set("k", str(number))
        seen = [values.get(LONG)]
        while seen[-1] != b"99":
            seen.append(values.get(LONG))
        assert len(seen) < 100


def test_ephemeral_key_can_be_read_and_replaced(store):
    store.set("k", "1", ephemeral=True)
    assert store.get("k") == b"1"
    store.set("k", "2")
    assert store.get("k") == b"2"


def test_prefix_watch_yields_all_keys_and_each_change(store):
    store.multi_set(["job/a", "other"], ["1", "x"])
    with store.watch_keys("job/") as changes:
        assert changes.get(LONG) == ("job/a", b"1")
        store.set("other", "y")
        store.append("job/a", "2")
        store.delete_key("job/a")
        assert [changes.get(LONG) for _ in range(2)] == [("job/a", b"12"), ("job/a", None)]
        with pytest.raises(StoreTimeoutError):
            changes.get(UNIT)
