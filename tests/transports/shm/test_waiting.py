"""Every way of waiting in shared memory: looking, offering the core, sleeping; and whoever has begun an operation."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

import asyncdist
from asyncdist.config import Config
from asyncdist.errors import PeerLostError
from asyncdist.testing.cluster import run_ranks, world_of
from asyncdist.testing.collective_cases import collective_cases
from asyncdist_transports.shm import memory_order
from asyncdist_transports.shm.collectives import small
from asyncdist_transports.shm.collectives.slot_table import DONE, LINE, READ_ROUNDS, STEP
from asyncdist_transports.shm.memory_order import Fence

pytestmark = pytest.mark.each_loop

COUNTS = [1, 20_000, 1_000_001]  # one line; an area; several pieces
CALLS = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor, background=False).result(),
    "broadcast": lambda group, tensor: group.broadcast(tensor, 0, background=False).result(),
    "barrier": lambda group, tensor: group.barrier(background=False).result(),
}
LONG = 10.0
"""Seconds that nothing here takes."""


def shm_of(group):
    return group.mesh.transport_selector.transports[0]


# -- lost wake-ups ----------------------------------------------------------------------------------


async def test_word_published_before_sleep_is_seen():
    """The peer looks at our flag before we raise it, and so does not ring: the look after it must find the step."""
    async with world_of(2, transport="shm") as (zero, one):
        await asyncio.gather(zero.barrier(), one.barrier())
        mesh, ours = zero.mesh, shm_of(zero)
        rung = []
        shm_of(one).local_peers[0].signal = lambda: rung.append(True)
        work = zero.barrier()
        assert not work.is_completed()
        ours.asleep[0] = 0  # as while a driver is awake
        other = one.barrier()  # publishes, and finds nobody asleep
        assert not rung
        with mesh.progress.lock:
            assert mesh.waits() is None  # raises the flag and looks once more: something moved, so nobody sleeps
        await asyncio.gather(work, other)


class Watched:
    """Words of shared memory whose writing, or reading, is noted."""

    def __init__(self, words, events, *, written=None, read=None):
        self._words, self._events, self._written, self._read = words, events, written, read

    def __setitem__(self, at, value):
        self._words[at] = value
        self._events.extend([self._written] if self._written else [])

    def __getitem__(self, at):
        self._events.extend([self._read] if self._read else [])
        return self._words[at]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", sorted(CALLS))
def test_full_fence_separates_published_word_from_sleep_flag_check(name, shared, count):
    """Else a peer that lies down meanwhile is not rung, once in a million calls: no run of a program shows that."""

    def program(group):
        tensor = asyncdist.empty(count, shared=shared).fill_(1.0)
        CALLS[name](group, tensor)  # so that the windows have found each other
        events, slots = [], group._native._slots
        full = slots.fence.full
        slots.fence.full = lambda: (full(), events.append("full"))
        slots.words = Watched(slots.words, events, written="word")
        for member in slots.others:
            member.asleep = Watched(member.asleep, events, read="look")
        for _ in range(3):
            CALLS[name](group, tensor)
        return events

    for events in run_ranks(2, program, transport="shm"):
        assert events.count("look") >= 3
        last = None
        for event in events:
            assert event != "look" or last == "full"
            last = last if event == "look" else event


# -- memory that keeps no order -----------------------------------------------------------------------


@pytest.fixture
def arm64(monkeypatch):
    """Fences as on arm64, where a light one is a full one; x86 does without it."""
    monkeypatch.setattr(memory_order, "_KEEPS_STORES_IN_ORDER", False)


@pytest.mark.parametrize("count", [7, 20_000])
@pytest.mark.asyncio(loop_factories=["asyncio-debug"])
async def test_every_collective_with_the_fences_of_arm64(arm64, count):
    async with world_of(3, transport="shm", config=Config(shm_area_nbytes=1 << 14)) as groups:
        for drill in collective_cases(3, count, torch.float32):
            await asyncio.gather(*(work for group in groups for work in drill.start(group)))
            drill.check()


class Steps:
    """Words whose telling writes, and asking reads, are noted; the others belong to what is told."""

    def __init__(self, words, note):
        self._words, self._note = words, note

    def __setitem__(self, at, value):
        tells = (
            at % LINE in (STEP, READ_ROUNDS) and value & DONE
        )  # without a step it says only that the last call is over
        self._words[at] = value
        self._note("tell" if tells else "touch")

    def __getitem__(self, at):
        if at % LINE in (STEP, READ_ROUNDS):
            self._note("ask")
        return self._words[at]


MOVES = {
    "broadcast": lambda group, one, all: group.broadcast(one, 0, background=False).result(),
    "all_gather": lambda group, one, all: group.all_gather_single(all, one, background=False).result(),
    "scatter": lambda group, one, all: group.scatter(
        one, list(all.chunk(2)) if group.rank() == 0 else None, 0, background=False
    ).result(),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_fence_precedes_published_words_and_follows_read_words(arm64, monkeypatch, name, shared, count):
    local = threading.local()

    def noting(move, address_of):
        def noted(to, source, *more):
            if hasattr(local, "note"):
                local.note("take" if local.is_theirs(address_of(source)) else "touch")
            return move(to, source, *more)

        return noted

    monkeypatch.setattr(small, "_move", noting(small._move, int))
    monkeypatch.setattr(torch.Tensor, "copy_", noting(torch.Tensor.copy_, torch.Tensor.data_ptr))

    def program(group):
        one, all = asyncdist.empty(count, shared=shared).fill_(1), asyncdist.empty(2 * count, shared=shared).fill_(1)
        MOVES[name](group, one, all)  # so that the windows have found each other
        events, slots = [], group._native._slots
        theirs, full = slots.others[0].mapping, slots.fence.full
        local.is_theirs = lambda address: theirs.address <= address < theirs.address + theirs.nbytes
        local.note = events.append
        slots.fence.full = slots.fence.light = lambda: (full(), events.append("fence"))
        slots.words = Steps(slots.words, events.append)
        slots.others[0].words = Steps(slots.others[0].words, events.append)
        for _ in range(3):
            MOVES[name](group, one, all)
        del local.note
        return events

    seen = run_ranks(2, program, transport="shm")
    assert "take" in seen[1]
    for events in seen:
        since = set()
        for event in events:
            assert event != "tell" or not since & {"touch", "take"}
            assert event != "take" or "ask" not in since
            since = set() if event == "fence" else since | {event}


def test_fence_interrupted_at_any_step_stays_usable(monkeypatch):
    """Ctrl-C comes behind any call in C: here behind the one that lets go of the fence's lock."""
    lock, interrupted = threading.Lock(), []

    class Interrupted:
        acquire = lock.acquire

        def release(self):
            lock.release()
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt

    monkeypatch.setattr(threading, "Lock", Interrupted)
    fence = Fence()
    with pytest.raises(KeyboardInterrupt):
        fence.full()
    fence.full()
    assert lock.locked()


