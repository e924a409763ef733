"""Calls with device tensors, over a pretended device: which are lent to their receiver, how long, and what goes wrong."""

import asyncio
import contextlib
import functools
import gc
import logging
import re
import threading
import weakref
from threading import current_thread

import msgpack
import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.rpc import blocking, wire
from asyncdist.rpc import session as session_module
from asyncdist.rpc.loans import DevicePart
from asyncdist.rpc.wire import pack_plain
from tests.rpc.conftest import assert_equal_and_writable, caller_of, channels_of, lent_by, tasks_of
from tests.support.cuda import TheirEvent
from tests.support.device_tensors import CUDA, OnDevice, PretendLending, on_device
from tests.support.devices import PretendStaged
from tests.support.ports import free_port

LARGE = 40_000
"""Elements of float32 of a tensor that is lent."""
CONFIG = Config(timeout=60.0)


class Echo:
    """Returns what it gets, changes what it has returned, and remembers."""

    def __init__(self):
        self.log = []
        self.weights = on_device(torch.arange(float(LARGE)))
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def echo(self, *values):
        return values[0] if len(values) == 1 else list(values)

    def plain(self, value):
        return value

    async def note(self, value):
        self.log.append(value)

    async def current(self):
        """Return the weights, and change them afterwards."""
        asyncio.get_running_loop().call_soon(self.weights.add_, 1)
        return self.weights

    async def items(self, count, size=LARGE):
        item = on_device(torch.zeros(size))
        for number in range(count):
            item.fill_(number)
            self.log.append(number)
            yield item
            if number % 2:
                yield -number


@pytest.fixture(autouse=True)
def _pretended(monkeypatch):
    """Let the sessions of a test use pretended devices, and check that nothing stays lent, mapped or allocated."""
    monkeypatch.setattr(session_module, "DeviceLending", PretendLending)
    monkeypatch.setattr(PretendLending, "all", [])
    monkeypatch.setattr(PretendLending, "driver_options", {})
    monkeypatch.setattr(OnDevice, "num_to_host", 0)
    yield
    for lending in PretendLending.all:
        assert not any(driver.mapped or driver.taken for driver in lending.drivers)


class Side:
    """One of the two sessions of a test, with one channel."""

    def __init__(self, session):
        self.session = session

    async def ping(self):
        """Call another object, when the calls before have arrived: those of one object wait for one another."""
        for _ in range(2):
            assert await self.session.ping() == 1

    @property
    def device(self):
        return self.session.lending

    @property
    def driver(self):
        return self.device.drivers[0]

    @property
    def loans(self):
        (channel,) = channels_of(self.session)
        return channel.context.loans

    @property
    def lent(self):
        return lent_by(self.loans)


@contextlib.asynccontextmanager
async def sessions(job, served, *, local=True, transport="auto"):
    """Serve an object in one session, and call it from another: yield it, the serving side and the calling side."""
    far, near = (Config(timeout=60.0, host=None if local else host, transport=transport) for host in ("far", "near"))
    objects = {"it": served, "other": Echo()}
    async with rpc.serve(objects, job, config=far) as serving, rpc.connect(job, config=near) as calling:
        it, other = await calling.find("it"), await calling.find("other")
        calling.ping = functools.partial(other.echo, 1)
        yield it, Side(serving), Side(calling)


@contextlib.asynccontextmanager
async def acquainted(job, served, eventually):
    """The same, when both directions have learned that the other process maps the memory."""
    async with sessions(job, served) as (it, far, near):
        tensor = on_device(torch.ones(LARGE))
        near.loans.lends(tensor)
        far.loans.lends(tensor)
        await eventually(lambda: near.loans.lends(tensor) and far.loans.lends(tensor))
        yield it, far, near


def passed_the_host():
    return OnDevice.num_to_host + sum(lending.num_from_host for lending in PretendLending.all)


async def test_first_tensors_go_through_the_host_and_later_ones_are_read_where_they_lie(job, eventually):
    async with sessions(job, Echo()) as (it, far, near):
        tensor = on_device(torch.randn(LARGE))
        assert torch.equal(await it.echo(tensor), tensor)
        assert OnDevice.num_to_host == 2
        await eventually(lambda: near.loans.lends(tensor) and far.loans.lends(tensor))
        before = passed_the_host()
        for method in (it.echo, it.plain):
            found = await method(tensor)
            assert torch.equal(found, tensor)
            assert found.device == CUDA
            assert found.data_ptr() != tensor.data_ptr()
        assert passed_the_host() == before
        assert far.driver.maps
        assert near.driver.maps


