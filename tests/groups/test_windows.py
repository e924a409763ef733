"""Windows: puts and signals among ranks, what is refused, and what the death or silence of a rank ends."""

import asyncio
from pathlib import Path

import pytest
import torch

import asyncdist
from asyncdist.errors import (
    GroupAbortedError,
    NotInitializedError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
    UsageError,
)
from asyncdist.testing.cluster import world_of

PROGRAM = Path(__file__).parent / "program_window.py"
LARGE = 20 << 20
"""More bytes than a stopped peer's sockets and shared memory take."""


def mapped(count, dtype=torch.float32):
    return asyncdist.empty(count, dtype=dtype).zero_()


def ordinary(count, dtype=torch.float32):
    return torch.zeros(count, dtype=dtype)


KINDS = {"mapped": (mapped, None), "ordinary": (ordinary, None), "tcp": (ordinary, ["first", "second", "third"])}


@pytest.fixture(params=KINDS)
def kind(request):
    """What makes the tensors of the windows, and the hosts of the ranks."""
    return KINDS[request.param]


async def windows_of(groups, each, make, *sizes, dtype=torch.float32):
    """Return the windows of all ranks and their tensors."""
    tensors = [make(size, dtype) for size in sizes]
    windows = await each(groups, lambda group: group.new_window(tensors[group.rank()]))
    return windows, tensors


async def free(each, windows):
    await each(windows, lambda window: window.tensor_deregister())


# -- puts and signals --------------------------------------------------------------------------------


@pytest.mark.each_loop
async def test_each_rank_writes_its_part_of_the_next_one(kind, each):
    make, hosts = kind
    async with world_of(3, hosts=hosts) as groups:
        windows, tensors = await windows_of(groups, each, make, 30, 30, 30)

        async def turn(rank, value):
            after, before = (rank + 1) % 3, (rank - 1) % 3
            await windows[rank].put(torch.full((2, 5), value + rank), after, 10 * rank)
            await windows[rank].signal(after)
            await windows[rank].wait_signal(before)
            assert (tensors[rank][10 * before : 10 * before + 10] == value + before).all()
            await groups[rank].barrier()

        for value in (1.0, 5.0):
            await asyncio.gather(*[turn(rank, value) for rank in range(3)])
        # The rest of a tensor has not changed.
        assert [int((tensor != 0).sum()) for tensor in tensors] == [10, 10, 10]
        await free(each, windows)


@pytest.mark.parametrize("count", [1, 70_000, 3_000_000])
async def test_sizes_and_dtypes_of_ranks_may_differ(kind, each, count):
    make, hosts = kind
    async with world_of(2, hosts=hosts and hosts[:2]) as groups:
        tensors = [make(count + 1, torch.float16), make(2 * count, torch.int32)]
        windows = await each(groups, lambda group: group.new_window(tensors[group.rank()]))
        numbers = torch.arange(count, dtype=torch.int32)
        await windows[0].put(numbers, 1, count)
        await windows[1].put(numbers.to(torch.float16)[:0], 0)
        assert torch.equal(tensors[1][count:], numbers)
        assert not tensors[1][:count].any()
        strided = torch.ones(2 * count, dtype=torch.float16)[::2]
        await windows[1].put(strided, 0, 1)
        assert float(tensors[0][0]) == 0.0
        assert (tensors[0][1:] == 1).all()
        await windows[0].put(torch.full([count + 1], 3.0, dtype=torch.float16), 0)
        assert (tensors[0] == 3).all(), "a rank puts into its own tensor"
        await free(each, windows)


async def test_signal_arrives_after_the_puts_before_it(kind, each):
    make, hosts = kind
    async with world_of(2, hosts=hosts and hosts[:2]) as groups:
        windows, tensors = await windows_of(groups, each, make, LARGE, LARGE, dtype=torch.uint8)
        source = torch.ones(LARGE, dtype=torch.uint8)
        put = windows[0].put(source, 1)
        signal = windows[0].signal(1)
        await windows[1].wait_signal(0)
        assert tensors[1].all()
        await signal
        await put
        await free(each, windows)


