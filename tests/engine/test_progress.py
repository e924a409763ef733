"""The driver of a machine, where two threads meet: what one ends while the other falls asleep over it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
import select
import socket
import threading
from time import monotonic
from typing import ClassVar

import pytest
import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.engine import driver_loop, waker
from asyncdist.engine import progress as progress_module
from asyncdist.engine.machine import READ
from asyncdist.engine.progress import Progress
from asyncdist.errors import GroupError
from asyncdist.testing.cluster import run_ranks, world_of

pytestmark = pytest.mark.each_loop

PATIENCE = 10.0


class Deed:
    """Something to drive for."""

    def __init__(self):
        self.done = False

    def is_completed(self):
        return self.done

    def add_done_callback(self, callback):
        raise AssertionError("nobody follows here")


class Well:
    """A group that has not failed."""

    error = None


class Dozer:
    """A machine that moves for nobody, and does ``end`` at a turn of any thread but the one that made it."""

    def __init__(self, end):
        self.finished = []
        self.maker = threading.current_thread()
        self.dozing = threading.Event()
        self.end = end

    def advance(self, ready):
        if threading.current_thread() is not self.maker:
            self.end()
        return False

    def waits(self):
        self.dozing.set()
        return []

    def busy(self):
        return False

    def next_deadline(self):
        return math.inf

    def expire(self, now):
        pass

    def interrupted(self, cause):
        raise AssertionError(cause)

    def take_finished(self):
        return []


class Gate:
    """A lock that other threads than the main one come to early, and take only once ``opened``."""

    def __init__(self, opened):
        self.reached = threading.Event()
        self.opened = opened
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.opened.wait(PATIENCE)
        self.acquire()

    def __exit__(self, *_):
        self.release()


@pytest.fixture
def asleep(monkeypatch):
    """Set as soon as a thread is about to sleep in poll."""
    asleep = threading.Event()

    class Poll:
        def __init__(self):
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, timeout):
            asleep.set()
            return self._poll.poll(timeout)

    monkeypatch.setattr(waker, "select", type("select", (), {"poll": Poll}))
    return asleep


def test_a_loop_that_was_under_way_when_the_seat_was_taken_wakes_the_sleeper(asleep):
    """The loop has found the seat free and comes to the lock; a thread takes both, finds nothing done, and sleeps."""
    deed = Deed()

    def end():
        assert asleep.wait(PATIENCE)
        deed.done = True

    machine = Dozer(end)
    progress = Progress(machine)
    progress.lock = gate = Gate(machine.dozing)
    progress.ensure_driven()
    assert gate.reached.wait(PATIENCE)
    until = monotonic() + PATIENCE
    progress.drive(deed, until)
    assert deed.done
    assert monotonic() < until, "nobody woke the sleeper"
    progress.close()


def test_who_rings_before_the_first_sleep_of_all_finds_a_bell(monkeypatch):
    """Another thread's turn ends the work between the moment we say that we sleep, and the moment we do."""
    deed = Deed()
    machine = Dozer(lambda: setattr(deed, "done", True))
    progress = Progress(machine)
    sleep = progress._sleep

    def sleep_late(waits, until):
        other = threading.Thread(target=progress.submit, args=(lambda: None,))
        other.start()
        other.join()
        return sleep(waits, until)

    monkeypatch.setattr(progress, "_sleep", sleep_late)
    until = monotonic() + PATIENCE
    progress.drive(deed, until)
    assert deed.done
    assert monotonic() < until, "nobody woke the sleeper"
    progress.close()


async def test_what_another_turn_completes_at_once_leaves_nobody_waiting_asleep(eventually):
    """A turn tells the peers that nobody has to be rung for: whoever rests with something pending has to look again."""
    async with world_of(2, transport="shm", timeout=120) as (first, second):  # no timer is to help
        received, into = [], torch.zeros(1)
        second.recv(into, 0).add_done_callback(received.append)
        await eventually(lambda: second.mesh.progress.state is progress_module.LoopState.RESTING)
        assert second.send(torch.ones(1), 0, tag=1).is_completed()  # into the ring, there and then
        first.send(torch.full((1,), 5.0), 1)
        await eventually(lambda: received)
        assert into.item() == 5.0
        await first.recv(into, 1, tag=1)


class Mill:
    """A machine that moves at every turn, each of which takes a tenth of a slice."""

    def __init__(self):
        self.finished = []
        self.turns, self.clock, self.moves = 0, 0.0, True

    def step(self):
        self.turns += 1
        self.clock += progress_module._SLICE / 10

    def advance(self, ready):
        if self.moves:
            self.step()
        return self.moves

    def steps(self):
        while True:
            self.step()
            yield ()

    def waits(self):
        return []

    def busy(self):
        return self.moves

    operations: ClassVar = {}

    def next_deadline(self):
        return math.inf

    def take_finished(self):
        return []