def tensors():
    yield on_device(torch.randn(300, 400))
    yield on_device(torch.randn(300, 400).t())
    yield on_device(torch.randn(3, 70_000)[:, ::2])
    yield on_device(torch.randn(LARGE, dtype=torch.bfloat16))
    yield on_device(torch.randn(LARGE, dtype=torch.complex64)).conj()
    yield on_device(torch.ones(200_000, dtype=torch.bool))
    yield on_device(torch.ones(LARGE)).requires_grad_()
    yield on_device(torch.ones(1)).expand(LARGE)


async def test_tensors_of_all_layouts_arrive_equal_and_writable(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, _far, _near):
        for tensor in tensors():
            assert_equal_and_writable(await it.echo(tensor), tensor)
            assert_equal_and_writable(await it.plain(tensor), tensor)
            assert torch.count_nonzero(tensor)
        assert not passed_the_host()


async def test_tensor_among_long_arguments_is_lent_by_the_loop(job, eventually, monkeypatch):
    threads = []
    part = DevicePart.of
    monkeypatch.setattr(
        DevicePart, "of", lambda *args, **kwargs: threads.append(current_thread()) or part(*args, **kwargs)
    )
    async with acquainted(job, Echo(), eventually) as (it, _far, _near):
        tensor = on_device(torch.randn(LARGE))
        assert torch.equal((await it.plain([*[()] * LARGE, tensor]))[-1], tensor)
        assert threads[0] is current_thread()
        assert not passed_the_host()


async def test_small_and_empty_tensors_pass_through_the_host(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, far, near):
        small, empty, large = on_device(torch.ones(16_384)), on_device(torch.empty(0, 3)), on_device(torch.ones(LARGE))
        host = torch.ones(100_000)
        found = await it.echo(small, {"empty": empty, "large": (large, host)}, "x" * 50_000)
        assert torch.equal(found[0], small)
        assert found[1]["empty"].shape == (0, 3)
        assert torch.equal(found[1]["large"][0], large)
        assert torch.equal(found[1]["large"][1], host)
        assert type(found[1]["large"][1]) is torch.Tensor
        assert found[2] == "x" * 50_000
        assert OnDevice.num_to_host == 4
        assert [side.device.num_from_host for side in (far, near)] == [2, 2]


async def test_many_tensors_of_one_call_are_lent_together_and_events_are_used_again(job, eventually):
    state = {f"layer{number}": on_device(torch.full((20_000,), float(number))) for number in range(500)}
    async with acquainted(job, Echo(), eventually) as (it, far, near):
        found = await it.echo(state)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert not passed_the_host()
        assert near.driver.made_events <= 3, "an event for each call"
        for _ in range(20):
            await asyncio.gather(*[it.echo(on_device(torch.ones(LARGE))) for _ in range(4)])
        assert all(side.driver.made_events <= 10 for side in (far, near))


# -- where tensors cannot be read ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"local": False}, {"transport": "cpu:auto,cuda:staged"}], ids=["tcp", "setting"])
async def test_other_hosts_get_the_content_and_no_offer(job, options):
    async with sessions(job, Echo(), **options) as (it, far, near):
        for _ in range(3):
            tensor = on_device(torch.randn(LARGE))
            assert torch.equal(await it.echo(tensor), tensor)
        assert passed_the_host() == 12
        assert not far.device.drivers
        assert not near.device.drivers


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"refuses": RuntimeError("no peer access")}, "its device's memory cannot be mapped: no peer access"),
        ({"kinds": [PretendStaged]}, "no back end has loans"),
        ({"probe": bytes(16)}, "the memory mapped from its device is not the sender's"),
    ],
    ids=["cannot map", "no back end", "another memory"],
)
async def test_refused_tensors_go_through_the_host_and_the_log_says_why(job, eventually, caplog, options, reason):
    caplog.set_level(logging.INFO, "asyncdist")
    PretendLending.driver_options = {"refuses": options["refuses"]} if "refuses" in options else {}
    async with sessions(job, Echo()) as (it, far, near):
        near.device.kinds = options.get("kinds", near.device.kinds)
        if "probe" in options:
            loans = await near.device.open(CUDA)
            memory = loans._memory
            memory.probe = memory.probe[:-16] + options["probe"]
        tensor = on_device(torch.randn(LARGE))
        assert torch.equal(await it.echo(tensor), tensor)
        await eventually(lambda: f"through host memory: {reason}" in caplog.text)
        for _ in range(3):
            await it.note(tensor)
        assert far.device.num_from_host == 4


