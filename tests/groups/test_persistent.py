"""Persistent collectives: every one started twice on the same memory, what refuses to start, and what is as usual."""

import asyncio
import gc
import inspect
import threading
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import asyncdist
import asyncdist.sync
from asyncdist.errors import (
    GroupAbortedError,
    LoopThreadError,
    MismatchError,
    NotInitializedError,
    OperationTimeoutError,
    UnsupportedError,
    UsageError,
)
from asyncdist.groups.persistent import PersistentCollective, Preparing, start_all
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import barriers, moving, reducing
from tests.support.devices import devices_of


def prepared(group, name, *arguments, **options):
    """Prepare a collective, and wait until all ranks have."""
    return getattr(group, f"{name}_init")(*arguments, background=False, **options).result()


def tensors_in(arguments):
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


class Twice:
    """A group each of whose collectives is prepared and started twice, with the same values."""

    def __init__(self, group, blocks):
        self._group, self._blocks = group, blocks

    def rank(self):
        return self._group.rank()

    def __getattr__(self, name):
        if not hasattr(self._group, f"{name}_init"):
            return getattr(self._group, name)

        def call(*arguments):
            tensors = list(tensors_in(arguments))
            before = [tensor.clone() for tensor in tensors]
            persistent = prepared(self._group, name, *arguments)
            persistent.run()
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            self._group.barrier(background=False)
            work = persistent.start()
            if self._blocks:
                work.wait()
            return work

        return call


@pytest.mark.parametrize("blocks", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_starts_again_on_the_same_memory(transport, size, blocks):
    cases = [
        *reducing(size, 5, torch.float32),
        *moving(size, 5, torch.int64),
        *barriers(size),
        *reducing(size, 0, torch.int32),
    ]

    def program(group):
        for case in cases:
            for work in case.start(Twice(group, blocks)):
                work.wait()

    run_ranks(size, program, transport=transport)
    for case in cases:
        case.check()


def test_two_hosts_of_two_ranks():
    def program(group):
        tensor = torch.zeros(3)
        total, meeting = prepared(group, "all_reduce", tensor), prepared(group, "barrier")
        found = []
        for step in range(3):
            tensor.fill_(group.rank() + step)
            meeting.run()
            found.append(total.run()[0].item())
        return found

    assert run_ranks(4, program, transport="auto", hosts=["a", "a", "b", "b"]) == [[6, 10, 14]] * 4


@pytest.mark.parametrize(("one", "other"), [("all_reduce_init", "all_reduce"), ("all_reduce_init", "all_reduce_init")])
@pytest.mark.parametrize("hosts", [None, ["a", "a", "b", "b"]], ids=["one host", "two hosts"])
def test_mismatch_is_told_when_it_is_prepared(one, other, hosts):
    def program(group):
        name, count = (one, 3) if group.rank() else (other, 4 if other == one else 3)
        with pytest.raises(MismatchError) as raised:
            getattr(group, name)(torch.ones(count), background=False).result()
        return str(raised.value)

    for text in run_ranks(4, program, transport="auto" if hosts else "shm", hosts=hosts):
        assert "all_reduce_init(3 x float32, SUM)" in text
        assert "rank 0 called" in text


async def test_awaited_api():
    async with world_of(2) as groups:
        tensors = [torch.tensor([float(rank)]) for rank in range(2)]
        calls = await asyncio.gather(
            *(asyncdist.all_reduce_init(tensor, "max", group) for tensor, group in zip(tensors, groups, strict=True))
        )
        for step in (5.0, 7.0):
            tensors[1].fill_(step)
            values = await asyncio.gather(*(call.start() for call in calls))
            assert values[0] is tensors[0]
            assert [tensor.item() for tensor in tensors] == [step, step]


async def test_works_of_calls_that_are_complete_at_once_are_as_others():
    async with world_of(1, transport="inproc") as (group,):
        tensor, seen = torch.ones(2), []
        call = await group.all_reduce_init(tensor)
        works = [call.start() for _ in range(3)]
        for work in works:
            work.add_done_callback(seen.append)
        assert [await work for work in works] + [work.result() for work in works] == [tensor] * 6
        assert (await start_all([call]), seen) == ([tensor], works)
        assert await asyncio.wait_for(call.start(), 10) is tensor


def test_blocking_api_translates_global_ranks():
    def program(group):
        part = group.new_group([1, 2])
        if group.rank() == 0:
            return None
        tensor = torch.full((2,), float(group.rank()))
        call = asyncdist.sync.broadcast_init(tensor, src=2, group=part)
        assert isinstance(call, PersistentCollective)
        return call.run().tolist()

    assert run_ranks(3, program) == [None, [2, 2], [2, 2]]


def test_list_starts_as_one():
    def program(group):
        one, other = torch.ones(2), torch.full((3,), 2.0)
        calls = [prepared(group, "all_reduce", one), prepared(group, "all_reduce", other)]
        work = start_all(calls)
        work.wait()
        return [tensor.tolist() for tensor in work.result()]

    assert run_ranks(2, program) == [[[2, 2], [4, 4, 4]]] * 2


def test_tensors_that_need_conversion_are_read_and_written_anew():
    def program(group):
        matrix = torch.zeros(3, 2)
        array = np.zeros(2, dtype=np.float32)
        sums = [prepared(group, "all_reduce", matrix[:, 0]), prepared(group, "all_reduce", array)]
        for step in (1.0, 2.0):
            matrix.fill_(step)
            array[:] = step
            for each in sums:
                each.run()
            assert matrix.tolist() == [[2 * step, step]] * 3
            assert array.tolist() == [2 * step] * 2

    run_ranks(2, program, transport="shm")


def test_tensors_on_a_device():
    async def main():
        async with devices_of(2) as devices:
            tensors = [torch.ones(2), torch.ones(2)]
            preparing = [Preparing(device.host, device) for device in devices]
            calls = await asyncio.gather(*(each.all_reduce(of) for each, of in zip(preparing, tensors, strict=True)))
            for total in (2, 4):
                await asyncio.gather(*(call.start() for call in calls))
                assert [tensor.tolist() for tensor in tensors] == [[total] * 2] * 2

    asyncio.run(main())


# -- what refuses to start --------------------------------------------------------------------------


def moved(tensor, call, group):
    tensor.set_(torch.ones(2))


def released(tensor, call, group):
    tensor.untyped_storage().resize_(0)


def cut(tensor, call, group):
    tensor.untyped_storage().resize_(4)


def freed(tensor, call, group):
    call.free()
    call.free()


def destroyed(tensor, call, group):
    group.close()


def aborted(tensor, call, group):
    group.abort()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (moved, UsageError, "prepare it again"),
        (released, UsageError, "prepare it again"),
        (cut, UsageError, "prepare it again"),
        (freed, UsageError, "was freed"),
        (destroyed, NotInitializedError, "make a new one"),
        (aborted, GroupAbortedError, "aborted"),
    ],
    ids=["moved", "released", "cut", "freed", "destroyed", "aborted"],
)
def test_call_that_cannot_start_says_why(change, error, words):
    with asyncdist.sync.process_group("inproc", store=asyncdist.HashStore(), rank=0, world_size=1) as world:
        group = world.new_group([0])
        tensor = torch.ones(2)
        call = prepared(group, "all_reduce", tensor)
        change(tensor, call, group)
        with pytest.raises(error, match=words):
            call.run()


