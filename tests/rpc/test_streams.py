"""Async generators as streams: items, back-pressure, the end, errors, and callers that leave early."""

import asyncio
import gc

import pytest
import torch

from asyncdist import rpc
from asyncdist.errors import UsageError
from asyncdist.rpc.calls import WINDOW
from tests.rpc.conftest import num_open, read_into


class Source:
    """Yields numbers, and remembers how far it came and how it ended."""

    def __init__(self):
        self.sent = 0
        self.ended = []

    async def count(self, until):
        try:
            for number in range(until):
                self.sent += 1
                yield number
            self.ended.append("done")
        finally:
            self.ended.append("closed")

    async def tensors(self, count):
        tensor = torch.zeros(1_000_000)
        for number in range(count):
            # The memory of the last item is used again.
            yield tensor.fill_(number)

    async def fail(self, after):
        for number in range(after):
            yield number
        raise ValueError("no more")

    async def stuck(self):
        yield 1
        await asyncio.Event().wait()

    async def wrong(self):
        yield object()

    async def value(self):
        return 3


async def test_items_arrive_in_order_and_the_stream_ends(serving):
    source = Source()
    async with serving(source) as it:
        assert [number async for number in it.count(1000)] == list(range(1000))
        assert [number async for number in it.count(0)] == []
        assert source.ended == ["done", "closed"] * 2
        assert num_open(it) == 0


async def test_stream_is_awaited_or_iterated_over_asynchronously_and_a_value_is_no_stream(serving):
    async with serving(Source()) as it:
        call = it.count(3)
        with pytest.raises(UsageError, match=r"it\.count\(\) returns a call: .* with `async for`"):
            list(call)
        assert [number async for number in await call] == [0, 1, 2]
        with pytest.raises(UsageError, match=r"it.value\(\) returns a value and is no async generator: await it"):
            await read_into([], it.value())


async def test_long_items_are_sent_before_the_generator_goes_on(serving):
    async with serving(Source()) as it:
        found = [(item[0].item(), item[-1].item()) async for item in it.tensors(10)]
        assert found == [(number, number) for number in range(10)]


async def test_generator_waits_for_a_slow_caller(serving, eventually):
    source = Source()
    async with serving(source) as it:
        stream = it.count(1000)
        await eventually(lambda: source.sent == WINDOW + 1)
        await asyncio.sleep(0.01)
        assert source.sent == WINDOW + 1
        taken = aiter(stream)
        for number in range(100):
            assert await anext(taken) == number
        await asyncio.sleep(0.01)
        assert source.sent <= 100 + WINDOW + 1


async def test_stream_that_is_left_early_is_closed_at_the_callee(serving, eventually):
    source = Source()
    async with serving(source) as it:
        async for number in it.count(1000):
            if number == 3:
                break
        gc.collect()
        await eventually(lambda: source.ended == ["closed"])
        call = it.count(1000)
        async with call.__aiter__() as stream:
            assert await anext(stream) == 0
        await eventually(lambda: source.ended == ["closed"] * 2)
        with pytest.raises(UsageError, match=r"count\(\) has been iterated over: keep `await .*`, or call it again"):
            await anext(call.__aiter__())
        assert num_open(it) == 0


async def test_cancelled_reader_closes_the_generator(serving, eventually):
    source = Source()
    async with serving(source) as it:

        async def read():
            async for _ in it.stuck():
                begun.set()

        begun = asyncio.Event()
        task = asyncio.ensure_future(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        await eventually(lambda: num_open(it) == 0)


class Gate:
    """A stream whose first item comes when the test says so."""

    def __init__(self):
        self.open = asyncio.Event()
        self.ended = []

    async def items(self):
        try:
            await self.open.wait()
            yield 1
            yield 2
        finally:
            self.ended.append("closed")


async def test_limit_that_passes_before_an_item_ends_the_waiting_only(serving):
    gate = Gate()
    async with serving(gate) as it:
        stream = aiter(it.items())
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.01)
        gate.open.set()
        assert [item async for item in stream] == [1, 2]
        assert num_open(it) == 0


async def test_stream_that_is_dropped_before_its_first_item_is_cancelled(serving, eventually):
    gate = Gate()
    async with serving(gate) as it:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(aiter(it.items())), 0.01)
        gc.collect()
        await eventually(lambda: gate.ended == ["closed"])
        assert num_open(it) == 0


async def test_error_of_the_generator_comes_after_its_items(serving):
    async with serving(Source()) as it:
        found = []
        with pytest.raises(rpc.RemoteError, match=r"it.fail\(\) at .* it raised ValueError: no more"):
            await read_into(found, it.fail(40))
        assert found == list(range(40))


async def test_item_that_cannot_be_carried_ends_the_stream(serving):
    async with serving(Source()) as it:
        with pytest.raises(rpc.ResultError, match="cannot be carried"):
            await read_into([], it.wrong())


async def test_deadline_limits_the_whole_stream(serving, overdue):
    async with serving(Source()) as it:
        found = []
        error = await overdue(lambda limit: read_into(found, it.stuck(timeout=limit)), lambda: found)
        assert f"within {error.timeout:g} s" in str(error)
        assert found == [1]