async def test_memory_that_cannot_be_shared_goes_through_the_host(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, far, near):
        near.driver.shareable = False
        tensor = on_device(torch.ones(LARGE))
        assert torch.equal(await it.echo(tensor), tensor)
        assert (far.device.num_from_host, near.device.num_from_host) == (1, 0)
        near.driver.shareable = True
        await it.note(tensor)
        assert far.device.num_from_host == 1, "it was refused for good"


async def test_loan_that_cannot_be_mapped_after_all_brings_its_content(job, eventually, caplog):
    caplog.set_level(logging.INFO, "asyncdist")
    async with acquainted(job, Echo(), eventually) as (it, far, near):
        far.driver.refuses = RuntimeError("out of mappings")
        tensors = [on_device(torch.full((LARGE + number,), float(number))) for number in range(6)]
        found = await asyncio.gather(*[it.echo(tensor, torch.ones(2)) for tensor in tensors])
        for (tensor, _), sent in zip(found, tensors, strict=True):
            assert torch.equal(tensor, sent)
            assert tensor.device == CUDA
        assert far.device.num_from_host == 6
        assert near.device.num_from_host == 0
        assert "through host memory: its device's memory cannot be mapped: out of mappings" in caplog.text
        near.driver.refuses = RuntimeError("out of mappings")
        assert torch.equal(await it.current(), torch.arange(float(LARGE)))
        assert [item[0].item() async for item in it.items(1)] == [0.0]


async def test_owner_that_cannot_copy_to_the_host_either_ends_the_call(job, eventually, monkeypatch):
    def fails(tensor):
        raise RuntimeError("the device has failed")

    async with acquainted(job, Echo(), eventually) as (it, far, _near):
        far.driver.refuses = RuntimeError("out of mappings")
        with monkeypatch.context() as context:
            context.setattr(OnDevice, "cpu", fails)
            with pytest.raises(rpc.CallRefusedError, match=r"cannot be sent from host memory: .*the device has failed"):
                await it.note(on_device(torch.ones(LARGE)))
        assert await it.echo(1) == 1


def _damaged(places):
    """Return descriptions of a loan that no sender makes, and whether the call can run all the same."""
    ((place, kind, nbytes, location),) = places
    yield b"", False
    yield b"\xff\xff", False
    yield msgpack.packb([]), False
    yield msgpack.packb([[9, kind, nbytes, location]]), False
    yield msgpack.packb([[1, kind, nbytes, location]]), False
    # These the receiver declines, and gets the content.
    yield msgpack.packb([[place, kind, nbytes - 1, location]]), True
    yield msgpack.packb([[place, "xpu", nbytes, location]]), True
    yield msgpack.packb([[place, kind, nbytes, location[:10]]]), True
    yield msgpack.packb([[place, kind, 1 << 60, location]]), True


@pytest.mark.parametrize("number", range(9))
async def test_damaged_loan_ends_at_most_its_call(job, eventually, monkeypatch, number):
    async with acquainted(job, Echo(), eventually) as (it, _far, near):
        attach, expected = near.loans.attach, None

        def damaged(buffers):
            nonlocal expected
            plain, loan = attach(buffers)
            description, expected = list(_damaged(msgpack.unpackb(plain[-1])))[number]
            return [*plain[:-1], memoryview(description)], loan

        tensor = on_device(torch.randn(LARGE))
        with monkeypatch.context() as context:
            context.setattr(near.loans, "attach", damaged)
            call = it.echo(tensor, torch.ones(4))
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        if expected:
            assert torch.equal(outcome[0], tensor)
        else:
            assert isinstance(outcome, rpc.CallRefusedError), outcome
        assert await it.echo(1) == 1
        assert not near.lent