async def test_signals_that_nobody_awaits_are_kept_for_each_window_and_rank(each):
    async with world_of(3) as groups:
        first, _ = await windows_of(groups, each, ordinary, 1, 1, 1)
        second, _ = await windows_of(groups, each, ordinary, 1, 1, 1)
        for _ in range(50):
            await first[0].signal(1)
        await first[2].signal(1)
        await first[1].wait_signal(2)
        for _ in range(50):
            await first[1].wait_signal(0)
        with pytest.raises(OperationTimeoutError, match="rank 0"):
            await second[1].wait_signal(0, timeout=0.01)
        # As with a message of a group, all members learn of it.
        with pytest.raises(GroupAbortedError, match="rank 1 timed out"):
            await second[0].wait_signal(1)


async def test_mapped_tensor_is_that_of_the_other_rank(each):
    async with world_of(2) as groups:
        tensors = [mapped(24).view(2, 3, 4), ordinary(24)]
        windows = await each(groups, lambda group: group.new_window(tensors[group.rank()]))
        assert await windows[0].map_remote_tensor(0) is tensors[0]
        theirs = await windows[1].map_remote_tensor(0)
        assert theirs.shape == (2, 3, 4)
        theirs[1, 2, 3] = 5.0
        tensors[0][0, 0, 0] = 7.0
        assert tensors[0].sum() == theirs.sum() == 12.0
        assert await windows[1].is_mapped(0)
        assert not await windows[0].is_mapped(1)
        with pytest.raises(UnsupportedError, match=r"rank 1 .*ordinary memory"):
            await windows[0].map_remote_tensor(1)
        await free(each, windows)
    async with world_of(2, hosts=["first", "second"]) as groups:
        windows, _ = await windows_of(groups, each, mapped, 4, 4)
        with pytest.raises(UnsupportedError, match="another host"):
            await windows[0].map_remote_tensor(1)
        await free(each, windows)


def test_threads_block_in_the_calls(together):
    def program(group):
        started = group.new_window(mapped(8))
        started.wait()
        window, other = started.result(), 1 - group.rank()
        for call in (window.put(torch.ones(4), other, 4), window.signal(other), window.wait_signal(other)):
            call.wait()
        found = window.map_remote_tensor(group.rank())
        found.wait()
        total = float(found.result().sum())
        window.tensor_deregister().wait()
        return total

    assert together(2, program) == [4.0, 4.0]


# -- what is refused ---------------------------------------------------------------------------------


async def test_wrong_calls_change_nothing(kind, each):
    make, hosts = kind
    async with world_of(2, hosts=hosts and hosts[:2]) as groups:
        windows, tensors = await windows_of(groups, each, make, 16, 16)
        window = windows[0]
        for tensor, offset in ((torch.ones(16), 8), (torch.ones(17), 0), (torch.ones(1), -1), (torch.ones(1), 16)):
            with pytest.raises(UsageError, match=r"exceeds the window size of rank 1, 16 elements"):
                window.put(tensor, 1, offset)
        with pytest.raises(UsageError, match=r"float64 into torch\.float32 of rank 1"):
            window.put(torch.ones(4, dtype=torch.float64), 1)
        for rank in (2, -1):
            with pytest.raises(UsageError, match="window of 2 ranks"):
                window.put(torch.ones(4), rank)
            with pytest.raises(UsageError, match="window of 2 ranks"):
                window.wait_signal(rank)
        with pytest.raises(UsageError, match="double registration"):
            window.tensor_register(torch.ones(4))
        with pytest.raises(ValueError, match="timeout"):
            window.put(torch.ones(4), 1, timeout=-1)
        assert not tensors[1].any()
        await free(each, windows)
        for call in (lambda: window.put(torch.ones(4), 1), lambda: window.signal(1), window.tensor_deregister):
            with pytest.raises(UsageError, match="not registered"):
                call()


async def test_window_is_registered_again_with_another_tensor(each):
    async with world_of(2) as groups:
        windows = await each(groups, lambda group: group.new_window())
        for size in (4, 9):
            tensors = [ordinary(size), ordinary(size)]
            await each(groups, lambda group, t=tensors: windows[group.rank()].tensor_register(t[group.rank()]))
            await windows[0].put(torch.ones(size), 1)
            assert tensors[1].all()
            await free(each, windows)