async def test_word_published_after_sleep_flag_wakes_the_rank():
    async with world_of(2, transport="shm") as (zero, one):
        await asyncio.gather(zero.barrier(), one.barrier())
        rung, cleared = [], []
        local_peer = shm_of(one).local_peers[0]
        local_peer.asleep = Watched(local_peer.asleep, cleared, written=True)
        ring = local_peer.signal

        def noted():
            rung.append(local_peer.asleep[0])
            ring()

        local_peer.signal = noted
        for member in one._native._slots.others:
            member.signal = noted
        work = zero.barrier()
        with zero.mesh.progress.lock:
            assert zero.mesh.waits()
        await one.barrier()
        assert rung[0] == 1
        assert cleared  # by who rings; the peer may lie down again at any time
        async with asyncio.timeout(5):
            await work


async def test_message_arriving_while_falling_asleep_is_seen():
    async with world_of(2, transport="shm") as (zero, one):
        await asyncio.gather(one.send(torch.ones(1), 0), zero.recv(torch.empty(1), 1))
        received = zero.recv(tensor := torch.empty(3), 1)
        shm_of(zero).asleep[0] = 0
        shm_of(one).local_peers[0].signal = lambda: pytest.fail("rung, though nobody had said that it sleeps")
        await one.send(torch.arange(3.0), 0)
        del shm_of(one).local_peers[0].signal
        with zero.mesh.progress.lock:
            assert zero.mesh.waits() is None
        await received
        assert tensor.tolist() == [0, 1, 2]


# -- waiting at the call -----------------------------------------------------------------------------


async def test_awaiting_task_yields_to_the_loop_during_a_long_operation():
    async with world_of(2, transport="shm") as (zero, _):
        until = time.monotonic() + LONG

        def busy():
            while time.monotonic() < until:
                yield ()

        schedule = busy()
        assert not zero.mesh.progress.attempt(schedule, zero._channel, wait=False)  # long before its end
        until = 0.0
        assert zero.mesh.progress.attempt(schedule, zero._channel, wait=True)  # who blocks has nothing else to do