@pytest.mark.parametrize("message", [[wire.ANSWER, 77, ""], [wire.DECLINED, 77, "no"], [wire.LENT_BYTES, 77, ""]])
async def test_message_about_a_loan_that_was_not_made_ends_the_channel(job, eventually, message, caplog):
    async with acquainted(job, Echo(), eventually) as (_it, _far, near):
        (channel,) = channels_of(near.session)
        channel.send(pack_plain(message))
        await eventually(lambda: not channel.is_open)
        assert re.search("77, which was not|loan 77 was declined", caplog.text)


# -- how long a tensor is kept, and what may happen until then ---------------------------------------------


async def test_argument_is_kept_until_it_has_been_copied_and_no_longer(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, _far, near):
        near.driver.holds = True
        tensor = on_device(torch.ones(LARGE))
        kept = weakref.ref(tensor.untyped_storage())
        call = it.echo(tensor)
        del tensor
        gc.collect()
        await near.ping()
        assert kept() is not None
        assert not call.done()
        near.driver.go_on()
        assert torch.equal(await call, torch.ones(LARGE))
        del call
        gc.collect()
        await eventually(lambda: kept() is None)
        assert not near.lent


async def test_result_is_as_it_was_when_the_method_returned(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, _far, _near):
        for number in range(3):
            assert torch.equal(await it.current(), torch.arange(float(LARGE)) + number)
        assert not passed_the_host()


async def test_calls_of_one_object_begin_in_their_order_although_a_tensor_comes_late(job, eventually):
    echo = Echo()
    async with acquainted(job, echo, eventually) as (it, _far, near):
        near.driver.holds = True
        values = [on_device(torch.full((LARGE,), 7.0)), "second", torch.ones(100_000), 4]
        calls = [it.note(value) for value in values]
        await near.ping()
        assert not echo.log
        near.driver.go_on()
        await asyncio.gather(*calls)
        assert [type(each) for each in echo.log] == [OnDevice, str, torch.Tensor, int]


def hold(owner, borrower, moment):
    """Let the owner's tensors never be ready, or the borrower's copies never be complete."""
    if moment == "before":
        owner.driver.holds = True
    else:
        borrower.device.stream.hold()


@pytest.mark.parametrize(("moment", "ends"), [("before", "cancelled"), ("during", "cancelled"), ("during", "overdue")])
async def test_call_that_ends_before_its_tensor_was_copied_returns_the_loan(job, eventually, overdue, moment, ends):
    echo = Echo()
    async with acquainted(job, echo, eventually) as (it, far, near):
        hold(near, far, moment)
        tensor = on_device(torch.ones(LARGE))
        kept = weakref.ref(tensor.untyped_storage())
        if ends == "overdue":
            await overdue(lambda limit: it.call("note", [tensor], timeout=limit), lambda: tasks_of(far.device))
            del tensor
        else:
            call = it.call("note", [tensor])
            del tensor
            await eventually(lambda: near.lent if moment == "before" else tasks_of(far.device))
            await near.ping()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            del call
        await near.ping()
        assert kept() is not None, "the device may still read it"
        near.driver.go_on()
        far.device.stream.release()
        await eventually(lambda: not near.lent)
        gc.collect()
        assert kept() is None
        assert not echo.log


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_result_that_nobody_wants_returns_the_loan(job, eventually, moment):
    async with acquainted(job, Echo(), eventually) as (it, far, near):
        hold(far, near, moment)
        call = it.current()
        await near.ping()
        call.cancel()
        await near.ping()
        far.driver.go_on()
        near.device.stream.release()
        await eventually(lambda: not far.lent)


async def test_call_that_waits_for_credit_and_is_given_up_ends_its_loan(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, _far, near):
        caller = caller_of(it)
        caller._window = 1
        near.driver.holds = True
        first, second = (it.note(on_device(torch.ones(LARGE))) for _ in range(2))
        assert len(near.lent) == 2
        second.cancel()
        assert len(near.lent) == 1
        near.driver.go_on()
        await first
        await eventually(lambda: not near.lent)