@pytest.mark.parametrize("wrong", [torch.zeros(0), torch.zeros(4, 4).t(), "text", torch.zeros(2, device="meta")])
async def test_all_ranks_learn_that_one_has_passed_no_usable_tensor(each, wrong):
    async with world_of(2) as groups:
        windows = await each(groups, lambda group: group.new_window())
        first = windows[0].tensor_register(wrong)
        second = windows[1].tensor_register(ordinary(4))
        with pytest.raises(UsageError, match="registered"):
            await first
        with pytest.raises(UsageError, match="rank 0 has registered no tensor"):
            await second
        # The window remains usable.
        await each(groups, lambda group: windows[group.rank()].tensor_register(ordinary(4)))
        await free(each, windows)


async def test_deregistration_waits_for_the_puts_of_all_ranks(kind, each):
    make, hosts = kind
    async with world_of(2, hosts=hosts and hosts[:2]) as groups:
        windows, tensors = await windows_of(groups, each, make, LARGE, LARGE, dtype=torch.uint8)
        put = windows[0].put(torch.ones(LARGE, dtype=torch.uint8), 1)
        await free(each, windows)
        assert put.is_success()
        assert tensors[1].all()


async def test_window_whose_owner_gives_it_up_alone_ends_puts_by_name(each):
    async with world_of(2, hosts=["first", "second"]) as groups:
        windows, _ = await windows_of(groups, each, ordinary, 1000, 1000)
        await windows[0].put(torch.ones(10), 1)
        with pytest.raises(OperationTimeoutError):
            await windows[1].tensor_deregister(timeout=0.01)
        with pytest.raises((PeerLostError, GroupAbortedError), match="rank 1"):
            await windows[0].put(torch.ones(10), 1)


async def test_end_of_the_group_ends_its_windows(each):
    async with world_of(2) as groups:
        parts = [group.new_group([0, 1]) for group in groups]
        windows, _ = await windows_of(parts, each, ordinary, 10, 10)
        waiting = windows[0].wait_signal(1)
        parts[1].abort("the test")
        with pytest.raises(GroupAbortedError, match="the test"):
            await waiting
        for window in windows:
            with pytest.raises((GroupAbortedError, UsageError)):
                await window.put(torch.ones(1), 1 - windows.index(window))
        others = [group.new_group([0, 1]) for group in groups]
        windows, _ = await windows_of(others, each, ordinary, 10, 10)
        for other in others:
            other.close()
        with pytest.raises(UsageError, match="not registered"):
            windows[0].put(torch.ones(1), 1)
        with pytest.raises(NotInitializedError, match="destroyed"):
            others[0].new_window()


# -- other processes ---------------------------------------------------------------------------------


@pytest.fixture
def start_pair(nursery, tmp_path):
    """Start two ranks with windows: ``start_pair(kind)``; the test tells each what to do, and hears the outcome."""

    def start_pair(kind, **environment):
        meeting = f"file://{tmp_path}/meeting"
        ranks = []
        for rank in range(2):
            hosts = {"ASYNCDIST_HOST": f"host {rank}"} if kind == "tcp" else {}
            settings = {"ASYNCDIST_HEARTBEAT": "0.5", **hosts, **environment}
            ranks.append(nursery.start(PROGRAM, "keep", rank, meeting, kind == "mapped", LARGE, environment=settings))
        assert [rank.hear() for rank in ranks] == ["ready", "ready"]
        return ranks

    return start_pair


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_put_needs_nothing_of_a_busy_target(start_pair, kind):
    first, second = start_pair(kind)
    first.say(("put", LARGE))
    assert first.hear() == "done", "the program of the other rank waits for the test"
    second.say(("sum",))
    assert second.hear() == LARGE
    for rank in (first, second):
        rank.say(("end",))
    assert [rank.wait() for rank in (first, second)] == [0, 0], first.output() + second.output()


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_lost_rank_ends_calls_by_its_name(start_pair, kind, way):
    first, second = start_pair(kind)
    first.say(("put", 10))
    assert first.hear() == "done"
    second.stop()
    first.say(("until_lost",))
    if way == "killed":
        second.kill()
    put, signal = first.hear()
    for kind_of, text in (put, signal):
        assert kind_of == "PeerLostError", text
        assert "rank 1 was lost" in text
    first.kill()
