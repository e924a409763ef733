"""Remote references: reading, writing and calling what they refer to, and how long the object is kept."""

import asyncio
import functools
import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.errors import UsageError
from tests.rpc.conftest import channels_of, number_of

serve, connect = (functools.partial(each, config=Config(timeout=60.0)) for each in (rpc.serve, rpc.connect))


class Thing:
    """An object that is referred to."""

    def __init__(self):
        self.calls = 0

    async def add(self, number):
        self.calls += number
        return self.calls

    def in_thread(self):
        return "from a thread"

    async def stream(self):
        yield 1
        yield 2


class Owner:
    """Has weights, and makes things."""

    def __init__(self):
        self.weights = torch.arange(2_000_000.0).view(2000, 1000)
        self.things = []
        self.kept = None

    async def make(self):
        thing = Thing()
        self.things.append(weakref.ref(thing))
        return rpc.refer(thing)

    async def keep(self, reference):
        self.kept = reference

    async def drop(self):
        self.kept = None

    async def is_mine(self, reference):
        return reference.is_owner and reference.local_value().calls

    async def use(self, reference):
        return await reference.call("add", 10)

    @property
    def num_alive(self):
        gc.collect()
        return sum(thing() is not None for thing in self.things)


@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
async def test_tensor_and_its_parts_are_read_and_written(serving, local):
    owner = Owner()
    async with serving(owner, local=local) as it:
        ref = await it.weights.ref()
        assert (ref.shape, ref.dtype, ref.owner) == (owner.weights.shape, torch.float32, it.peer)
        assert torch.equal(await ref.read(), owner.weights)
        mine = torch.zeros(2000, 1000)
        address = mine.data_ptr()
        assert await ref.read_into(mine) is mine
        assert mine.data_ptr() == address
        assert torch.equal(mine, owner.weights)
        for where in (3, slice(5, 2000, 7), (slice(None), 4), (..., slice(1, 3)), (slice(2), slice(0, 900)), ...):
            part = owner.weights[where]
            assert torch.equal(await ref.read(where), part)
            assert torch.equal(await ref.read_into(torch.zeros(part.shape), where), part)
        columns = torch.zeros(1000, 2000).t()
        assert torch.equal(await ref.read_into(columns), owner.weights)
        await ref.write(torch.full((1000,), 7.0), 3)
        assert torch.equal(owner.weights[3], torch.full((1000,), 7.0))


async def test_part_that_does_not_fit_is_refused(serving):
    async with serving(Owner()) as it:
        ref = await it.weights.ref()
        with pytest.raises(rpc.RemoteError, match=r"the part is \(1000,\) float32, and the tensor to read into \(3,\)"):
            await ref.read_into(torch.zeros(3), 0)
        with pytest.raises(ValueError, match="float64"):
            await ref.read_into(torch.zeros(1000, dtype=torch.float64), 0)
        with pytest.raises(rpc.RemoteError, match="IndexError"):
            await ref.read(5000)
        with pytest.raises(UsageError, match="where= is a number"):
            await ref.read("all")
        with pytest.raises(UsageError, match="await read"):
            ref.local_value()
        with pytest.raises(rpc.RemoteError, match="has no attribute 'wights'"):
            await it.wights.ref()
        thing = await it.make()
        with pytest.raises(rpc.RemoteError, match="is a Thing and no tensor"):
            await thing.read_into(torch.zeros(1))


async def test_only_what_is_named_is_offered(serving):
    class Policy(Owner):
        def __init__(self):
            super().__init__()
            self.layer, self.limit, self.names = torch.nn.Linear(1, 1), 3, ["a"]

        async def get_weights(self):
            return rpc.refer(self.weights)

    policy = Policy()
    async with serving(policy) as it:
        for other, kind in (("layer", "Linear"), ("limit", "int"), ("names", "list"), ("make", "method")):
            with pytest.raises(
                rpc.RemoteError, match=rf"'{other}' of an object of type .* is a {kind}, and only those"
            ):
                await getattr(it, other).ref()
        for tensor in (await it.weights.ref(), await it.get_weights()):
            with pytest.raises(rpc.CallRefusedError, match="a reference to a tensor has no methods: use read"):
                await tensor.call("zero_")
        thing = await it.make()
        with pytest.raises(rpc.RemoteError, match="is a Thing and no tensor"):
            await thing.write(torch.zeros(1))
        # No object of a reference leads to its attributes, whatever a caller sends.
        policy.things[0]().weights = policy.weights
        it._address = (number_of(thing), 0)
        with pytest.raises(rpc.RemoteError, match="no references to attributes"):
            await it.other.ref()
    async with serving(Policy(), references=False) as it:
        with pytest.raises(rpc.RemoteError, match="PermissionError: this process offers no references to attributes"):
            await it.weights.ref()
        assert await (await it.make()).call("add", 2) == 2
        assert await (await it.get_weights()).read(where=3) is not None


async def test_cancelled_read_writes_no_further_byte(serving):
    async with serving(Owner()) as it:
        ref = await it.weights.ref()
        for steps in range(12):
            mine = torch.full((2000, 1000), -1.0)
            reading = asyncio.ensure_future(ref.read_into(mine))
            for _ in range(steps):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            seen = mine.clone()
            await it.is_mine(await it.make())
            if reading.cancelled():
                assert torch.equal(mine, seen)


async def test_methods_of_a_referred_object_are_called(serving):
    async with serving(Owner()) as it:
        thing = await it.make()
        assert await thing.call("add", 3) == 3
        assert await thing.call("in_thread") == "from a thread"
        assert [number async for number in await thing.call("stream")] == [1, 2]
        assert await it.is_mine(thing) == 3
        assert await it.use(thing) == 13
        assert "remote reference to Thing at process" in repr(thing)