async def test_refused_call_returns_its_loan(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, _far, near):
        for arguments in ([on_device(torch.ones(LARGE))], [on_device(torch.ones(LARGE)), torch.ones(1_000_000)]):
            with pytest.raises(rpc.CallRefusedError, match="has no method"):
                await it.call("missing", arguments)
            with pytest.raises(rpc.CallRefusedError, match="do not fit"):
                await it.call("note", [*arguments, 1])
        await eventually(lambda: not near.lent)


@pytest.mark.parametrize("which", ["argument", "result"])
async def test_no_memory_at_the_receiver_ends_the_call_with_the_reason(job, eventually, monkeypatch, which):
    empty = torch.empty

    def full(*args, **kwargs):
        if args[0] == 4 * (LARGE + 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*args, **kwargs)

    echo = Echo()
    echo.weights = on_device(torch.ones(LARGE + 1))
    async with acquainted(job, echo, eventually) as (it, far, near):
        monkeypatch.setattr(torch, "empty", full)
        with pytest.raises(
            rpc.CallRefusedError if which == "argument" else rpc.ResultError,
            match="the device has no memory for its tensors: CUDA out of memory",
        ):
            await (it.note(on_device(torch.ones(LARGE + 1))) if which == "argument" else it.current())
        await eventually(lambda: not near.lent and not far.lent)
        assert torch.equal(await it.echo(on_device(torch.ones(LARGE))), torch.ones(LARGE))


