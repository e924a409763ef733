"""Waiting in shared memory: wake-ups, memory order, spinning, threads, and ranks that have left."""

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
from asyncdist_transports.shm.collectives.slot_table import AWAITS_SLOT, DONE, LINE, READ_ROUNDS, SLOTS, STEP
from asyncdist_transports.shm.memory_order import Fence
from tests.support.attempts import completes
from tests.support.pairs import each_pair
from tests.support.ranks import native_of, run_cases

pytestmark = pytest.mark.each_loop

# One cache line, one area, several pieces.
COUNTS = [1, 20_000, 1_000_001]
CALLS = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor, background=False).result(),
    "broadcast": lambda group, tensor: group.broadcast(tensor, 0, background=False).result(),
    "barrier": lambda group, tensor: group.barrier(background=False).result(),
}
LONG = 10.0
"""Seconds: longer than any operation of these tests."""


def shm_of(group):
    return group.endpoint.transport_selector.transports[0]


# -- lost wake-ups ----------------------------------------------------------------------------------


async def test_word_published_before_sleep_is_seen():
    """The peer reads the sleep flag before this rank sets it, and sends no wake-up. The later check sees the step."""
    async with world_of(2, transport="shm") as (zero, one):
        await asyncio.gather(zero.barrier(), one.barrier())
        endpoint, signals = zero.endpoint, []
        shm_of(one).local_peers[0].signal = lambda: signals.append(True)
        work = zero.barrier()
        assert not work.is_completed()
        # As while a driver is awake.
        shm_of(zero).asleep[0] = 0
        other = one.barrier()
        assert not signals
        with endpoint.progress.turns.lock:
            # Sets the flag, checks once more, and sees the step of the peer.
            assert endpoint.waits() is None
        await asyncio.gather(work, other)


class Watched:
    """Words of shared memory; each write, or each read, adds an event."""

    def __init__(self, words, events, *, written=None, read=None):
        self._words, self._events, self._written, self._read = words, events, written, read

    def __setitem__(self, at, value):
        self._words[at] = value
        self._events.extend([self._written] if self._written else [])

    def __getitem__(self, at):
        self._events.extend([self._read] if self._read else [])
        return self._words[at]


@each_pair(name=sorted(CALLS), count=COUNTS, shared=[False, True])
def test_full_fence_separates_published_word_from_sleep_flag_check(name, shared, count):
    """Otherwise about one call in a million would not wake a peer that falls asleep at that moment."""

    def program(group):
        tensor = asyncdist.empty(count, shared=shared).fill_(1.0)
        # The members find each other's slot tables.
        CALLS[name](group, tensor)
        events, slots = [], native_of(group).slots
        for half in ("full", "open", "close"):
            barrier = getattr(slots.fence, half)
            setattr(slots.fence, half, lambda barrier=barrier: (barrier(), events.append("full")))
        slots.words = Watched(slots.words, events, written="word")
        for member in slots.others:
            member.asleep = Watched(member.asleep, events, read="check")
        for _ in range(3):
            CALLS[name](group, tensor)
        return events

    for events in run_ranks(2, program, transport="shm"):
        assert events.count("check") >= 3
        last = None
        for event in events:
            assert event != "check" or last == "full"
            last = last if event == "check" else event


# -- memory that keeps no order -----------------------------------------------------------------------


@pytest.fixture
def arm64(monkeypatch):
    """Fences as on arm64, where a light fence is a full one; on x86 it does nothing."""
    monkeypatch.setattr(memory_order, "_KEEPS_STORES_IN_ORDER", False)


@pytest.mark.parametrize("count", [7, 20_000])
async def test_every_collective_with_the_fences_of_arm64(arm64, count):
    async with world_of(3, transport="shm", config=Config(shm_area_nbytes=1 << 14)) as groups:
        await run_cases(groups, collective_cases(3, count, torch.float32))


class Steps:
    """Words of a slot table. Writes and reads of steps add the events "publish" and "poll", other writes "access"."""

    def __init__(self, words, note):
        self._words, self._note = words, note

    def __setitem__(self, at, value):
        # A number without a step only invalidates the previous call.
        publishes = at % LINE in (STEP, READ_ROUNDS) and value & DONE
        self._words[at] = value
        self._note("publish" if publishes else "access")

    def __getitem__(self, at):
        if at % LINE in (STEP, READ_ROUNDS):
            self._note("poll")
        return self._words[at]


MOVES = {
    "broadcast": lambda group, one, all: group.broadcast(one, 0, background=False).result(),
    "all_gather": lambda group, one, all: group.all_gather_single(all, one, background=False).result(),
    "scatter": lambda group, one, all: group.scatter(
        one, list(all.chunk(2)) if group.rank() == 0 else None, 0, background=False
    ).result(),
}