async def test_patient_group_waits_in_the_call_only_off_the_loop():
    async with world_of(2, transport="shm") as (zero, one):
        zero.patient = True

        def seconds():
            before = time.monotonic()
            works.append(zero.all_reduce(torch.ones(3)))
            return time.monotonic() - before

        works = []
        zero.mesh.progress.spin_for(LONG, 0.0, spread=None)
        assert seconds() < LONG
        await asyncio.gather(one.all_reduce(torch.ones(3)), *works)
        zero.mesh.progress.spin_for(0.1, 0.0, spread=None)
        assert await asyncio.to_thread(seconds) >= 0.1
        assert not works[1].is_completed()  # its peer has not come: it goes on by itself
        await asyncio.gather(one.all_reduce(torch.ones(3)), *works)


def test_ranks_of_one_process_do_not_spin():
    assert run_ranks(2, lambda group: shm_of(group).spin_policy(2)[0], transport="shm") == [0.0, 0.0]


def test_default_spin_is_at_most_one_millisecond():
    """Also a blocked task, which tries on before the thread that drives it for the others begins to."""
    assert Config().spin_us + Config().await_spin_us <= 1000


async def test_spin_setting_is_applied():
    async with world_of(2, transport="shm", config=Config(spin_us=0.0)) as groups:
        assert [group.mesh.progress.spin for group in groups] == [0.0, 0.0]


# -- begun by one, finished by another --------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
async def test_operation_begun_inline_is_finished_by_the_loop(count):
    """A schedule that was attempted, and had to wait, goes on as an operation of the loop."""
    async with world_of(2, transport="shm") as (zero, one):
        tensors = [torch.full((count,), rank + 1.0) for rank in range(2)]
        first = zero.all_reduce(tensors[0])  # posts, and finds nobody
        assert not first.is_completed()
        assert zero.mesh.operations
        await one.all_reduce(tensors[1])
        await first
        assert [tensor[-1].item() for tensor in tensors] == [3.0, 3.0]


@pytest.mark.parametrize("count", COUNTS)
def test_background_operation_is_finished_by_the_waiting_thread(count):
    late = threading.Event()

    def program(group):
        tensor = torch.full((count,), group.rank() + 1.0)
        if group.rank() == 0:
            work = group.all_reduce(tensor)
            assert not work.is_completed()
            late.set()
            work.wait()
        else:
            assert late.wait(10)
            group.all_reduce(tensor, background=False).result()
        return tensor[-1].item()

    assert run_ranks(2, program, transport="shm") == [3.0, 3.0]


def test_concurrent_threads_with_overlapping_groups():
    """Threads with a group each, over the same ranks and over parts of them, many operations in flight."""

    def program(group):
        world, rank = group.world, group.rank()
        groups = [world.new_group([0, 1, 2]), world.new_group([0, 1]), world.new_group([1, 2]), world.new_group([2, 0])]
        sums: list[list[float]] = [[] for _ in groups]

        def use(place):
            one = groups[place]
            if one is None:
                return
            works = [one.all_reduce(torch.full((1 + 40_000 * (turn % 3),), rank + 1.0)) for turn in range(20)]
            sums[place] = [work.get_future().wait()[-1].item() for work in works]
            sums[place] += [one.all_reduce(torch.ones(3), background=False).result()[0].item() for _ in range(20)]

        threads = [threading.Thread(target=use, args=(place,)) for place in range(len(groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, got in zip(groups, sums, strict=True):
            if one is not None:
                assert got == [float(sum(member + 1 for member in one.ranks))] * 20 + [float(len(one.ranks))] * 20
        return True

    assert run_ranks(3, program, transport="shm", timeout=60) == [True] * 3


# -- who has left -----------------------------------------------------------------------------------


async def test_waiting_for_a_rank_that_left_in_order_raises(eventually):
    """While it left, nobody waited for it: its part of the first round was there, and rank 2 had not come."""
    async with world_of(3, transport="shm") as (zero, one, two):
        await asyncio.gather(*(group.barrier() for group in (zero, one, two)))
        first, gone = zero.all_reduce(torch.ones(1_000_000)), one.all_reduce(torch.ones(1_000_000))
        one.world.leave()
        assert gone.exception() is not None
        await eventually(lambda: zero.mesh.gone(1) is not None)  # the goodbye comes over the socket
        async with asyncio.timeout(10):
            assert not first.is_completed()
            last = two.all_reduce(torch.ones(1_000_000))
            for work in (first, last):
                with pytest.raises(PeerLostError, match="rank 1"):
                    await work
