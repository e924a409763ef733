"""Real processes that are killed and stopped with calls in flight: each call ends with its own error, others are served."""

import asyncio
from pathlib import Path

import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from tests.rpc.conftest import hear, num_open

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_served.py"
both_ways = pytest.mark.parametrize("host", [None, "far"], ids=["unix", "tcp"])


@pytest.fixture
def start(nursery, job):
    """Start a process that serves, and wait until it does."""

    async def start(heartbeat=60.0, host=None, rank=0):
        process = nursery.start(PROGRAM, "serve", job, heartbeat, host, rank)
        await hear(process, "serving")
        return process

    return start


@both_ways
async def test_callee_killed_during_a_call_ends_all_calls_with_the_reason(start, job, host):
    process = await start(host=host)
    async with rpc.connect(job, config=Config(timeout=60.0, heartbeat=60.0)):
        worker = await rpc.find("worker")
        stream = aiter(worker.stream())
        assert await anext(stream) == 0
        calls = [worker.wait(), worker.wait_in_thread(), worker.echo(torch.ones(20_000_000))]
        await hear(process, "waiting")
        process.kill()
        for call in calls[:2]:
            with pytest.raises(
                rpc.CalleeLostError, match=r"worker\.wait.*at rank 0 \(process .*may have run"
            ) as caught:
                await call
            assert caught.value.may_have_run
            assert caught.value.peer == worker.peer
            assert isinstance(caught.value, PeerLostError)
        await asyncio.wait(calls)
        with pytest.raises(rpc.CalleeLostError):
            [item async for item in stream]
        with pytest.raises(rpc.CalleeLostError, match="the method has not run"):
            await worker.echo(1)
        with pytest.raises(rpc.NameNotFoundError):
            await rpc.find("worker", timeout=0.1)


async def test_caller_finds_the_process_that_takes_the_place_of_a_killed_one(start, job):
    process = await start()
    async with rpc.connect(job, config=Config(timeout=60.0)):
        worker = await rpc.find("worker")
        process.kill()
        with pytest.raises(rpc.CalleeLostError):
            await worker.wait()
        # The store still has the record of the killed process.
        finding = asyncio.ensure_future(rpc.find("worker"))
        await start()
        assert await (await finding).echo(1) == 1


@both_ways
async def test_reference_whose_owner_was_killed_names_the_object_and_the_process(start, job, host):
    process = await start(host=host)
    async with rpc.connect(job, config=Config(timeout=60.0, heartbeat=60.0)):
        worker = await rpc.find("worker")
        itself, tensor = await worker.itself(), await worker.weights.ref()
        assert (await itself.call("num_cancelled"), (await tensor.read(where=slice(2))).tolist()) == (0, [0, 1])
        process.kill()
        process.wait()
        for use in (
            lambda: itself.read(),
            lambda: itself.call("num_cancelled"),
            lambda: tensor.read_into(torch.empty(2), where=slice(2)),
            lambda: tensor.write(torch.ones(4)),
        ):
            with pytest.raises(rpc.CalleeLostError, match=r"<(Worker|Tensor)>\.\w+\(\) at rank 0 \(process ") as caught:
                await use()
            assert isinstance(caught.value, PeerLostError)


async def test_one_of_many_killed_is_named_and_the_others_answer(start, job):
    processes = [await start(rank=rank) for rank in range(3)]
    async with rpc.connect(job, config=Config(timeout=60.0)):
        workers = await rpc.find_all("worker", count=3)
        assert await workers.echo(7) == [7, 7, 7]
        processes[1].kill()
        processes[1].wait()
        with pytest.raises(rpc.PartialError, match=r"1 of 3 failed: .*rank 1 \(process") as caught:
            await workers.echo(8)
        assert caught.value.results == [8, None, 8]
        assert isinstance(caught.value.failures[1], rpc.CalleeLostError)


async def test_killed_caller_has_its_calls_cancelled_and_others_are_served(start, nursery, job):
    server = await start()
    async with rpc.connect(job, config=Config(timeout=60.0)):
        worker = await rpc.find("worker")
        caller = nursery.start(PROGRAM, "call", job)
        await hear(caller, "calling")
        for _ in range(10):
            await hear(server, "waiting")
        caller.kill()
        async with asyncio.timeout(60):
            while await worker.num_cancelled() < 10:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        data = torch.ones(1_000_000)
        assert torch.equal(await worker.echo(data), data)


@both_ways
async def test_many_calls_to_a_stopped_process_all_end(start, job, host):
    process = await start(heartbeat=0.5, host=host)
    async with rpc.connect(job, config=Config(timeout=60.0, heartbeat=0.5)):
        worker = await rpc.find("worker")
        assert await worker.echo(1) == 1
        process.stop()
        brief = [worker.echo(number, timeout=0.05) for number in range(5000)]
        long = [worker.echo(number) for number in range(5000)]
        big = [worker.echo(torch.ones(1_000_000)) for _ in range(5)]
        outcomes = await asyncio.gather(*brief, *long, *big, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes[:5000]} <= {rpc.CallTimeoutError, rpc.CalleeLostError}
        assert type(outcomes[0]) is rpc.CallTimeoutError
        assert {type(outcome) for outcome in outcomes[5000:]} == {rpc.CalleeLostError}
        assert {outcome.noticed for outcome in outcomes[5000:]} == {"heartbeat"}
        assert not outcomes[9999].may_have_run
        assert num_open(worker) == 0
        process.resume()
