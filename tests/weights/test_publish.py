"""Publishers and subscribers in one process, on one host or on several that share no memory."""

import asyncio
import contextlib
import threading

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import (
    ProtocolError,
    SharedMemoryError,
    StoreConnectionError,
    StoreTimeoutError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from asyncdist.kernel.memory import shared_segment
from asyncdist.rendezvous import JobDirectory
from asyncdist.store import StoreServer
from asyncdist.sync import weights as blocking
from asyncdist.weights import Publisher, Subscriber
from asyncdist.weights.errors import PublisherReplacedError, WeightsError
from asyncdist.weights.model_copies import ModelCopy
from asyncdist.weights.publisher import Publishing
from asyncdist.weights.subscriber import Subscribing
from asyncdist.weights.transfer.fan_out import HolderRecord
from asyncdist.weights.transfer.version_table import VersionTable, new_version
from tests.weights.conftest import fill, network, values

LIMIT = 60.0


async def publish(publisher, model, step):
    """Publish a model whose values are all ``step``."""
    return await publisher.publish(int(fill(model, step)[2].bias[0]))


async def take(subscriber):
    """Swap the next version in, and return its step and the values of the model."""
    version = await subscriber.next(LIMIT)
    async with subscriber.swap(version) as model:
        return version.step, values(model)


@contextlib.asynccontextmanager
async def opened(work):
    """Open the part of a publisher or a subscriber that works on the background loop, on this loop."""
    await work.open()
    try:
        yield work
    finally:
        await work.close()


@pytest.mark.parametrize("host", ["trainer", "server"])
async def test_subscriber_gets_each_version_that_it_waits_for(exchange, host):
    model = network()
    async with exchange(model, host, like=network()) as (publisher, subscriber):
        for step in range(5):
            version = await publish(publisher, model, step)
            assert (version.number, version.step, version.incarnation) == (step + 1, step, 1)
            assert await take(subscriber) == (step, {float(step)})
            with subscriber.reading() as (served, current):
                assert current == subscriber.current == version
                assert values(served) == {float(step)}
                assert served[0].weight.requires_grad is False
    assert str(version) == "version 5 (step 4)"


async def test_subscriber_skips_to_the_newest_version(job):
    model = network()
    async with Publisher(model, job=job) as publisher, Subscriber(like=network(), job=job) as subscriber:
        for step in range(7):
            await publish(publisher, model, step)
        assert await take(subscriber) == (6, {6.0})


async def test_publish_does_not_wait_for_a_reader_that_holds_old_versions(job, on_host):
    model = network()
    async with (
        on_host("a", Publisher, model, job=job) as publisher,
        on_host("a", Subscriber, like=network(), job=job) as slow,
        on_host("a", Subscriber, like=network(), job=job) as fast,
    ):
        await publisher.publish(0)
        assert await take(slow) == (0, {0.0})
        with slow.reading() as (held, _):
            for step in range(1, 8):
                await publish(publisher, model, step)
                assert await take(fast) == (step, {float(step)})
                assert values(held) == {0.0}
        assert await take(slow) == (7, {7.0})


async def test_requests_of_the_old_version_drain_while_new_ones_get_the_new_one(job):
    model = network()
    async with Publisher(model, job=job) as publisher, Subscriber(like=network(), job=job) as subscriber:
        await publisher.publish(0)
        await take(subscriber)
        old = subscriber.reading()
        read, version = old.__enter__()
        assert version.step == 0
        await publish(publisher, model, 1)
        new = await subscriber.next(LIMIT)
        async with subscriber.swap(new) as shown:
            assert values(shown) == {1.0}
            with subscriber.reading() as (current, version):
                assert version.step == 0
                assert current is read
        with subscriber.reading() as (current, version):
            assert version == new
            assert values(current) == {1.0}
        await publish(publisher, model, 2)
        # Both copies are in use, so the next version waits for the old request.
        with pytest.raises(TimeoutError, match=r"version 3 .* waits for a copy of the model"):
            await subscriber.next(0.05)
        assert values(read) == {0.0}
        old.__exit__(None, None, None)
        assert await take(subscriber) == (2, {2.0})


async def test_swap_whose_block_fails_leaves_the_current_version(job):
    model = network()
    async with Publisher(model, job=job) as publisher, Subscriber(like=network(), job=job) as subscriber:
        await publisher.publish(0)
        await take(subscriber)
        await publish(publisher, model, 1)
        with pytest.raises(ZeroDivisionError):
            async with subscriber.swap(await subscriber.next(LIMIT)):
                raise ZeroDivisionError
        with subscriber.reading() as (current, version):
            assert version.step == 0
            assert values(current) == {0.0}
        await publish(publisher, model, 2)
        assert await take(subscriber) == (2, {2.0})


async def test_swap_that_is_cancelled_when_its_copy_is_ready_frees_the_copy(job, monkeypatch):
    """The caller's loop is busy until the copy shows the version; it learns of its cancellation first."""
    model, is_shown = network(), threading.Event()
    async with Publisher(model, job=job) as publisher, Subscriber(like=network(), job=job) as subscriber:
        await publisher.publish(0)
        show = Subscribing.show

        async def show_and_tell(self, version):
            shown = await show(self, version)
            is_shown.set()
            return shown

        monkeypatch.setattr(Subscribing, "show", show_and_tell)
        swapping = asyncio.create_task(subscriber.swap(await subscriber.next(LIMIT)).__aenter__())
        await asyncio.sleep(0)
        is_shown.wait()
        swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swapping
        for step in (1, 2):
            await publish(publisher, model, step)
            assert await take(subscriber) == (step, {float(step)})


@pytest.mark.parametrize("kind", [Publisher, Subscriber])
async def test_entry_that_is_cancelled_when_it_is_complete_leaves_nothing_open(job, kind, monkeypatch):
    """The fixtures look for tasks and sockets."""
    work = Publishing if kind is Publisher else Subscribing
    open_it, is_open = work.open, threading.Event()

    async def open_and_tell(self):
        await open_it(self)
        is_open.set()

    monkeypatch.setattr(work, "open", open_and_tell)
    entering = asyncio.create_task(kind(network(), job=job).__aenter__())
    await asyncio.sleep(0)
    is_open.wait()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering


async def test_reader_that_cannot_map_the_memory_of_its_host_copies_it(job, monkeypatch, caplog):
    mapping = shared_segment.ArenaMapping

    def map_own_only(*arguments, private=False):
        if private:
            raise SharedMemoryError("cannot map a segment: no address space is left")
        return mapping(*arguments)

    monkeypatch.setattr(shared_segment, "ArenaMapping", map_own_only)
    model = network(3.0)
    async with Publisher(model, job=job) as publisher, Subscriber(like=network(), job=job) as subscriber:
        await publisher.publish(1)
        assert await take(subscriber) == (1, {3.0})
    assert "is copied, because it cannot be mapped: cannot map a segment" in caplog.text


async def test_version_that_cannot_be_shown_is_dropped_although_its_swap_is_cancelled(job, monkeypatch, eventually):
    has_begun, may_fail = threading.Event(), threading.Event()

    def fail(self, held, selection):
        has_begun.set()
        may_fail.wait()
        raise MemoryError

    publishing = Publishing(network(), job, "weights", 2, None)
    subscribing = Subscribing(None, job, "weights", None, 2, None)
    async with opened(publishing), opened(subscribing):
        await publishing.publish(1)
        version = await subscribing.next(LIMIT)
        monkeypatch.setattr(ModelCopy, "show", fail)
        showing = asyncio.create_task(subscribing.show(version))
        await eventually(has_begun.is_set)
        showing.cancel()
        may_fail.set()
        with pytest.raises(asyncio.CancelledError):
            await showing
        async with table_of(job) as table, table.holders(version) as holders:
            await eventually(lambda: len(holders) == 1)


async def test_cancelled_look_at_the_holders_leaves_no_task(job, eventually):
    publishing = Publishing(network(), job, "weights", 2, None)
    async with opened(publishing), table_of(job) as table:
        version = await publishing.publish(1)
        before = asyncio.all_tasks()
        looking = asyncio.create_task(table.holders(version).__aenter__())
        while not asyncio.all_tasks() - before - {looking}:  # noqa: ASYNC110
            await asyncio.sleep(0)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        # The publisher deletes old versions at the same time, in tasks that end soon.
        await eventually(lambda: asyncio.all_tasks() <= before)


async def test_only_the_version_yielded_last_can_be_swapped_in_once(job):
    async with Publisher(network(), job=job) as publisher, Subscriber(like=network(), job=job) as subscriber:
        with pytest.raises(WeightsError, match="no version is in use yet"), subscriber.reading():
            pass
        published = await publisher.publish()
        with pytest.raises(UsageError, match="version 1 cannot be swapped in"):
            async with subscriber.swap(published):
                pass
        version = await subscriber.next(LIMIT)
        async with subscriber.swap(version):
            pass
        with pytest.raises(UsageError, match="version 1 cannot be swapped in"):
            async with subscriber.swap(version):
                pass


@pytest.mark.parametrize("host", ["trainer", "server"])
async def test_reader_of_slices_gets_its_parts(exchange, host):
    state = {"up": torch.arange(640.0).view(64, 10), "down": torch.arange(640.0).view(10, 64), "other": torch.ones(3)}
    like = {"up": torch.empty(16, 10, device="meta"), "down": torch.empty(10, 16, device="meta")}
    slices = {"up": slice(16, 32), "down": (slice(None), slice(16, 32))}
    async with exchange(state, host, like=like, slices=slices) as (publisher, subscriber):
        for _ in range(3):
            await publisher.publish()
            async with subscriber.swap(await subscriber.next(LIMIT)) as mine:
                assert mine.keys() == like.keys()
                assert torch.equal(mine["up"], state["up"][16:32])
                assert torch.equal(mine["down"], state["down"][:, 16:32])
                assert mine["down"].is_contiguous()
            state["up"] += 1


@pytest.mark.parametrize("host", ["trainer", "server"])
@pytest.mark.parametrize("change", [torch.nn.Module.bfloat16, lambda model: model.to("meta")], ids=["bfloat16", "meta"])
async def test_reader_may_have_another_dtype_and_no_values(exchange, host, change):
    like = change(network())
    async with exchange(network(2.0), host, like=like) as (publisher, subscriber):
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as model:
            assert model[0].weight.dtype == like[0].weight.dtype
            assert values(model) == {2.0}


async def test_tied_parameters_stay_tied(job):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    like = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    like[1].weight = like[0].weight
    async with Publisher(model, job=job) as publisher, Subscriber(like=like, job=job) as subscriber:
        version = await publisher.publish()
        assert version.nbytes == 4 * 64 + 2 * 64
        async with subscriber.swap(await subscriber.next(LIMIT)) as read:
            assert read[1].weight is read[0].weight
            assert torch.equal(read(torch.eye(8)), model(torch.eye(8)))


@pytest.mark.parametrize(
    ("source", "words"),
    [(torch.nn.Flatten(), "no weights to publish"), ({"a": torch.empty(3, device="meta")}, "a is on the meta device")],
)
async def test_weights_without_values_are_refused(job, source, words):
    async with Publisher(source, job=job) as publisher:
        with pytest.raises(UsageError, match=words):
            await publisher.publish()


async def test_tensors_without_elements_are_published(job):
    state = {"a": torch.empty(0, 3)}
    async with Publisher(state, job=job) as publisher, Subscriber(like=state, job=job) as subscriber:
        await publisher.publish(7)
        assert (await subscriber.next(LIMIT)).step == 7
        with pytest.raises(UsageError, match="step is a whole number"):
            await publisher.publish(1.5)  # type: ignore[arg-type]


async def test_reader_that_does_not_fit_is_told_and_waits_for_a_version_that_does(job):
    state = {"a": torch.zeros(3)}
    async with Publisher(state, job=job) as publisher, Subscriber(like={"a": torch.zeros(4)}, job=job) as subscriber:
        await publisher.publish()
        with pytest.raises(UsageError, match=r"a has the shape \[4\] .* the published tensor \[3\]: make like= of"):
            await subscriber.next(LIMIT)
        state["a"] = torch.ones(4)
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as read:
            assert read["a"].tolist() == [1.0] * 4


async def test_error_of_a_version_that_arrived_between_two_calls_is_told_by_the_next(job, eventually):
    state = {"a": torch.zeros(3)}
    async with Publisher(state, job=job) as publisher, Subscriber(like={"a": torch.zeros(4)}, job=job) as subscriber:
        version = await publisher.publish()
        for _ in range(2):
            with pytest.raises(WaitTimeoutError):
                await subscriber.next(0)
            await eventually(lambda number=version.number: subscriber._subscribing._seen.number == number)
            with pytest.raises(UsageError, match=r"a has the shape \[4\]"):
                await subscriber.next(LIMIT)
            version = await publisher.publish()


async def test_later_publisher_replaces_the_first(job, caplog):
    async with Subscriber(like=network(), job=job) as subscriber, Publisher(network(1.0), job=job) as first:
        await first.publish(100)
        assert await take(subscriber) == (100, {1.0})
        async with Publisher(network(2.0), job=job) as second:
            assert (first.incarnation, second.incarnation) == (1, 2)
            with pytest.raises(PublisherReplacedError, match=r"publisher 1 .* by publisher 2"):
                await first.publish(101)
            version = await second.publish(50)
            assert (version.number, version.incarnation) == (2, 2)
            assert await take(subscriber) == (50, {2.0})
            await second.publish(51)
            assert await take(subscriber) == (51, {2.0})
    assert caplog.messages.count(PublisherReplacedError(1, 2).summary) == 1


async def test_publisher_that_was_replaced_deletes_nothing_of_its_successor(job):
    """It may have been stopped before it deletes its older versions."""
    async with opened(Publishing(network(), job, "weights", 1, None)) as first, table_of(job) as table:
        before = await first.publish(1)
        async with opened(Publishing(network(), job, "weights", 1, None)) as second:
            version = await second.publish(2)
            await second._cleaned()
            assert await table.manifest(before) is None
            await first._clean(first._opened())
            assert await table.manifest(version) is not None
            assert len(await table.order(version)) == 1


@pytest.mark.parametrize("others", ["", "newcomer.1;"])
async def test_reader_enrolls_while_the_publisher_deletes_the_order_of_its_version(job, monkeypatch, others):
    async with table_of(job) as table:
        version, append = new_version(1, 1, None, 1), type(table.store).append

        def append_and_lose(store, key, value):
            appended = append(store, key, value)
            store.delete_key(key)
            return append(store, key, others) if others else appended

        monkeypatch.setattr(type(table.store), "append", append_and_lose)
        order = await table.enroll(version, HolderRecord("me.2", "me", "", "", False, []))
        assert order == [each for each in others.split(";") if each]


@contextlib.asynccontextmanager
async def table_of(job):
    """Open the keys that publishers and subscribers of a job share."""
    directory = await JobDirectory.open(job, "weights", config=Config.from_environment())
    try:
        yield VersionTable(directory.store, "weights")
    finally:
        await directory.close()


async def test_publisher_that_could_not_announce_a_lost_version_does_so_after_the_next_loss(
    job, monkeypatch, caplog, eventually
):
    announce, errors = VersionTable.announce, [StoreTimeoutError("set", ["manifest"], 1.0)]

    async def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return await announce(*arguments)

    async with opened(Publishing(network(), job, "weights", 2, None)) as publishing, table_of(job) as table:
        published = await publishing.publish(1)
        monkeypatch.setattr(VersionTable, "announce", fail_once)
        await table.store.delete_key("latest")
        await eventually(lambda: "which could not be announced again" in caplog.text)
        await table.store.set("latest", published.encode())
        await table.store.delete_key("latest")
        await eventually(lambda: "which was announced again" in caplog.text)
        assert (await table.latest()).key == published.key


async def test_publisher_whose_version_is_lost_after_another_has_taken_over_says_so(
    job, monkeypatch, caplog, eventually
):
    async def refuse(*_):
        raise PublisherReplacedError(1, 2)

    async with opened(Publishing(network(), job, "weights", 2, None)) as publishing, table_of(job) as table:
        await publishing.publish(1)
        monkeypatch.setattr(VersionTable, "announce", refuse)
        await table.store.delete_key("latest")
        await eventually(lambda: PublisherReplacedError(1, 2).summary in caplog.messages)
        with pytest.raises(PublisherReplacedError):
            await publishing.publish(2)


async def test_publisher_reports_a_record_that_it_cannot_read(job, caplog, eventually):
    async with opened(Publishing(network(), job, "weights", 2, None)) as publishing, table_of(job) as table:
        await table.store.set("latest", b"damaged")
        await eventually(lambda: "publisher 1 of 'weights' watches the store no more" in caplog.text)
        assert "cannot be read" in caplog.text
        with pytest.raises(ProtocolError, match="cannot be read"):
            await publishing.publish(1)


async def test_publisher_reports_that_its_store_has_ended(monkeypatch, caplog, eventually):
    monkeypatch.setenv("ASYNCDIST_STORE_RECONNECT", "0")
    server = await StoreServer.start("127.0.0.1", 0)
    async with opened(
        Publishing(network(), f"asyncdist://127.0.0.1:{server.port}/job", "weights", 2, None)
    ) as publishing:
        await server.close()
        await eventually(lambda: "publisher 1 of 'weights' watches the store no more" in caplog.text)
        with pytest.raises(StoreConnectionError):
            await publishing.publish(1)


async def test_newcomer_reads_from_other_readers_when_the_publisher_has_left(job, on_host):
    async with on_host("a", Subscriber, like=network(), job=job) as first:
        async with on_host("a", Publisher, network(3.0), job=job) as publisher:
            await publisher.publish()
            await take(first)
        for host in ("a", "b"):
            async with on_host(host, Subscriber, like=network(), job=job) as late:
                assert await take(late) == (None, {3.0})


async def test_keys_are_deleted_with_the_last_process(job):
    async with Publisher(network(1.0), job=job) as publisher:
        await publisher.publish()
    async with Publisher(network(2.0), job=job) as publisher:
        assert publisher.incarnation == 1
        async with Subscriber(like=network(), job=job) as subscriber:
            with pytest.raises(WaitTimeoutError, match=rf"'weights' has been published in {job} within 0.05 s: check"):
                await subscriber.next(0.05)
            await publisher.publish()
            await subscriber.next(LIMIT)
            with pytest.raises(WaitTimeoutError, match=r"newer than version 1 has been published within 0.05 s"):
                await subscriber.next(0.05)


async def test_publisher_learns_what_its_readers_use(job):
    model = network()
    async with Publisher(model, job=job) as publisher, Subscriber(like=model, job=job) as subscriber:
        version = await publisher.publish()
        assert [each.version for each in await publisher.readers()] == [0]
        with pytest.raises(WaitTimeoutError, match="do not use version 1 yet: process"):
            await publisher.wait_for_readers(timeout=0.05)
        waiting = asyncio.create_task(publisher.wait_for_readers(version, LIMIT))
        await take(subscriber)
        assert [(each.version, each.incarnation) for each in await waiting] == [(1, 1)]
        late = Subscriber(like=model, job=job)
        await late.__aenter__()
        waiting = asyncio.create_task(publisher.wait_for_readers(version, LIMIT))
        await late.__aexit__()
        assert len(await waiting) == 1


async def test_cancelled_wait_loses_no_version(job):
    model = network()
    async with Publisher(model, job=job) as publisher, Subscriber(like=model, job=job) as subscriber:
        for step in range(3):
            waiting = asyncio.create_task(subscriber.next())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await publish(publisher, model, step)
            assert await take(subscriber) == (step, {float(step)})


async def test_cancelled_publication_leaves_the_version_before_or_a_whole_one(job):
    model = network(width=4000)
    async with Publisher(model, job=job) as publisher, Subscriber(like=network(width=4000), job=job) as subscriber:
        await publisher.publish(0)
        for step in range(1, 10):
            fill(model, step)
            publishing = asyncio.create_task(publisher.publish(step))
            for _ in range(step):
                await asyncio.sleep(0.0005)
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            fill(model, -1.0)
        await publish(publisher, model, 10)
        seen = None
        while seen != 10:
            seen, found = await take(subscriber)
            assert found == {float(seen)}


@pytest.mark.parametrize("turns", [1, 2, 4, 8])
async def test_cancelled_end_of_a_publisher_and_a_subscriber_leaves_nothing_open(job, turns):
    """The fixtures look for tasks and sockets. Each end is cancelled at another place."""
    publishing = Publishing(network(), job, "weights", 2, None)
    await publishing.open()
    await publishing.publish(1)
    subscribing = Subscribing(None, job, "weights", None, 2, None)
    await subscribing.open()
    await subscribing.next(LIMIT)
    for end in (subscribing, publishing):
        closing = asyncio.create_task(end.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing


async def test_tensor_that_cannot_be_published_leaves_the_version_before(job):
    state = {"a": torch.ones(3)}
    async with Publisher(state, job=job) as publisher, Subscriber(like=dict(state), job=job) as subscriber:
        await publisher.publish(1)
        state["b"] = torch.eye(3).to_sparse()
        with pytest.raises(UnsupportedError, match=r"b is a torch\.sparse_coo tensor"):
            await publisher.publish(2)
        state["b"] = torch.ones(3).as_subclass(Distributed)
        with pytest.raises(UnsupportedError, match=r"b is a distributed tensor: .*full_tensor\(\) makes on all ranks"):
            await publisher.publish(2)
        assert (await subscriber.next(LIMIT)).step == 1


class Distributed(torch.Tensor):
    """Has the attribute by which a DTensor is known."""

    def full_tensor(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda job: Publisher(network(), job=job, keep=0), "keep is 0"),
        (lambda job: Subscriber(like=network(), job=job, copies=1), "copies is 1"),
        (lambda job: Subscriber(like=[torch.zeros(3)], job=job), "a module or a dict of tensors"),
        (lambda job: Subscriber(like={"a": 3}, job=job), "'a' in the weights is of type int"),
        (
            lambda job: Subscriber(like={"a": torch.ones(3).as_subclass(Distributed)}, job=job),
            r"a is a distributed tensor: .*to_local\(\) returns, as like=, and say with slices=",
        ),
    ],
)
def test_wrong_argument_is_named(job, make, match):
    with pytest.raises(UsageError, match=match):
        make(job)


