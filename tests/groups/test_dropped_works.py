"""In debug mode a Work that a program drops without waiting for it is reported with the line of the call."""

import asyncio
import gc
import inspect
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import asyncdist
import asyncdist.sync as dist
from asyncdist.groups.group import Group
from tests.support.stopwatch import Stopwatch

ALONE = {"rank": 0, "world_size": 1}


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("ASYNCDIST_DEBUG", "1")


def reports_of(call, count=1):
    """Return the warnings that ``call()`` causes. The background loop may hold a work a moment longer than the caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        gc.collect()
        since = Stopwatch()
        while len(caught) < count and since.seconds() < 5.0:
            time.sleep(0.001)
    return caught


DROPPING = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(2)),
    "barrier": lambda group: group.barrier(),
    "all_gather_object": lambda group: group.all_gather_object([None], 1),
    "all_reduce through the API": lambda group: asyncdist.all_reduce(torch.ones(2), group=group),
}


@pytest.mark.parametrize("drop", DROPPING.values(), ids=DROPPING)
async def test_dropped_work_is_reported_with_the_line_of_the_call(drop, debug):
    async with asyncdist.process_group(store=asyncdist.HashStore(), **ALONE) as group:
        (report,) = reports_of(lambda: drop(group))
        assert report.category is RuntimeWarning
        line = inspect.getsourcelines(drop)[1]
        assert (report.filename, report.lineno) == (__file__, line)
        assert "on group 'world', rank 0, was dropped, and nothing waited for it" in str(report.message)


async def test_dropped_work_of_a_persistent_collective_is_reported(debug):
    async with asyncdist.process_group(store=asyncdist.HashStore(), **ALONE) as group:
        call = await group.all_reduce_init(torch.ones(2))

        def drop():
            call.start()
            call.free()

        (report,) = reports_of(drop)
        assert (report.filename, report.lineno) == (__file__, inspect.getsourcelines(drop)[1] + 1)


async def test_every_way_of_waiting_counts_as_use(debug):
    async with asyncdist.process_group(store=asyncdist.HashStore(), **ALONE) as group:

        def start():
            return group.all_reduce(torch.ones(2))

        async def use_all():
            await start()
            await asyncio.gather(start(), start())
            await asyncio.wait({start()})
            await asyncio.create_task(start())
            unstarted = asyncio.create_task(start())
            unstarted.cancel()
            await asyncio.wait({unstarted})
            start().add_done_callback(lambda _: None)
            start().get_future().wait()
            for wait in ("wait", "synchronize"):
                await asyncio.to_thread(getattr(start(), wait))
            for look in ("result", "exception", "is_completed", "is_success", "done"):
                getattr(start(), look)()
            await asyncio.to_thread(lambda: group.all_reduce(torch.ones(2), background=False))

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await use_all()
            gc.collect()
        assert caught == []


def test_dropped_work_of_the_blocking_api_is_reported_and_blocking_calls_are_not(debug):
    with dist.process_group(store=dist.HashStore(), **ALONE) as group:
        tensor = torch.ones(1)
        (report,) = reports_of(lambda: dist.all_reduce(tensor, async_op=True, group=group))
        assert str(report.message).startswith("the Work of all_reduce on group 'world', rank 0, was dropped")
        assert len(reports_of(lambda: group.new_group().all_reduce(tensor))) == 1

        def block():
            dist.all_reduce(tensor, group=group)
            dist.barrier(group=group)
            dist.all_gather_object([None], 1, group=group)

        assert reports_of(block, count=0) == []


def test_works_of_two_ranks_over_links_and_of_ddp(debug, tmp_path):
    def program(rank):
        with dist.process_group("tcp", f"file://{tmp_path}/store", world_size=2, rank=rank) as group:
            model = dist.DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
            model(torch.ones(2, 4)).sum().backward()
            with model.join():
                for _ in range(1 + rank):
                    model(torch.ones(2, 4)).sum().backward()
            if rank == 0:
                group.send(torch.ones(1), 1)
            else:
                group.recv(torch.ones(1), 0).wait()
            group.barrier(background=False)

    def both():
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(program, range(2)))

    (report,) = reports_of(both)
    assert str(report.message).startswith("the Work of send on group 'world', rank 0, was dropped")


def test_debug_mode_of_asyncio_reports_too(monkeypatch):
    monkeypatch.delenv("ASYNCDIST_DEBUG", raising=False)

    async def main(expected):
        async with asyncdist.process_group(store=asyncdist.HashStore(), **ALONE) as group:
            return type(group) is Group, len(reports_of(lambda: group.barrier(), expected))

    assert asyncio.run(main(1), debug=True) == (False, 1)
    assert asyncio.run(main(0), debug=False) == (True, 0)


PROGRAM = """
import asyncio, torch
import asyncdist as dist

async def main():
    await dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    await dist.destroy_process_group()

def run(test):
    asyncio.run(main())
"""


@pytest.mark.processes
def test_program_prints_file_line_and_source_of_the_dropped_call(tmp_path, nursery):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    rank = nursery.start(program, "run", environment={"ASYNCDIST_DEBUG": "1"})
    assert rank.wait() == 0
    assert f"{program}:8: RuntimeWarning: the Work of all_reduce on group 'world', rank 0, was dropped" in rank.output()
    assert "\n  dist.all_reduce(tensor)\n" in rank.output()