@each_pair(name=list(MOVES), count=COUNTS, shared=[False, True])
def test_fence_precedes_published_words_and_follows_read_words(arm64, monkeypatch, name, shared, count):
    local = threading.local()

    def noting(move, address_of):
        def noted(to, source, *more):
            if hasattr(local, "note"):
                local.note("read" if local.is_peers(address_of(source)) else "access")
            return move(to, source, *more)

        return noted

    monkeypatch.setattr(small, "move", noting(small.move, int))
    monkeypatch.setattr(torch.Tensor, "copy_", noting(torch.Tensor.copy_, torch.Tensor.data_ptr))

    def program(group):
        one, all = asyncdist.empty(count, shared=shared).fill_(1), asyncdist.empty(2 * count, shared=shared).fill_(1)
        # The members find each other's slot tables.
        MOVES[name](group, one, all)
        events, slots = [], native_of(group).slots
        mapping, full = slots.others[0].mapping, slots.fence.full
        local.is_peers = lambda address: mapping.address <= address < mapping.address + mapping.nbytes
        local.note = events.append
        slots.fence.full = slots.fence.light = lambda: (full(), events.append("fence"))
        slots.words = Steps(slots.words, events.append)
        slots.others[0].words = Steps(slots.others[0].words, events.append)
        for _ in range(3):
            MOVES[name](group, one, all)
        del local.note
        return events

    seen = run_ranks(2, program, transport="shm")
    assert "read" in seen[1]
    for events in seen:
        since_fence = set()
        for event in events:
            assert event != "publish" or not since_fence & {"access", "read"}
            assert event != "read" or "poll" not in since_fence
            since_fence = set() if event == "fence" else since_fence | {event}


def test_fence_interrupted_at_any_step_stays_usable(monkeypatch):
    """A KeyboardInterrupt may be raised after any call in C: here after the release of the fence's lock."""
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
        flags, cleared = [], []
        local_peer = shm_of(one).local_peers[0]
        local_peer.asleep = Watched(local_peer.asleep, cleared, written=True)
        signal = local_peer.signal

        def noted():
            flags.append(local_peer.asleep[0])
            signal()

        local_peer.signal = noted
        for member in native_of(one).slots.others:
            member.signal = noted
        work = zero.barrier()
        with zero.endpoint.progress.turns.lock:
            assert zero.endpoint.waits()
        await one.barrier()
        assert flags[0] == 1
        # The signalling rank clears the flag; the peer may set it again at any time.
        assert cleared
        async with asyncio.timeout(60):
            await work


async def test_message_arriving_while_falling_asleep_is_seen():
    async with world_of(2, transport="shm") as (zero, one):
        await asyncio.gather(one.send(torch.ones(1), 0), zero.recv(torch.empty(1), 1))
        received = zero.recv(tensor := torch.empty(3), 1)
        shm_of(zero).asleep[0] = 0
        shm_of(one).local_peers[0].signal = lambda: pytest.fail("a wake-up for a rank that is awake")
        await one.send(torch.arange(3.0), 0)
        del shm_of(one).local_peers[0].signal
        with zero.endpoint.progress.turns.lock:
            assert zero.endpoint.waits() is None
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
        assert not completes(zero.endpoint.progress, schedule, zero.channel, wait=False)
        until = 0.0
        # A blocking call drives the schedule to its end.
        assert completes(zero.endpoint.progress, schedule, zero.channel, wait=True)


async def test_patient_group_waits_in_the_call_only_off_the_loop():
    async with world_of(2, transport="shm") as (zero, one):
        zero._patient = True

        def seconds():
            before = time.monotonic()
            works.append(zero.all_reduce(torch.ones(3)))
            return time.monotonic() - before

        works = []
        zero.endpoint.progress.waiting.configure(LONG, 0.0)
        assert seconds() < LONG
        await asyncio.gather(one.all_reduce(torch.ones(3)), *works)
        zero.endpoint.progress.waiting.configure(0.1, 0.0)
        assert await asyncio.to_thread(seconds) >= 0.1
        # The peer has not called yet, and the operation continues in the background.
        assert not works[1].is_completed()
        await asyncio.gather(one.all_reduce(torch.ones(3)), *works)


def test_ranks_of_one_process_do_not_spin():
    assert run_ranks(2, lambda group: shm_of(group).spin_policy(2)[0], transport="shm") == [0.0, 0.0]


def test_default_spin_is_at_most_one_millisecond():
    """A blocked task spins too, before its driving thread spins."""
    assert Config().spin_us + Config().await_spin_us <= 1000


async def test_spin_setting_is_applied():
    async with world_of(2, transport="shm", config=Config(spin_us=0.0)) as groups:
        assert [group.endpoint.progress.waiting.spin for group in groups] == [0.0, 0.0]


# -- threads ----------------------------------------------------------------------------------------


def test_concurrent_threads_with_overlapping_groups():
    """Each thread uses its own group, of all ranks or of two, with many operations in flight."""

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


