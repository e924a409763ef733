"""Calls over links whose steps are recorded: what one call leaves must not reach the next."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import gc
import itertools
import sys
import weakref
from functools import partial

import pytest
import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.config import Config
from asyncdist.errors import GroupAbortedError, MismatchError
from asyncdist.kernel.algorithms import pairwise
from asyncdist.kernel.algorithms.schedule import Send
from asyncdist.kernel.collectives.recorded import LocalCopy, RecordedCall, recorded_blocks
from asyncdist.kernel.engine.direct_calls import MAX_DIRECT_NBYTES, DirectStep
from asyncdist.kernel.memory.buffers import Scratch
from asyncdist.kernel.transport.base import Receive
from asyncdist.kernel.transport.wire_format import KEY
from asyncdist.testing.cluster import world_of
from asyncdist_transports.tcp.transport import TcpLink

SIZE = 3
ROOT = 1
COUNT = 4


@pytest.fixture(params=[COUNT, 20_000], ids=["small", "large"])
def count(request, monkeypatch):
    """The elements of a block. With the larger number a call does not run directly unless its rank waits for peers."""
    monkeypatch.setattr(sys.modules[__name__], "COUNT", request.param)


def value(rank, block, turn):
    """Return a tensor that tells its rank, its block and its call."""
    return torch.arange(float(COUNT)) + 100 * rank + 10 * block + 1000 * turn


def row(rank, turn):
    return [value(rank, block, turn) for block in range(SIZE)]


def column(block, turn):
    return [value(rank, block, turn) for rank in range(SIZE)]


def empty_row():
    return [torch.zeros(COUNT) for _ in range(SIZE)]


def at_root(group, tensors):
    return tensors if group.rank() == ROOT else None


def uneven(group, turn):
    """Rank r sends (r + peer) % SIZE elements to each peer."""
    counts = [(group.rank() + peer) % SIZE for peer in range(SIZE)]
    inputs = [part[:count] for part, count in zip(row(group.rank(), turn), counts, strict=True)]
    due = [part[:count] for part, count in zip(column(group.rank(), turn), counts, strict=True)]
    return counts, inputs, due


# Each returns the tensors of a call, a function that makes the call, and the results: in the first tensor of the call.
def all_reduce(group, turn):
    return value(group.rank(), 0, turn), lambda out: group.all_reduce(out), sum(column(0, turn))


def average(group, turn):
    tensor = value(group.rank(), 0, turn)
    return tensor, lambda out: group.all_reduce(out, ReduceOp.AVG), sum(column(0, turn)) / SIZE


def reduce(group, turn):
    own = value(group.rank(), 0, turn)
    return own.clone(), lambda out: group.reduce(out, ROOT), sum(column(0, turn)) if group.rank() == ROOT else own


def broadcast(group, turn):
    return value(group.rank(), 0, turn), lambda out: group.broadcast(out, ROOT), value(ROOT, 0, turn)


def all_gather(group, turn):
    return empty_row(), lambda out: group.all_gather(out, value(group.rank(), 0, turn)), column(0, turn)


def all_gather_single(group, turn):
    due = torch.cat(column(0, turn))
    return torch.zeros(SIZE * COUNT), lambda out: group.all_gather_single(out, value(group.rank(), 0, turn)), due


def all_gather_in_place(group, turn):
    out = empty_row()
    out[group.rank()] = value(group.rank(), 0, turn)
    return out, lambda out: group.all_gather(out, out[group.rank()]), column(0, turn)


def all_gather_uneven(group, turn):
    due = [part[:count] for count, part in enumerate(column(0, turn))]
    own = due[group.rank()].clone()
    return [torch.zeros(count) for count in range(SIZE)], lambda out: group.all_gather(out, own), due


def gather(group, turn):
    out, own = at_root(group, empty_row()), value(group.rank(), 0, turn)
    return out, lambda out: group.gather(own, out, ROOT), at_root(group, column(0, turn))


def gather_single(group, turn):
    out, due = torch.zeros(SIZE * COUNT), torch.cat(column(0, turn))
    own = value(group.rank(), 0, turn)
    return at_root(group, out), lambda out: group.gather_single(own, out, ROOT), at_root(group, due)


def scatter(group, turn):
    blocks = at_root(group, row(ROOT, turn))
    return torch.zeros(COUNT), lambda out: group.scatter(out, blocks, ROOT), value(ROOT, group.rank(), turn)


def reduce_scatter(group, turn):
    inputs, due = row(group.rank(), turn), sum(column(group.rank(), turn))
    return torch.zeros(COUNT), lambda out: group.reduce_scatter(out, inputs), due


def reduce_scatter_average(group, turn):
    inputs, due = torch.cat(row(group.rank(), turn)), sum(column(group.rank(), turn)) / SIZE
    return torch.zeros(COUNT), lambda out: group.reduce_scatter_single(out, inputs, ReduceOp.AVG), due


def all_to_all(group, turn):
    inputs = row(group.rank(), turn)
    return empty_row(), lambda out: group.all_to_all(out, inputs), column(group.rank(), turn)


def all_to_all_uneven(group, turn):
    counts, inputs, due = uneven(group, turn)
    return [torch.zeros(count) for count in counts], lambda out: group.all_to_all(out, inputs), due


def all_to_all_single(group, turn):
    counts, inputs, due = uneven(group, turn)
    whole = torch.cat(inputs)
    out = torch.zeros(sum(counts))
    return out, lambda out: group.all_to_all_single(out, whole, counts, counts), torch.cat(due)


CASES = [
    all_reduce, average, reduce, broadcast, all_gather, all_gather_single, all_gather_in_place, all_gather_uneven, gather,
    gather_single, scatter, reduce_scatter, reduce_scatter_average, all_to_all, all_to_all_uneven, all_to_all_single,
]  # fmt: skip


def is_equal(result, due):
    if isinstance(due, list):
        return len(result) == len(due) and all(map(torch.equal, result, due))
    return result is None if due is None else torch.equal(result, due)


async def test_repeated_calls_with_new_and_with_the_same_tensors(count):
    async with world_of(SIZE, transport="tcp") as groups:
        for case, turn in itertools.product(CASES, range(4)):
            calls = [case(group, turn) for group in groups]
            outcomes = await asyncio.gather(*(call(out) for out, call, _ in calls))
            assert all(is_equal(out, due) for out, (_, _, due) in zip(outcomes, calls, strict=True)), case
            if case not in (all_reduce, average, reduce, broadcast):
                await asyncio.gather(*(call(out) for out, call, _ in calls))
                assert all(is_equal(out, due) for out, _, due in calls), case


async def test_blocks_of_an_all_to_all_are_striped_each_by_its_size(monkeypatch):
    """Some pairs of ranks exchange more than others, and one rank only small blocks."""
    sent, send = collections.defaultdict(set), TcpLink.send

    def sending(self, message):
        sent[self._transport.host.rank, self.peer].add(KEY.unpack_from(message.header)[2])
        return send(self, message)

    monkeypatch.setattr(TcpLink, "send", sending)
    counts = [[9, 100_000, 7], [50_000, 8, 0], [5, 4, 3]]
    config = Config(lanes=3, stripe_nbytes=200_000)
    async with world_of(SIZE, transport="tcp", config=config) as groups:
        for turn in range(2):
            outputs = [torch.zeros(sum(row[group.rank()] for row in counts)) for group in groups]
            calls = [
                group.all_to_all_single(
                    output,
                    torch.full((sum(counts[group.rank()]),), float(10 * turn + group.rank())),
                    [row[group.rank()] for row in counts],
                    counts[group.rank()],
                )
                for group, output in zip(groups, outputs, strict=True)
            ]
            await asyncio.gather(*calls)
            for rank, output in enumerate(outputs):
                due = [torch.full((row[rank],), float(10 * turn + sender)) for sender, row in enumerate(counts)]
                assert output.equal(torch.cat(due))
    assert {pair: parts for pair, parts in sent.items() if len(parts) > 1} == {(0, 1): {0, 1, 2}, (1, 0): {0, 1, 2}}


@pytest.mark.parametrize("lanes", [1, 3])
async def test_calls_in_flight_at_once(lanes, count):
    """The ranks begin several calls before the others. With three lanes large calls have three parts."""
    async with world_of(SIZE, transport="tcp", config=Config(lanes=lanes, stripe_nbytes=40_000)) as groups:
        for case in CASES:
            calls = [[case(group, turn) for turn in range(4)] for group in groups]
            works = [[call(out) for out, call, _ in of_rank] for of_rank in calls]
            for of_rank, of_calls in zip(works, calls, strict=True):
                for work, (_, _, due) in zip(of_rank, of_calls, strict=True):
                    assert is_equal(await work, due), case


@pytest.mark.parametrize("fails", [False, True])
async def test_no_tensor_is_kept_alive(fails, count):
    async with world_of(SIZE, transport="tcp", config=Config(lanes=2, stripe_nbytes=40_000)) as world:
        alive, kept = [], []
        for case in CASES:
            groups = [group.world.new_group(None) for group in world]
            for turn in range(2):
                calls = [case(group, turn) for group in groups]
                works = [call(out) for out, call, _ in calls[1:]]
                if fails and turn:
                    groups[0].abort("on purpose")
                works.append(calls[0][1](calls[0][0]))
                for work in works:
                    with contextlib.suppress(GroupAbortedError):
                        await work
            for out, _, _ in calls:
                alive += [weakref.ref(each) for each in (out if isinstance(out, list) else [out]) if each is not None]
            del work, works, calls, out
            kept.append(groups)
        gc.collect()
        assert [reference() for reference in alive] == [None] * len(alive)


async def test_transfers_of_a_failed_call_end_before_its_inputs_are_freed(monkeypatch):
    """A message of which a part is sent copies its rest then."""
    async with world_of(2, transport="tcp") as (zero, one):

        def begin():
            inputs = list(torch.ones(2, 4))
            return zero.reduce_scatter(torch.zeros(4), inputs), weakref.ref(inputs[1])

        await asyncio.gather(*(g.reduce_scatter(torch.zeros(4), list(torch.ones(2, 4))) for g in (zero, one)))
        work, reference = begin()
        were_alive, abandon = [], Receive.abandon

        def noting(self):
            were_alive.append(reference() is not None)
            abandon(self)

        monkeypatch.setattr(Receive, "abandon", noting)
        zero.abort("on purpose")
        with pytest.raises(GroupAbortedError):
            await work
        assert were_alive == [True]
        assert reference() is None


@pytest.mark.parametrize("count", [1, 100_000])
async def test_list_and_single_tensor_in_one_all_gather_fail_where_their_schedules_differ(count):
    async with world_of(4, transport="tcp") as groups:
        works = [
            group.all_gather(list(torch.zeros(4, count)), torch.ones(count))
            if group.rank()
            else group.all_gather_single(torch.zeros(4 * count), torch.ones(count))
            for group in groups
        ]
        for work in works:
            with pytest.raises(MismatchError, match="one with a list and the other with one tensor"):
                await work


async def test_memory_that_moves_between_calls():
    """A buffer that grows and one that is replaced have other addresses in each call."""
    async with world_of(2, transport="tcp") as groups:
        memory = [torch.zeros(64) for _ in groups]
        for at in (0, 8, 0, 16, 8):
            outputs = [whole[at : at + 4].chunk(2) for whole in memory]
            inputs = [torch.tensor([float(at + group.rank())] * 2) for group in groups]
            calls = zip(groups, outputs, inputs, strict=True)
            await asyncio.gather(*(group.all_gather(list(out), tensor) for group, out, tensor in calls))
            assert all(whole[at : at + 4].tolist() == [at, at, at + 1, at + 1] for whole in memory)


async def test_call_after_one_whose_input_overlapped():
    async with world_of(2, transport="tcp") as groups:
        wholes = [torch.zeros(4) for _ in groups]
        for turn in range(6):
            inputs = [torch.full((2,), float(turn + group.rank())) for group in groups]
            if turn % 2:
                # The input lies across both blocks of the output.
                for whole, tensor in zip(wholes, inputs, strict=True):
                    whole[1:3] = tensor
                inputs = [whole[1:3] for whole in wholes]
            calls = zip(groups, wholes, inputs, strict=True)
            await asyncio.gather(*(group.all_gather_single(whole, tensor) for group, whole, tensor in calls))
            assert all(whole.tolist() == [turn, turn, turn + 1, turn + 1] for whole in wholes)


def gathering(output, tensor):
    def record(output, own):
        blocks = recorded_blocks(output, [2, 2])
        yield LocalCopy(blocks[0], own)
        yield from pairwise.all_gather(0, 2, blocks)

    return RecordedCall([record], [output, tensor])


@pytest.mark.parametrize("start", [0, 1, 2], ids=["own block", "across both", "other block"])
def test_input_may_be_the_own_block_and_is_copied_if_it_overlaps_others(start):
    output = torch.arange(4.0)
    call = gathering(torch.zeros(4), torch.zeros(2))
    assert [type(step) for step in call.schedule(output, output[start : start + 2])] == [DirectStep]
    assert output.tolist() == [start, start + 1, 2, 3]


def test_parts_of_one_call_read_copies_made_before_the_first_part_writes():
    output = torch.arange(4.0)

    def record(part, output, own):
        yield LocalCopy(output.slice(2 * part, 2 * part + 2), own)

    call = RecordedCall([partial(record, 0), partial(record, 1)], [torch.zeros(4), torch.zeros(2)])
    for schedule in call.schedules(output, output[1:3]):
        assert not list(schedule)
    assert output.tolist() == [1, 2, 1, 2]


def test_call_that_begins_during_another_reads_its_inputs_in_place():
    """It copies inputs only if they overlap outputs."""
    inputs = torch.ones(4)

    def record(output, own):
        yield LocalCopy(output, own)
        yield (Send(1, own),)

    call = RecordedCall([record], [torch.zeros(4), inputs])
    first, second = (call.schedule(torch.zeros(4), inputs) for _ in range(2))
    next(first)
    ((send,),) = second
    assert ctypes.addressof(ctypes.c_char.from_buffer(send.place.view)) == inputs.data_ptr()


@pytest.mark.parametrize("algorithm", ["doubling", "halving", "ring"])
@pytest.mark.parametrize("count", [100, 15_000, 150_000])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_recorded_all_reduce_with_each_algorithm(algorithm, count, op, dtype):
    """Few elements of float32 are folded as arrays; bfloat16 and many elements are not."""
    config = Config(algorithm=f"all_reduce={algorithm}")
    async with world_of(SIZE, transport="tcp", config=config) as groups:
        for turn in range(3):
            outputs = [torch.full((count,), float(3 * (group.rank() + turn)), dtype=dtype) for group in groups]
            await asyncio.gather(*(group.all_reduce(out, op) for group, out in zip(groups, outputs, strict=True)))
            due = 9.0 * (1 + turn) / (SIZE if op is ReduceOp.AVG else 1)
            assert all(out.eq(due).all() for out in outputs)


def test_calls_at_the_same_time_have_a_recording_each_which_later_calls_use_again():
    call = gathering(torch.zeros(4), torch.zeros(2))
    first, second = (call.schedule(torch.zeros(4), torch.ones(2)) for _ in range(2))
    steps = [next(first), next(second)]
    assert steps[0] is not steps[1]
    first.close()
    second.close()
    later = [call.schedule(torch.zeros(4), torch.ones(2)) for _ in range(2)]
    assert {id(next(schedule)) for schedule in later} == set(map(id, steps))


@pytest.mark.parametrize("count", [4, MAX_DIRECT_NBYTES])
def test_large_scratch_returns_to_the_pool_after_each_call(count):
    pool = Scratch()

    def record(memory, scratch):
        yield LocalCopy(scratch, memory)

    call = RecordedCall([record], [torch.zeros(count)], scratch=[(count, torch.float32)], pool=pool)
    list(call.schedule(torch.ones(count)))
    assert pool.take(count, torch.float32).tensor.equal(torch.ones(count)) is (count > 4)