@pytest.mark.parametrize("begins", ["at the call", "awaited", "left to itself"])
async def test_what_goes_on_and_on_has_one_slice_in_a_turn_of_the_loop(monkeypatch, begins):
    """Who issues, who awaits, and who arms the loop for it follow one another without a pause."""
    mill = Mill()
    monkeypatch.setattr(progress_module, "monotonic", lambda: mill.clock)
    progress = Progress(mill, asyncio.get_running_loop())
    if begins == "at the call":
        assert not progress.attempt(mill.steps(), Well(), wait=False)
    if begins != "awaited":
        progress.ensure_driven()
    progress.try_now(Deed())
    progress.ensure_driven()
    assert 10 <= mill.turns <= 12
    for _ in range(3):
        before = mill.turns
        asyncio.get_running_loop().call_soon(progress.drive_on_loop)  # as for a descriptor that is ready besides
        await asyncio.sleep(0)
        assert 10 <= mill.turns - before <= 13
    mill.moves = False
    progress.close()


def test_who_waits_spins_for_a_bounded_time_and_offers_the_core_where_ranks_outnumber_cores(monkeypatch):
    offered, spread = [], []
    monkeypatch.setattr(progress_module, "_yield_core", lambda: offered.append(True))

    def offers(crowded):
        mill = Mill()
        monkeypatch.setattr(progress_module, "monotonic", lambda: mill.clock)
        progress, looks = Progress(mill), 2 if crowded else 512
        progress.spin_for(1.0, 0.0, (lambda: spread.append(mill.clock)) if crowded else None)
        offered.clear()
        assert not progress.attempt((1 for _ in mill.steps()), Well(), wait=True)
        between = looks * progress_module._SLICE / 10
        assert 1.0 <= mill.clock <= 1.0 + 2.01 * between
        return len(offered)

    assert offers(crowded=True) > 8 * offers(crowded=False) > 0
    assert all(later - former >= progress_module._SPREAD_EVERY for former, later in itertools.pairwise(spread))
    assert 500 < len(spread) <= 1000


class Door(Dozer):
    """A machine that waits for a socket until it is `left`."""

    def __init__(self):
        super().__init__(lambda: None)
        self.sock, self.peer = socket.socketpair()
        self.retire = None

    def waits(self):
        return [(self.sock.fileno(), READ)] if self.retire else []

    def busy(self):
        return self.retire is not None

    def leave(self):
        retire, self.retire = self.retire, None
        retire(self.sock)


@pytest.fixture
def door():
    machine = Door()
    progress = Progress(machine)
    machine.retire = progress.retire
    yield machine, progress
    progress.close()
    machine.sock.close()
    machine.peer.close()


def test_a_socket_is_not_closed_under_the_eyes_of_a_loop_that_comes_to_watch_it(door, monkeypatch, until):
    """Another thread leaves when the loop has been told what to watch, and has not begun to: uvloop would abort."""
    machine, progress = door
    watch, closed = progress.loop_watcher.watch, []

    def watch_late(loop, wanted):
        if wanted:
            other = threading.Thread(target=progress.submit, args=(machine.leave,))
            other.start()
            other.join()
            closed.append(machine.sock.fileno() < 0)
        watch(loop, wanted)

    monkeypatch.setattr(progress.loop_watcher, "watch", watch_late)
    progress.ensure_driven()
    until(lambda: closed)
    assert closed == [False]
    until(lambda: machine.sock.fileno() < 0)
    assert not progress.loop_watcher.looks


def test_who_closes_while_a_loop_has_its_turn_leaves_nothing_to_that(door, monkeypatch):
    """The loop is about to watch for the first time; what is done under the lock then waits for the end of its turn."""
    machine, progress = door
    comes = threading.Event()

    class Lock(Gate):
        def __enter__(self):
            if threading.current_thread() is ending:
                comes.set()
            self.acquire()

    def end():
        progress.submit(machine.leave)
        progress.close()

    def waits():
        ending.start()
        assert comes.wait(PATIENCE)
        return Door.waits(machine)

    ending = threading.Thread(target=end)
    progress.lock = Lock(comes)
    monkeypatch.setattr(machine, "waits", waits)
    progress.ensure_driven()
    assert comes.wait(PATIENCE)
    ending.join(PATIENCE)
    background_loop().call(lambda: None)  # after that turn
    assert machine.sock.fileno() < 0
    assert not progress.loop_watcher.looks


def test_background_operation_without_descriptors_for_the_loop_fails(monkeypatch):
    def background_loop_of(thread):
        if threading.current_thread() is thread:
            raise OSError(errno.EMFILE, "Too many open files")
        return background_loop()

    def program(group):
        if group.ranks[0] == group.mesh.rank:
            thread = threading.current_thread()
            with monkeypatch.context() as patch:
                patch.setattr(driver_loop, "background_loop", lambda: background_loop_of(thread))
                work = group.all_reduce(torch.ones(1))
                work.wait(PATIENCE)
        else:
            group.all_reduce(torch.ones(1), background=False).exception()

    with pytest.raises(GroupError, match=r"all_reduce #1 on group .*, rank 0, .*: rank 0 has no free file descriptor"):
        run_ranks(2, program)
