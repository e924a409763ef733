"""Python stacks of threads and tasks."""

import asyncio
import json
import threading

import pytest
import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.kernel.tracing import stacks
from asyncdist.kernel.tracing.stacks import Stack
from asyncdist.testing.cluster import run_ranks, world_of

NAMES = ("asyncdist-runtime", "MainThread")


def of(kind, name):
    """Return the lines of one stack of this process; empty if there is none of that name."""
    found = [Stack.parse(each) for each in json.loads(json.dumps(stacks.collect()))]
    return next((stack.frames for stack in found if (stack.kind, stack.name) == (kind, name)), ())


def test_stack_of_a_thread_ends_at_the_line_in_which_it_waits():
    waiting, go_on = threading.Event(), threading.Event()

    def wait():
        waiting.set()
        go_on.wait()  # the line

    thread = threading.Thread(target=wait, name="a waiting thread")
    thread.start()
    waiting.wait()
    (line,) = [frame for frame in of("thread", "a waiting thread") if frame.file == __file__]
    go_on.set()
    thread.join()
    assert (line.code, line.function.rpartition(".")[2]) == ("go_on.wait()  # the line", "wait")


def test_main_thread_comes_first_and_without_the_collector():
    first = Stack.parse(stacks.collect()[0])
    assert (first.kind, first.name) == ("thread", "MainThread")
    assert first.frames[-1].function == "test_main_thread_comes_first_and_without_the_collector"
    assert first.lines()[0] == "thread MainThread:"
    assert first.lines()[-1] == "    first = Stack.parse(stacks.collect()[0])"


async def test_stack_of_a_task_reaches_the_innermost_await():
    blocked = asyncio.get_running_loop().create_future()

    async def inner():
        await blocked  # the line

    class Awaitable:
        def __await__(self):
            return (yield from inner().__await__())

    async def outer():
        await Awaitable()

    stacks.watch_tasks(asyncio.get_running_loop())
    task = asyncio.create_task(outer(), name="a waiting task")
    await asyncio.sleep(0)
    # Another thread collects, as the status port does.
    frames = await asyncio.to_thread(of, "task", "a waiting task")
    blocked.set_result(None)
    await task
    functions = [frame.function.rpartition(".")[2] for frame in frames]
    assert functions[:1] == ["outer"]
    assert functions[-1:] == ["inner"]
    assert frames[-1].code == "await blocked  # the line"


def test_only_threads_of_the_library_without_code_of_the_program_are_of_the_library():
    background_loop()
    own, main = ([each for each in map(Stack.parse, stacks.collect()) if each.name == name] for name in NAMES)
    assert [each.is_of_library for each in own + main] == [True, False]
    entered, go_on = threading.Event(), threading.Event()

    def callback():
        entered.set()
        go_on.wait()

    background_loop().loop.call_soon_threadsafe(callback)
    entered.wait()
    (busy,) = [each for each in map(Stack.parse, stacks.collect()) if each.name == NAMES[0]]
    go_on.set()
    assert not busy.is_of_library


async def test_stack_ends_in_the_line_of_the_program_that_calls_the_library():
    async with world_of(2) as groups:

        async def call():
            await groups[0].all_reduce(torch.ones(1))  # the line

        stacks.watch_tasks(asyncio.get_running_loop())
        task = asyncio.create_task(call(), name="a calling task")
        await asyncio.sleep(0)
        frames = await asyncio.to_thread(of, "task", "a calling task")
        assert [frame.code for frame in frames] == ["await groups[0].all_reduce(torch.ones(1))  # the line"]
        await groups[1].all_reduce(torch.ones(1))
        await task


def test_stack_of_a_blocked_rank_ends_in_its_call():
    def rank(group):
        if group.rank() == 1:
            for _ in range(10_000):
                codes = [frame.code for frame in of("thread", "rank 0")]
                if codes and codes[-1].endswith("# the call"):
                    break
            else:
                pytest.fail(f"the stack ends in {codes[-1]}")
        group.barrier().wait()  # the call

    run_ranks(2, rank)


def test_long_stack_keeps_its_innermost_frames():
    def descend(depth):
        return descend(depth - 1) if depth else stacks.collect()[0]

    frames = Stack.parse(descend(200)).frames
    assert len(frames) == 64
    assert {frame.function.rpartition(".")[2] for frame in frames} == {"descend"}