async def test_calls_outside_the_block_are_refused(job):
    publisher, subscriber = Publisher(network(), job=job), Subscriber(like=network(), job=job)
    with pytest.raises(UsageError, match="inside its"):
        await publisher.publish()
    with pytest.raises(UsageError, match="inside its"):
        await subscriber.next()
    with pytest.raises(UsageError, match="no job at a store daemon"):
        await Publisher(network(), job="tcp://127.0.0.1:1").__aenter__()


def test_blocking_publisher_and_subscriber_serve_threads(job):
    model = network()
    with blocking.Publisher(model, job=job) as publisher, blocking.Subscriber(like=model, job=job) as subscriber:
        publisher.publish(0)
        with subscriber.swap(subscriber.next(LIMIT)):
            pass
        stop, torn = threading.Event(), []

        def serve():
            while not stop.is_set():
                with subscriber.reading() as (served, version):
                    if values(served) != {float(version.step)}:
                        torn.append(version)

        servers = [threading.Thread(target=serve) for _ in range(2)]
        for server in servers:
            server.start()
        for step in range(1, 20):
            publisher.publish(int(fill(model, step)[2].bias[0]))
            version = subscriber.next(LIMIT)
            assert version.step == step
            with subscriber.swap(version):
                pass
        publisher.wait_for_readers(timeout=LIMIT)
        stop.set()
        for server in servers:
            server.join()
        assert not torn
        assert subscriber.current.step == 19