def test_tensor_of_another_shape_keeps_the_memory_that_was_prepared():
    def program(group):
        tensor = torch.ones(4)
        call = prepared(group, "all_reduce", tensor)
        tensor.resize_(2, 1)
        call.run()
        return tensor.resize_(4).tolist()

    assert run_ranks(2, program, transport="shm") == [[2, 2, 2, 2]] * 2


def test_converted_tensor_of_another_shape_is_refused():
    with asyncdist.sync.process_group("inproc", store=asyncdist.HashStore(), rank=0, world_size=1) as group:
        tensor = torch.ones(4, 4).t()
        call = prepared(group, "all_reduce", tensor[:2])
        call.run()
        leaf = torch.ones(2, requires_grad=True)
        other = prepared(group, "all_gather_single", torch.zeros(2), leaf)
        other.run()
        leaf.data = torch.ones(3)
        with pytest.raises(UsageError, match="prepare it again"):
            other.run()


def test_freed_call_lets_go_of_its_tensors():
    with asyncdist.sync.process_group("inproc", store=asyncdist.HashStore(), rank=0, world_size=1) as group:
        tensor = torch.ones(2)
        kept = weakref.ref(tensor)
        call = prepared(group, "all_reduce", tensor)
        call.run()
        call.start().wait()
        call.free()
        del tensor
        gc.collect()
        assert kept() is None