async def test_object_is_kept_while_a_reference_exists_and_forgotten_after_the_last(serving, eventually):
    owner = Owner()
    async with serving(owner) as it:
        first, second = await it.make(), await it.make()
        assert owner.num_alive == 2
        await it.keep(first)
        del first
        gc.collect()
        await it.is_mine(second)
        assert owner.num_alive == 2
        await it.drop()
        await eventually(lambda: owner.num_alive == 1)
        assert await second.call("add", 1) == 1
        del second
        await eventually(lambda: owner.num_alive == 0)


async def test_reference_that_a_holder_passes_on_keeps_the_object(job, eventually):
    owner, holder = Owner(), Owner()
    async with serve({"owner": owner}, job):
        async with serve({"holder": holder}, job):
            async with connect(job) as session:
                thing = await (await session.find("owner")).make()
                third = await session.find("holder")
                await third.keep(thing)
                del thing
            gc.collect()
            # The one that made it has left, and the holder has never talked to the owner before.
            assert await holder.kept.call("add", 5) == 5
            assert owner.num_alive == 1
        # The holder has ended without returning its reference.
        await eventually(lambda: owner.num_alive == 0)
        holder.kept = None


@pytest.mark.parametrize("leaves_at_once", [False, True])
async def test_reference_passed_on_before_the_holder_has_connected_keeps_the_object(job, eventually, leaves_at_once):
    class Forwarder(Owner):
        async def forward(self, reference):
            await self.next.keep(reference)

    owner, forwarder, last = Owner(), Forwarder(), Owner()
    async with serve({"owner": owner}, job) as serving, serve({"last": last}, job) as lasting:

        def connected():
            return {channel.peer.id for channel in channels_of(serving)}

        async with serve({"forwarder": forwarder}, job) as forwarding:
            forwarder.next = await forwarding.find("last")
            async with connect(job) as session:
                thing = await (await session.find("owner")).make()
                # Neither the forwarder nor the last holder has talked to the owner before.
                await (await session.find("forwarder")).forward(thing)
                del thing
                gc.collect()
            if not leaves_at_once:
                await eventually(lambda: forwarding.references.address.id in connected())
        await eventually(lambda: connected() == {lasting.references.address.id})
        assert await last.kept.call("add", 5) == 5
        last.kept = None
        await eventually(lambda: owner.num_alive == 0)


async def test_release_does_not_look_at_other_objects(job):
    owner, things = Owner(), [Thing() for _ in range(100)]
    objects = {"owner": owner, "things": things}
    async with serve(objects, job) as serving, connect(job) as session:
        maker = await session.find("owner")
        table, gone = serving.references, channel_of("gone")

        async def num_steps():
            """Return the steps of two releases: of one object, and of all objects of a process that has gone."""
            first, second = await maker.make(), await maker.make()
            await asyncio.gather(first.call("add", 1), second.call("add", 1))
            (channel,) = channels_of(serving)
            table.granted(channel, number_of(second), gone.peer.id)
            release = steps_of(lambda: table.released(channel, number_of(first), 1))
            return release, steps_of(lambda: table.drop_absent(gone.peer.id))

        few = await num_steps()
        others = [await maker.make() for _ in range(100)]
        await asyncio.gather(*[each.call("add", 1) for each in others], (await session.find_all("things")).add(1))
        assert await num_steps() == few


def channel_of(peer):
    """Return a channel to a process that has gone."""
    return SimpleNamespace(peer=SimpleNamespace(id=peer))


def steps_of(call):
    """Return the number of instructions of Python that a call executes, without finalizers of what earlier tests left."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


async def test_many_passes_of_one_reference_leave_no_hold(job, eventually):
    owner, holder = Owner(), Owner()
    async with serve({"owner": owner}, job), serve({"holder": holder}, job), connect(job) as session:
        thing = await (await session.find("owner")).make()
        third = await session.find("holder")
        await asyncio.gather(*[third.keep(thing) for _ in range(50)], *[third.drop() for _ in range(50)])
        await asyncio.gather(*[third.use(thing) for _ in range(20)])
        refused = [third.nothing(thing) for _ in range(5)]
        await asyncio.wait(refused)
        assert all(isinstance(call.exception(), rpc.CallRefusedError) for call in refused)
        cancelled = [third.use(thing) for _ in range(5)]
        for call in cancelled:
            call.cancel()
        await third.drop()
        del thing
        holder.kept = None
        await eventually(lambda: owner.num_alive == 0)


async def test_reference_whose_owner_ended_raises(job):
    async with connect(job) as session:
        async with serve({"owner": Owner()}, job):
            thing = await (await session.find("owner")).make()
            assert await thing.call("add", 1) == 1
        with pytest.raises(rpc.CalleeLostError, match=r"<Thing>.add\(\) at .*cannot be reached"):
            await thing.call("add", 1)


async def test_hold_for_a_process_that_never_connects_ends(job, eventually, monkeypatch):
    owner = Owner()
    async with serve({"owner": owner}, job) as serving, connect(job) as session:
        thing = await (await session.find("owner")).make()
        (channel,) = channels_of(session.references)
        number, table, died = number_of(thing), serving.references, channel_of("a process that died")
        table.granted(channel, number, died.peer.id)
        released, release = [], table.released
        monkeypatch.setattr(table, "released", lambda *hold: released.append(hold[1:]) or release(*hold))
        del thing
        gc.collect()
        await eventually(lambda: released)
        assert (released, owner.num_alive) == ([(number, 1)], 1)
        # The timer of the grant does the same.
        table.drop_absent(died.peer.id)
        assert owner.num_alive == 0
