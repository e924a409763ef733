"""Device tensors between real processes, over a pretended device that they share, of which some are killed and stopped."""

import asyncio
from pathlib import Path

import pytest
import torch

from asyncdist import rpc
from asyncdist.config import Config
from asyncdist.rpc import session as session_module
from tests.rpc.conftest import caller_of, hear, lent_by, tasks_of
from tests.support.device_tensors import OnDevice
from tests.support.shared_device import SharedLending

pytestmark = pytest.mark.processes
PROGRAM = Path(__file__).parent / "program_lent.py"
LARGE = 40_000
CONFIG = Config(timeout=60.0, heartbeat=60.0)


@pytest.fixture(autouse=True)
def _pretended(monkeypatch):
    monkeypatch.setattr(session_module, "DeviceLending", SharedLending)
    monkeypatch.setattr(SharedLending, "all", [])
    monkeypatch.setattr(OnDevice, "num_to_host", 0)


@pytest.fixture
def start(nursery, job):
    """Start a process that serves a keeper, and wait until it does."""

    async def start(heartbeat=60.0):
        process = nursery.start(PROGRAM, "serve", job, heartbeat)
        await hear(process, "serving")
        return process

    return start


async def acquainted(session, keeper, eventually):
    """Let both directions learn that the other process maps the memory; return a tensor that this process lends."""
    tensor = session.lending.driver.tensor(torch.ones(LARGE))
    await eventually(lambda: caller_of(keeper).loans.lends(tensor))
    async with asyncio.timeout(60):
        while True:
            before = session.lending.num_from_host
            await keeper.get()
            if session.lending.num_from_host == before:
                return tensor


async def test_tensors_of_another_process_are_copied_from_its_memory(start, job, eventually):
    await start()
    async with rpc.connect(job, config=CONFIG) as session:
        keeper = await rpc.find("keeper")
        tensor = await acquainted(session, keeper, eventually)
        before = await keeper.state()
        assert await keeper.take(tensor) == LARGE
        found = await keeper.get()
        assert torch.equal(found, torch.arange(float(LARGE)))
        assert (await keeper.state())["from host"] == before["from host"]
        assert not OnDevice.num_to_host


@pytest.mark.parametrize("moment", ["before", "during", pytest.param("after", marks=pytest.mark.exhaustive)])
async def test_owner_killed_while_its_memory_is_mapped_ends_the_calls(start, job, eventually, moment):
    process = await start()
    async with rpc.connect(job, config=CONFIG) as session:
        keeper, other = await rpc.find("keeper"), await rpc.find("other")
        tensor = await acquainted(session, keeper, eventually)
        lending = session.lending
        if moment == "before":
            await keeper.hold()
        elif moment == "during":
            lending.stream.hold()
        calls = [keeper.get() for _ in range(3)]
        await other.ping()
        if moment == "after":
            results = await asyncio.gather(*calls)
        process.kill()
        if moment == "after":
            process.wait()
            assert all(torch.equal(each, torch.arange(float(LARGE))) for each in results)
        else:
            for call in calls:
                with pytest.raises(rpc.CalleeLostError, match="may have run"):
                    await call
        with pytest.raises(rpc.CalleeLostError):
            await keeper.take(tensor)
        if moment == "during":
            assert lending.driver.mapped, "unmapped while the device copies"
            lending.stream.release()
        await eventually(lambda: not tasks_of(lending) and not lending.driver.mapped)
        # Its device and its loans go on with another process.
        await start()
        again = await rpc.find("keeper")
        assert await again.take(await acquainted(session, again, eventually)) == LARGE


@pytest.mark.parametrize("moment", ["before", "during", pytest.param("after", marks=pytest.mark.exhaustive)])
async def test_borrower_killed_ends_its_loans_and_others_are_served(start, job, eventually, moment):
    process = await start()
    async with rpc.connect(job, config=CONFIG) as session:
        keeper, other = await rpc.find("keeper"), await rpc.find("other")
        tensor = await acquainted(session, keeper, eventually)
        driver, loans = session.lending.driver, caller_of(keeper).loans
        if moment == "before":
            driver.holds = True
        elif moment == "during":
            await keeper.hold_copies()
        calls = [keeper.take(tensor) for _ in range(3)]
        await other.ping()
        if moment == "after":
            await asyncio.gather(*calls)
        else:
            assert lent_by(loans)
        process.kill()
        if moment != "after":
            for call in calls:
                with pytest.raises(rpc.CalleeLostError):
                    await call
        process.wait()
        await eventually(lambda: not lent_by(loans))
        driver.go_on()
        await start()
        again = await rpc.find("keeper")
        assert await again.take(await acquainted(session, again, eventually)) == LARGE


@pytest.mark.parametrize("moment", ["before", "during"])
async def test_killed_caller_leaves_the_callee_and_its_device_to_others(start, nursery, job, eventually, moment):
    await start()
    async with rpc.connect(job, config=CONFIG):
        keeper, other = await rpc.find("keeper"), await rpc.find("other")
        caller = nursery.start(PROGRAM, "call", job, moment)
        await hear(caller, "lent")
        state = await keeper.state()
        assert state["tasks"] == 3
        caller.kill()
        caller.wait()
        async with asyncio.timeout(60):
            while (await keeper.state())["tasks"] > (3 if moment == "during" else 0):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert (await keeper.state())["taken"] == state["taken"] == 1
        assert await other.ping() == 1
        assert await keeper.take(torch.ones(LARGE)) == LARGE


async def test_stopped_owner_ends_the_calls_within_the_heartbeat_limit(start, job, eventually):
    process = await start(heartbeat=0.5)
    async with rpc.connect(job, config=Config(timeout=60.0, heartbeat=0.5)) as session:
        keeper, other = await rpc.find("keeper"), await rpc.find("other")
        await acquainted(session, keeper, eventually)
        await keeper.hold()
        call = keeper.get()
        await other.ping()
        process.stop()
        with pytest.raises(rpc.CalleeLostError) as caught:
            await call
        assert caught.value.noticed == "heartbeat"
        await eventually(lambda: not tasks_of(session.lending) and not session.lending.driver.mapped)
        process.resume()