async def test_no_memory_for_the_copy_of_a_result_lets_it_go_through_the_host(job, eventually, monkeypatch):
    def full(tensor, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with acquainted(job, Echo(), eventually) as (it, _far, _near):
        with monkeypatch.context() as context:
            context.setattr(OnDevice, "clone", full)
            assert torch.equal(await it.current(), torch.arange(float(LARGE)))
        assert OnDevice.num_to_host == 1


# -- streams, many receivers, references ------------------------------------------------------------------


@pytest.mark.each_loop
async def test_items_of_a_stream_keep_their_order_and_content(job, eventually):
    async with acquainted(job, Echo(), eventually) as (it, _far, _near):
        found = [item async for item in it.items(12)]
        values = [item[0].item() if isinstance(item, torch.Tensor) else item for item in found]
        assert values == [value for number in range(12) for value in ([number, -number] if number % 2 else [number])]
        assert all(torch.all(item == item[0]) for item in found if isinstance(item, torch.Tensor))
        assert not passed_the_host()


async def test_generator_is_not_far_ahead_and_ends_with_the_loop_that_takes_its_items(job, eventually):
    echo = Echo()
    async with acquainted(job, echo, eventually) as (it, far, _near):
        async with aiter(it.items(1000)) as items:
            assert (await anext(items))[0] == 0
            await eventually(lambda: len(echo.log) >= 10)
        for _ in range(3):
            await it.echo(1)
        assert len(echo.log) <= 17
        await eventually(lambda: not far.lent)


@pytest.mark.parametrize("refusing", [False, True])
async def test_one_tensor_for_many_receivers(job, eventually, refusing):
    tensor = on_device(torch.randn(LARGE))
    async with (
        rpc.serve({"it": Echo()}, job, config=CONFIG),
        rpc.serve({"it": Echo()}, job, config=CONFIG),
        rpc.serve({"it": [Echo(), Echo()]}, job, config=CONFIG),
        rpc.connect(job, config=CONFIG),
    ):
        everyone = await rpc.find_all("it", count=4)
        if refusing:
            PretendLending.all[1].kinds = []
        loans = {caller_of(each).loans for each in everyone}
        for found in await everyone.echo(tensor):
            assert torch.equal(found, tensor)
        await eventually(lambda: sum(each.lends(tensor) is not None for each in loans) == 3 - refusing)
        before = OnDevice.num_to_host
        await everyone.note(tensor)
        assert OnDevice.num_to_host - before == refusing, "one copy in host memory for all who need it"
        assert await everyone.echo(1) == [1] * 4
        assert not any(lent_by(each) for each in loans)


async def test_references_are_read_and_written_on_the_device(job, eventually):
    echo = Echo()
    async with acquainted(job, echo, eventually) as (it, _far, _near):
        ref = await it.weights.ref()
        assert torch.equal(await ref.read(), echo.weights)
        mine = on_device(torch.zeros(LARGE))
        address = mine.data_ptr()
        assert await ref.read_into(mine) is mine
        assert mine.data_ptr() == address
        assert torch.equal(mine, echo.weights)
        part = on_device(torch.zeros(20_000))
        await ref.read_into(part, slice(0, LARGE, 2))
        assert torch.equal(part, echo.weights[::2])
        await ref.write(on_device(torch.full((LARGE,), 3.0)))
        assert torch.all(echo.weights == 3)
        assert not passed_the_host()


async def test_reference_beside_a_tensor_that_nobody_wants_is_returned(job, eventually):
    class Maker(Echo):
        async def make(self):
            referred = Echo()
            made.append(weakref.ref(referred))
            return [rpc.refer(referred), on_device(torch.ones(LARGE))]

    made = []
    async with acquainted(job, Maker(), eventually) as (it, far, near):
        far.driver.holds = True
        call = it.make()
        await near.ping()
        call.cancel()
        far.driver.go_on()
        await eventually(lambda: gc.collect() is not None and made[0]() is None)


async def test_output_of_a_remote_module_and_its_gradient_stay_on_the_device(job, eventually):
    async with acquainted(job, rpc.ServedModule(torch.nn.Identity()), eventually) as (it, _far, _near):
        remote = await rpc.RemoteModule.attach(it)
        inputs = on_device(torch.randn(LARGE)).requires_grad_()
        output = await remote(inputs)
        assert torch.equal(output, inputs)
        await rpc.backward((output * 2).sum())
        assert torch.all(inputs.grad == 2)
        assert not passed_the_host()


# -- the end of a session --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving_to(calling, job, eventually):
    """Serve an object that lends its result to a session; yield the object and the serving side."""
    tensor = on_device(torch.ones(LARGE))
    async with rpc.serve({"it": Echo()}, job, config=CONFIG) as serving:
        it, far = await calling.find("it"), Side(serving)
        far.loans.lends(tensor)
        await eventually(lambda: far.loans.lends(tensor))
        yield it, far


async def test_result_is_complete_although_its_session_ends_at_once(job, eventually):
    async with rpc.connect(job, config=CONFIG) as calling:
        near = Side(calling)
        async with serving_to(calling, job, eventually) as (it, far):
            near.device.stream.hold()
            call = it.current()
            await it.echo(1)
            assert far.lent
            asyncio.get_running_loop().call_later(0.01, near.device.stream.release)
        assert torch.equal(await call, torch.arange(float(LARGE)))
        assert not passed_the_host()


async def test_call_whose_owner_closes_before_the_copy_ends_with_an_error(job, eventually, monkeypatch):
    monkeypatch.setattr(session_module, "_RETURNED_WITHIN", 0.01)
    async with rpc.connect(job, config=CONFIG) as calling:
        async with serving_to(calling, job, eventually) as (it, far):
            far.driver.holds = True
            call = it.current()
            await it.echo(1)
        with pytest.raises(rpc.CalleeLostError) as caught:
            await call
        assert isinstance(caught.value, PeerLostError)
        await eventually(lambda: not tasks_of(calling.lending))


async def test_owner_that_closes_while_its_device_is_asked_is_not_waited_for(job, eventually, monkeypatch):
    monkeypatch.setattr(session_module, "_RETURNED_WITHIN", 0.01)
    asked, may_return = threading.Event(), threading.Event()

    def query(_):
        asked.set()
        assert may_return.wait(60)
        return False

    async with rpc.connect(job, config=CONFIG) as calling:
        async with serving_to(calling, job, eventually) as (it, _):
            monkeypatch.setattr(TheirEvent, "query", query)
            call = it.current()
            await eventually(asked.is_set)
        with pytest.raises(rpc.CalleeLostError):
            await call
        may_return.set()
        await eventually(lambda: not tasks_of(calling.lending))


def test_blocking_calls_under_torchs_names_use_the_same_path(until):
    options = blocking.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=60.0)
    blocking.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        tensor = on_device(torch.randn(LARGE))

        def call():
            before = passed_the_host()
            assert torch.equal(blocking.rpc_sync("alone", torch.mul, args=(tensor, 2)), tensor * 2)
            assert blocking.rpc_async("alone", torch.add, args=(tensor, 1)).wait().device == CUDA
            return passed_the_host() == before

        until(call)
    finally:
        blocking.shutdown()