def test_blocking_form_in_the_loop_of_the_world_is_refused_before_it_begins():
    async def main():
        async with world_of(2) as groups:
            tensors = torch.ones(1), torch.ones(1)
            with pytest.raises(LoopThreadError):
                asyncdist.sync.all_reduce_init(tensors[0], group=groups[0])
            calls = await asyncio.gather(
                *(group.all_reduce_init(each) for group, each in zip(groups, tensors, strict=True))
            )
            with pytest.raises(LoopThreadError):
                calls[0].run()
            await asyncio.gather(*(call.start() for call in calls))
            assert [tensor.item() for tensor in tensors] == [2, 2]

    asyncio.run(main())


def test_caller_may_change_its_lists():
    def program(group):
        outputs = [torch.zeros(1), torch.zeros(1)]
        first, second = outputs
        call = prepared(group, "all_gather", outputs, torch.tensor([group.rank() + 1.0]))
        outputs.clear()
        return [tensor.item() for tensor in call.run()], first.item(), second.item()

    assert run_ranks(2, program, transport="shm") == [([1, 2], 1, 2)] * 2


async def test_second_start_before_the_end_of_the_first_is_refused():
    async with world_of(2) as groups:
        tensors = torch.ones(1), torch.ones(1)
        calls = await asyncio.gather(*(group.all_reduce_init(of) for group, of in zip(groups, tensors, strict=True)))
        first = calls[0].start()
        with pytest.raises(UsageError, match="has not completed"):
            calls[0].start()
        await asyncio.gather(first, calls[1].start())
        await asyncio.gather(*(call.start() for call in calls))
        assert [tensor.item() for tensor in tensors] == [4, 4]


async def test_cancelled_wait_leaves_the_call_running():
    async with world_of(2) as groups:
        tensors = torch.ones(1), torch.ones(1)
        calls = await asyncio.gather(*(group.all_reduce_init(of) for group, of in zip(groups, tensors, strict=True)))
        work = calls[0].start()

        async def wait():
            await work

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await calls[1].start()
        assert (await work).item() == 2


def test_timeout_of_a_call_names_who_is_missing():
    ended = threading.Event()

    def program(group):
        call = prepared(group, "all_reduce", torch.ones(1))
        if group.rank() == 0:
            with pytest.raises(OperationTimeoutError, match="rank 1"):
                call.run(timeout=0.05)
            ended.set()
        assert ended.wait(20)

    run_ranks(2, program)


def test_regrouped_members_prepare_anew():
    both = threading.Barrier(2)

    def program(group):
        call = prepared(group, "all_reduce", torch.ones(1))
        both.wait()
        successor = group.regroup(background=False).result()
        with pytest.raises(NotInitializedError):
            call.run()
        tensor = torch.ones(1)
        return prepared(successor, "all_reduce", tensor).run().item()

    assert run_ranks(2, program) == [2, 2]


def test_messages_are_not_persistent():
    with asyncdist.sync.process_group("inproc", store=asyncdist.HashStore(), rank=0, world_size=1) as group:
        with pytest.raises(UnsupportedError):
            Preparing(group).send(torch.ones(1), 0)
        with pytest.raises(UnsupportedError):
            Preparing(group).recv(torch.ones(1), 0)


# -- what works as for other calls ------------------------------------------------------------------


def test_hooks_and_autograd_see_each_call():
    def program(group):
        tensor, seen = torch.ones(2), []
        call = prepared(group, "all_reduce", tensor)
        version = tensor._version
        with group.register_hook(on_end=lambda record: seen.append((record.op, record.nbytes))):
            for _ in range(2):
                call.run()
                assert tensor._version > version
                version = tensor._version
        assert seen == [("all_reduce", 8)] * 2

    run_ranks(2, program, transport="shm")


def test_modes_of_the_program_do_not_see_the_call():
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} ran in the mode")

    def program(group):
        call = prepared(group, "all_reduce", torch.ones(2))
        with Refusing():
            return call.run()

    assert [each.tolist() for each in run_ranks(2, program, transport="shm")] == [[2, 2]] * 2


@pytest.mark.parametrize("name", ["all_reduce_init", "barrier_init", "gather_init"])
def test_help_of_both_apis(name):
    for api in (asyncdist, asyncdist.sync):
        text = getattr(api, name).__doc__
        assert name.removesuffix("_init") in text
        assert "MismatchError" in text
        results = "PersistentCollective[", "Work[PersistentCollective["
        assert str(inspect.signature(getattr(api, name)).return_annotation).startswith(results)
    assert getattr(asyncdist.Group, name).__name__ == name
