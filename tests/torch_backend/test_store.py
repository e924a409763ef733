"""asyncdist stores used by torch: through the C++ PrefixStore and as the store of process groups."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from asyncdist.errors import StoreTimeoutError
from asyncdist.store import HashStore, TCPStore
from asyncdist.torch_backend import Store

MOMENT = timedelta(milliseconds=50)


@pytest.fixture(params=["memory", "tcp"])
def inner(request):
    """The asyncdist store below `store`."""
    return HashStore() if request.param == "memory" else TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def store(inner):
    store = Store(inner)
    yield store
    store.close()


@pytest.fixture(params=[False, True], ids=["bare", "below torch's prefix"])
def face(request, store):
    """The store called from Python, directly and through torch's C++ PrefixStore."""
    return dist.PrefixStore("some", dist.PrefixStore("prefix", store)) if request.param else store


def test_every_store_operation_of_torch(face):
    face.set("k", "text")
    assert face.get("k") == b"text"
    face.append("k", " and more")
    assert face.multi_get(["k", "k"]) == [b"text and more"] * 2
    assert [face.add("n", 2), face.add("n", -5)] == [2, -3]
    face.multi_set(["x", "y"], ["1", "2"])
    assert face.check(["x", "y"])
    assert not face.check(["x", "z"])
    face.wait(["x"], timedelta(seconds=60))
    assert face.compare_set("x", "1", "one") == b"one"
    assert face.compare_set("x", "1", "uno") == b"one"
    assert face.compare_set("absent", "", "there") == b"there"
    keys = face.num_keys()
    assert face.delete_key("x")
    assert not face.delete_key("x")
    assert face.num_keys() == keys - 1
    assert face.has_extended_api()


def test_wait_for_a_missing_key_times_out_and_names_the_key(face):
    with pytest.raises(StoreTimeoutError, match=r"'(some/prefix/)?never'|'prefix/some/never'"):
        face.wait(["never"], MOMENT)


def test_set_timeout_applies_to_every_blocking_operation(inner, store, face):
    inner.set_timeout(60.0)
    face.set_timeout(MOMENT)
    assert store.timeout == MOMENT
    for ask in (lambda: face.get("never"), lambda: face.wait(["never"]), lambda: face.multi_get(["never"])):
        with pytest.raises(StoreTimeoutError):
            ask()
    for ask in (lambda: store.queue_pop("never"), lambda: store.barrier("of two", 2)):
        with pytest.raises(StoreTimeoutError):
            ask()


def test_timeout_defaults_to_the_underlying_store_and_is_separate_per_clone():
    inner = HashStore()
    inner.set_timeout(7.0)
    store = Store(inner)
    other = store.clone()
    other.set_timeout(MOMENT)
    assert (store.timeout, other.timeout) == (timedelta(seconds=7), MOMENT)
    inner.set_timeout(None)
    assert Store(inner).timeout == timedelta(days=10_000)
    store.close()


def test_queue_list_keys_barrier_and_clone(store):
    store.queue_push("q", b"first")
    store.queue_push("q", "second")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"first", b"second"]
    store.set("k", b"v")
    assert "k" in store.list_keys()
    store.barrier("b", 1)
    assert store.clone().get("k") == b"v"


def test_prefix_store_keeps_its_underlying_store_alive():
    alive = HashStore()
    prefixed = dist.PrefixStore("prefix", Store(alive))
    gc.collect()
    prefixed.set("k", "v")
    assert alive.get("prefix/k") == b"v"


@pytest.mark.parametrize("backend", ["gloo", "asyncdist"])
def test_init_process_group_with_the_store(store, backend):
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()