# -- ranks that have left ---------------------------------------------------------------------------


async def test_waiting_for_a_rank_that_left_in_order_raises(eventually):
    """When it left, no rank waited for it: it had contributed to the first round, and rank 2 had not called."""
    async with world_of(3, transport="shm") as (zero, one, two):
        await asyncio.gather(*(group.barrier() for group in (zero, one, two)))
        first, abandoned = zero.all_reduce(torch.ones(1_000_000)), one.all_reduce(torch.ones(1_000_000))
        one.world.leave()
        assert abandoned.exception() is not None
        await eventually(lambda: zero.endpoint.gone(1) is not None)
        async with asyncio.timeout(60):
            assert not first.is_completed()
            last = two.all_reduce(torch.ones(1_000_000))
            for work in (first, last):
                with pytest.raises(PeerLostError, match="rank 1"):
                    await work


async def test_goodbye_of_a_rank_that_has_left_with_an_unread_wake_up_is_read(eventually):
    """The system reports a reset of the connection before the last packets of the peer."""
    async with world_of(2, transport="shm") as (zero, one):
        await asyncio.gather(zero.barrier(), one.barrier())
        local_peer = shm_of(zero).local_peers[1]
        zero.world.leave()
        shm_of(one).local_peers[0].signal()
        local_peer.close_kept_socket()  # as at the end of its process
        await eventually(lambda: one.endpoint.lost_peers)
        assert one.endpoint.lost_peers[0].reason.endswith("(it has destroyed its process group)")


# -- needless wake-ups --------------------------------------------------------------------------------


async def test_call_wakes_no_member_that_sleeps_in_a_later_one():
    """Rank 0 has sent its part of the first call, and waits for rank 1 in the second."""
    async with world_of(2, transport="shm") as (zero, one):
        tensors = torch.zeros(2), torch.ones(2)
        await asyncio.gather(zero.reduce(tensors[0], 1), one.reduce(tensors[1], 1))
        await asyncio.gather(zero.broadcast(tensors[0], 1), one.broadcast(tensors[1], 1))
        signals = []
        (member,) = native_of(one).slots.others
        wake, member.signal = member.signal, lambda: signals.append(True) or wake()
        await zero.reduce(tensors[0], 1)
        broadcast = zero.broadcast(tensors[0], 1)
        with zero.endpoint.progress.turns.lock:
            assert zero.endpoint.waits() is not None
        await one.reduce(tensors[1], 1)
        assert not signals
        sent = one.broadcast(tensors[1], 1)
        assert signals
        await asyncio.gather(broadcast, sent)
        assert tensors[0].tolist() == tensors[1].tolist()


def test_member_that_awaits_a_slot_is_woken_before_the_next_call():
    """Rank 0 is a whole round of slots ahead, and sleeps until rank 1 has read the first tensor. Rank 1 then pauses."""
    is_ahead, endpoints = threading.Event(), {}

    def rank(group):
        endpoints[group.rank()] = group.endpoint
        group.endpoint.progress.waiting.configure(0.0, 0.0)
        CALLS["barrier"](group, None)
        tensor = torch.full((2,), float(group.rank()))
        if group.rank() == 0:
            for _ in range(SLOTS + 1):
                CALLS["broadcast"](group, tensor)
            is_ahead.set()
            return True
        (member,) = native_of(group).slots.others
        until = time.monotonic() + LONG
        # An attempt sleeps for a short time only, before it becomes an operation.
        while not (member.asleep[0] and member.words[AWAITS_SLOT] and endpoints[0].operations):
            assert time.monotonic() < until
            time.sleep(0)
        # A heartbeat would wake rank 0 too, but late.
        signals, wake = [], member.signal
        member.signal = lambda: signals.append(True) or wake()
        CALLS["broadcast"](group, tensor)
        was_woken = bool(signals) and is_ahead.wait(LONG)
        for _ in range(SLOTS):
            CALLS["broadcast"](group, tensor)
        return was_woken

    assert run_ranks(2, rank, transport="shm") == [True, True]


async def test_call_over_links_waits_until_others_have_read_the_words_of_the_call_before_in_its_slot():
    async with world_of(2, transport="shm") as groups:
        await asyncio.gather(*[group.barrier() for group in groups])
        zero, one = (native_of(group).slots for group in groups)
        for slots in (zero, one):
            run(slots.enter(2))
            slots.post(2, 77, 0, 1)
        zero.publish(2, DONE)
        passing = zero.pass_by(2 + SLOTS, 88)
        assert next(passing) == 1
        one.check_calls(2, 77, one.others)
        one.publish(2, DONE)
        run(passing)
        assert zero.words[2 * LINE + STEP] == (2 + SLOTS) << 24 | DONE


def run(schedule):
    """Run a schedule that does not wait for other ranks."""
    assert list(schedule) == []
