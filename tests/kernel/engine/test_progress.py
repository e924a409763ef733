"""The drivers of a machine: races between a thread that completes work and a thread that falls asleep."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from asyncdist.base import waker
from asyncdist.base.background_loop import background_loop
from asyncdist.errors import GroupError, UsageError
from asyncdist.kernel.engine import progress as progress_module
from asyncdist.kernel.engine.drivers import attempts, home_loop, loop_driver, turns, waiting
from asyncdist.kernel.engine.drivers.loop_watcher import LoopWatcher
from asyncdist.kernel.engine.drivers.turns import Promises
from asyncdist.kernel.engine.machine import READ, WRITE
from asyncdist.kernel.engine.progress import Progress
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.transport.base import Sleep
from asyncdist.testing.cluster import run_ranks, world_of
from tests.support.attempts import completes

pytestmark = pytest.mark.each_loop

PATIENCE = 60.0


class Flag:
    """A condition that a driver waits for."""

    def __init__(self):
        self.done = False

    def is_completed(self):
        return self.done

    def add_done_callback(self, callback):
        raise AssertionError("no thread stands by in these tests")


class WorkingGroup:
    """A group that has not failed."""

    error = None
    members = range(2)
    started = highest = 0


class IdleMachine:
    """A machine that never moves, and calls ``complete`` when a thread other than its creator advances it."""

    operations = acting = MappingProxyType({})
    timers = ()

    def __init__(self, complete=lambda: None):
        self.finished = []
        self.creator = threading.current_thread()
        self.asked_for_waits = threading.Event()
        self.complete = complete

    def advance(self, ready):
        if threading.current_thread() is not self.creator:
            self.complete()
        return False

    def waits(self):
        self.asked_for_waits.set()
        return []

    def sleep(self, peer):
        return None

    def busy(self):
        return False

    def next_deadline(self):
        return math.inf

    def expire(self, now):
        pass

    def interrupted(self, cause):
        raise AssertionError(cause)

    def take_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def close(self):
        """Nothing is open."""


class MachineWithSocket(IdleMachine):
    """An idle machine whose peers signal on a socket."""

    def __init__(self):
        super().__init__()
        self.sock, self.peer = socket.socketpair()

    def close(self):
        self.sock.close()
        self.peer.close()


@pytest.fixture
def progress_of():
    """Return a function that makes the `Progress` of a machine, which is closed after the test, as is the machine."""
    with contextlib.ExitStack() as ending:

        def make(machine):
            ending.callback(machine.close)
            progress = Progress(machine)
            ending.callback(progress.close)
            return progress

        yield make


class Gate:
    """A lock that threads other than the main one acquire only after ``opened`` is set."""

    def __init__(self, opened):
        self.reached = threading.Event()
        self.opened = opened
        self._lock = threading.RLock()
        self.acquire, self.release, self._is_owned = self._lock.acquire, self._lock.release, self._lock._is_owned

    def __enter__(self):
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.opened.wait(PATIENCE)
        self.acquire()

    def __exit__(self, *_):
        self.release()


@pytest.fixture
def asleep(monkeypatch):
    """Set as soon as a thread is about to sleep in ``poll``."""
    asleep = threading.Event()

    class Poll:
        def __init__(self):
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, timeout):
            asleep.set()
            return self._poll.poll(timeout)

    monkeypatch.setattr(waker, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
    return asleep


def test_loop_that_completes_the_work_wakes_the_sleeping_inline_driver(asleep, progress_of):
    """The loop has found no inline driver and waits for the lock. A thread then becomes inline driver and sleeps."""
    flag = Flag()

    def complete():
        assert asleep.wait(PATIENCE)
        flag.done = True

    machine = IdleMachine(complete)
    progress = progress_of(machine)
    progress.turns.lock = gate = Gate(machine.asked_for_waits)
    progress.ensure_driven()
    assert gate.reached.wait(PATIENCE)
    until = monotonic() + PATIENCE
    progress.drive(flag, until)
    assert flag.done
    assert monotonic() < until, "no thread woke the driver"


def test_thread_that_completes_the_work_before_the_first_sleep_wakes_the_driver(monkeypatch, progress_of):
    """Another thread completes the work after the driver has announced its sleep, and before it sleeps."""
    flag = Flag()
    machine = IdleMachine(lambda: setattr(flag, "done", True))
    progress = progress_of(machine)
    sleep = progress.turns.sleep

    def sleep_late(waits, until):
        other = threading.Thread(target=progress.submit, args=(lambda: None,))
        other.start()
        other.join()
        return sleep(waits, until)

    monkeypatch.setattr(progress.turns, "sleep", sleep_late)
    until = monotonic() + PATIENCE
    progress.drive(flag, until)
    assert flag.done
    assert monotonic() < until, "no thread woke the driver"


async def test_send_of_another_thread_does_not_leave_the_loop_asleep(eventually):
    """A turn withdraws the request to be woken, so a loop that rests with a pending operation is scheduled again."""
    # No timer drives the loop within the timeout of 120 s.
    async with world_of(2, transport="shm", timeout=120) as (first, second):
        received, into = [], torch.zeros(1)
        second.recv(into, 0).add_done_callback(received.append)
        await eventually(lambda: second.endpoint.progress.loop_driver.state is loop_driver.LoopState.RESTING)
        assert second.send(torch.ones(1), 0, tag=1).is_completed()  # the ring has space
        first.send(torch.full((1,), 5.0), 1)
        await eventually(lambda: received)
        assert into.item() == 5.0
        await first.recv(into, 1, tag=1)


class BusyMachine(IdleMachine):
    """A machine that moves at every turn. A turn lasts a tenth of a time slice."""

    def __init__(self):
        super().__init__()
        self.turns, self.clock, self.moves = 0, 0.0, True

    def step(self):
        self.turns += 1
        self.clock += turns.TIME_SLICE / 10

    def advance(self, ready):
        if self.moves:
            self.step()
        return self.moves

    def steps(self):
        while True:
            self.step()
            yield ()

    def busy(self):
        return self.moves


def set_clock(monkeypatch, machine):
    """Let the drivers read the clock of a machine."""
    for module in (attempts, loop_driver, progress_module, turns):
        monkeypatch.setattr(module, "monotonic", lambda: machine.clock)


@pytest.mark.parametrize("first_driver", ["call", "await", "loop"])
async def test_busy_machine_gets_one_time_slice_per_turn_of_the_loop(monkeypatch, first_driver):
    """The call, the await and the loop drive one after another."""
    machine = BusyMachine()
    set_clock(monkeypatch, machine)
    progress = Progress(machine, asyncio.get_running_loop())
    if first_driver == "call":
        assert not completes(progress, machine.steps(), WorkingGroup(), wait=False)
    if first_driver != "await":
        progress.ensure_driven()
    progress.try_now(Flag())
    progress.ensure_driven()
    assert 10 <= machine.turns <= 12
    for _ in range(3):
        before = machine.turns
        asyncio.get_running_loop().call_soon(progress.loop_driver.drive)  # as for another ready descriptor
        await asyncio.sleep(0)
        assert 10 <= machine.turns - before <= 13
    machine.moves = False
    progress.close()


def test_program_whose_calls_are_complete_at_once_drives_its_receives(monkeypatch):
    machine = BusyMachine()
    set_clock(monkeypatch, machine)
    machine.operations, machine.moves = {b"": None}, False
    advanced = []
    machine.advance = lambda ready: bool(advanced.append(machine.clock))
    progress = Progress(machine)
    # The loop, on its thread, would drive too.
    monkeypatch.setattr(progress.loop_driver, "resume", lambda: None)
    for _ in range(1000):
        machine.clock += 10e-6
        assert completes(progress, iter(()), WorkingGroup(), wait=True)
    gaps = [later - former for former, later in itertools.pairwise(advanced)]
    assert advanced[0] <= 20e-6
    assert all(0.45e-3 < gap < 0.55e-3 for gap in gaps)
    assert len(gaps) > 15


async def test_timer_runs_after_the_loop_has_met_an_inline_attempt():
    """The loop leaves the driving to the attempt, which lets it resume."""
    async with world_of(1) as (group,):
        endpoint, ran = group.world.endpoint, asyncio.Event()

        def meet():
            endpoint.timers.schedule("timer", monotonic(), ran.set)
            endpoint.progress.loop_driver.drive()
            yield ()

        assert completes(endpoint.progress, meet(), group.channel, wait=True)
        async with asyncio.timeout(PATIENCE):
            await ran.wait()


def test_waiting_call_spins_for_a_limited_time_and_yields_its_core_if_ranks_outnumber_cores(monkeypatch):
    offered, spread = [], []
    monkeypatch.setattr(waiting, "_yield_core", lambda: offered.append(True))
    monkeypatch.setattr(waiting, "run_delay", lambda: None)

    def offers(crowded):
        machine = BusyMachine()
        set_clock(monkeypatch, machine)
        progress, looks = Progress(machine), 2 if crowded else 512
        placement = SimpleNamespace(spread=lambda: spread.append(machine.clock), home=None)
        progress.waiting.configure(1.0, 0.0, placement, crowded=crowded)
        offered.clear()
        assert not completes(progress, (1 for _ in machine.steps()), WorkingGroup(), wait=True)
        between = looks * turns.TIME_SLICE / 10
        assert 1.0 <= machine.clock <= 1.0 + 2.01 * between
        return len(offered)

    assert offers(crowded=True) > 8 * offers(crowded=False) > 0
    assert all(later - former >= waiting.LOOK_EVERY for former, later in itertools.pairwise(spread))
    assert 500 < len(spread) <= 1000


class SignallingMachine(MachineWithSocket):
    """A machine that reads what peers signal when it is advanced."""

    def __init__(self):
        super().__init__()
        self.advanced = []

    def advance(self, ready):
        self.advanced.append(ready)
        if ready:
            self.sock.recv(64)
        return bool(ready)

    def waits(self):
        self.asked_for_waits.set()
        return [(self.sock.fileno(), READ)]


@pytest.fixture
def signalled(progress_of):
    machine = SignallingMachine()
    return machine, progress_of(machine)


def test_call_does_not_run_inline_while_an_operation_needs_this_rank(signalled):
    machine, progress = signalled
    machine.operations = machine.acting = {b"": None}
    assert not completes(progress, iter(()), WorkingGroup(), wait=True)
    machine.acting = {}
    assert completes(progress, iter(()), WorkingGroup(), wait=True)


class ExpectingMachine(SignallingMachine):
    """A machine of a blocking program that expects a message."""

    def __init__(self):
        super().__init__()
        self.operations = {b"": None}

    def busy(self):
        return True

    def only_receives(self):
        return not self.acting


@pytest.fixture
def expecting(progress_of):
    """A machine that expects a message, its progress, and the list of the program's calls."""
    machine, calls = ExpectingMachine(), [object()]
    progress = progress_of(machine)
    progress.loop_driver.idle_watch.last_call = lambda: calls[-1]
    yield machine, progress, calls
    machine.acting = {}


def test_loop_watches_for_an_expected_message_once_the_program_makes_no_calls(expecting, until):
    machine, progress, _ = expecting
    driver = progress.loop_driver
    progress.ensure_driven()
    until(lambda: driver.state is loop_driver.LoopState.RESTING)
    assert machine.asked_for_waits.is_set()
    assert list(driver.watcher.watched) == [machine.sock.fileno()]


def test_calls_do_not_wake_the_loop_while_the_program_expects_only_messages(expecting, monkeypatch, until):
    machine, progress, calls = expecting
    driver = progress.loop_driver
    monkeypatch.setattr(loop_driver, "_DEFERRAL", PATIENCE)
    progress.ensure_driven()
    until(lambda: driver.state is loop_driver.LoopState.DEFERRING)
    assert not machine.asked_for_waits.is_set()
    for _ in range(3):
        calls.append(object())
        assert completes(progress, iter(()), WorkingGroup(), wait=True)
        flag = Flag()
        flag.done = True
        progress.drive(flag, math.inf, lambda: None)
        progress.ensure_driven()
    background_loop().call(lambda: None)  # what was scheduled has run
    assert driver.state is loop_driver.LoopState.DEFERRING
    assert not machine.asked_for_waits.is_set()
    machine.acting = {b"": None}
    progress.ensure_driven()
    until(lambda: driver.state is loop_driver.LoopState.RESTING)
    assert machine.asked_for_waits.is_set()


def attempt_in_thread(progress, flag, group, schedule=None):
    """Run in another thread an attempt that waits for ``flag``; return the thread and the list for its result."""
    results = []

    def steps():
        while not flag.done:
            yield 1

    def run():
        results.append(completes(progress, schedule or steps(), group, wait=True, block=True))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def complete_once_asleep(machine, progress, asleep):
    """Run an attempt in another thread; let what it waits for happen, and signal it, once the thread sleeps."""
    flag = Flag()
    thread, results = attempt_in_thread(progress, flag, WorkingGroup())
    assert asleep.wait(PATIENCE)
    flag.done = True
    machine.peer.send(b"!")
    thread.join()
    assert results == [True]


def test_blocking_call_that_sleeps_for_its_peer_needs_no_operation(signalled, asleep, monkeypatch):
    machine, progress = signalled
    monkeypatch.setattr(attempts, "LONGEST_ATTEMPT", PATIENCE)
    flag = Flag()
    thread, results = attempt_in_thread(progress, flag, WorkingGroup())
    assert asleep.wait(PATIENCE)
    # A signal for something else.
    machine.peer.send(b"!")
    flag.done = True
    machine.peer.send(b"!")
    thread.join()
    assert results == [True]
    # Peers need not signal any more.
    assert progress.turns.lock.acquire(blocking=False)
    progress.turns.lock.release()
    assert machine.advanced


def test_blocking_call_that_sleeps_for_a_message_wakes_for_it_alone(signalled, asleep, monkeypatch):
    """The schedule reads the message itself: the machine, which would post it as unexpected, is not asked to."""
    machine, progress = signalled
    monkeypatch.setattr(attempts, "LONGEST_ATTEMPT", PATIENCE)
    monkeypatch.setattr(
        machine, "sleep", lambda peer: Sleep([(machine.sock.fileno(), READ)], None) if peer == 1 else None
    )
    progress.turns.prepare_sleep()
    machine.asked_for_waits.clear()
    complete_once_asleep(machine, progress, asleep)
    assert not machine.advanced
    assert not machine.asked_for_waits.is_set()
    assert machine.sock.recv(64) == b"!"


def test_blocking_call_that_sleeps_for_its_host_drives_nothing_else(signalled, asleep, monkeypatch):
    machine, progress = signalled
    monkeypatch.setattr(attempts, "LONGEST_ATTEMPT", PATIENCE)
    woken = []

    def wake_up(ready):
        woken.append(list(ready))
        return bool(machine.sock.recv(64)) if ready else False

    monkeypatch.setattr(machine, "sleep", lambda peer: Sleep([(machine.sock.fileno(), READ)], wake_up))
    progress.turns.prepare_sleep()
    complete_once_asleep(machine, progress, asleep)
    assert woken[0] == [machine.sock.fileno()]
    assert not machine.advanced


def test_blocking_call_sleeps_for_the_peer_that_it_waits_for_at_last(signalled, asleep, monkeypatch):
    """The first peer moves between the preparation of the sleep and the last look before it."""
    machine, progress = signalled
    monkeypatch.setattr(attempts, "LONGEST_ATTEMPT", PATIENCE)
    other, peer = socket.socketpair()
    prepared, flag = [], Flag()

    def sleep(peer):
        prepared.append(peer)
        return Sleep([((machine.sock if peer else other).fileno(), READ)], lambda ready: True)

    def steps():
        while not prepared:
            yield 1
        while not flag.done:
            yield 0

    monkeypatch.setattr(machine, "sleep", sleep)
    progress.turns.prepare_sleep()
    with other, peer:
        thread, results = attempt_in_thread(progress, flag, WorkingGroup(), steps())
        assert asleep.wait(PATIENCE)
        flag.done = True
        peer.send(b"!")
        thread.join()
    assert prepared == [1, 0]
    assert results == [True]


@pytest.mark.parametrize("event", ["the group fails", "another operation begins"])
def test_blocking_call_that_sleeps_becomes_an_operation_when_another_thread_acts(event, signalled, asleep, monkeypatch):
    machine, progress = signalled
    monkeypatch.setattr(attempts, "LONGEST_ATTEMPT", PATIENCE)
    group = WorkingGroup()
    thread, results = attempt_in_thread(progress, Flag(), group)
    assert asleep.wait(PATIENCE)

    def act():
        if event == "the group fails":
            group.error = GroupError("failed")
        else:
            machine.operations = machine.acting = {b"": None}

    progress.submit(act)
    thread.join()
    assert results == [False]


@pytest.mark.parametrize("sleeper", ["driver", "attempt"])
def test_call_does_not_run_inline_while_another_thread_sleeps(sleeper, signalled, asleep, monkeypatch):
    """A turn of the call would withdraw the request to be woken, on which the sleeper relies."""
    machine, progress = signalled
    monkeypatch.setattr(attempts, "LONGEST_ATTEMPT", PATIENCE)
    flag = Flag()
    if sleeper == "attempt":
        thread, _ = attempt_in_thread(progress, flag, WorkingGroup())
    else:
        thread = threading.Thread(target=progress.drive, args=[flag, monotonic() + PATIENCE])
        thread.start()
    assert asleep.wait(PATIENCE)
    assert not completes(progress, iter(()), WorkingGroup(), wait=True)
    flag.done = True
    machine.peer.send(b"!")
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert completes(progress, iter(()), WorkingGroup(), wait=True)


def test_blocking_call_sleeps_for_a_limited_time_without_an_operation(signalled, asleep):
    _, progress = signalled
    thread, results = attempt_in_thread(progress, Flag(), WorkingGroup())
    thread.join()
    assert asleep.is_set()
    assert results == [False]


@pytest.mark.parametrize("wait", [False, True])
def test_call_that_takes_long_yields_the_lock_to_another_threads_action(wait, progress_of):
    progress, machine = progress_of(BusyMachine()), BusyMachine()
    progress.waiting.configure(math.inf, 0.0)
    ran = threading.Event()

    def schedule():
        yield ()
        looking = threading.Thread(target=progress.look, args=[lambda: ran.set() or True])
        looking.start()
        while not progress.turns.inbox:
            time.sleep(1e-4)
        yield from machine.steps()

    assert not completes(progress, schedule(), WorkingGroup(), wait=wait)
    progress.submit(lambda: None)
    assert ran.wait(PATIENCE)


def test_look_lets_a_driver_continue_only_if_there_is_something_to_drive(until, progress_of):
    machine, callers = BusyMachine(), []
    machine.finished = [lambda: callers.append(threading.current_thread())]
    progress = progress_of(machine)
    progress.look(lambda: False)
    assert not progress.turns.inbox
    progress.look(lambda: True)
    until(lambda: callers)
    assert [thread.name for thread in callers] == ["asyncdist-runtime"]


def test_look_runs_before_the_queued_actions_and_no_callback_in_its_thread(until, progress_of):
    """Another thread holds the lock, for example to start thousands of operations."""
    machine, order, callers = BusyMachine(), [], []
    machine.finished = [lambda: callers.append(threading.current_thread())]
    progress = progress_of(machine)
    with progress.turns.lock:
        for number in range(3):
            progress.turns.inbox.append(lambda number=number: order.append(number))
        looking = threading.Thread(target=progress.look, args=[lambda: order.append("look") or False])
        looking.start()
        looking.join()
        assert order == []
    progress.submit(lambda: order.append("submitted"))
    until(lambda: callers and len(order) == 5)
    assert order == ["look", 0, 1, 2, "submitted"]
    assert looking not in callers


def test_turn_runs_the_actions_that_were_there_at_its_start(progress_of):
    """Another thread may add actions as fast as this one runs them, and must not keep it."""
    progress, order = progress_of(BusyMachine()), []

    def act(number):
        order.append(number)
        progress.turns.inbox.append(lambda: act(number + 1))

    progress.turns.inbox.append(lambda: act(0))
    with progress.turns.lock:
        for turn in range(3):
            assert progress.turns.turn(None)
            assert order == list(range(turn + 1))
    progress.turns.inbox.clear()


def test_signal_handler_waits_while_its_thread_sleeps_in_a_call(asleep, progress_of):
    """The call in the handler completes first, and the interrupted call is woken although its work completes in it."""
    machine, outer, inner, order = IdleMachine(), Flag(), Flag(), []
    progress = progress_of(machine)

    def handler(*_):
        if not order:
            order.append("interrupted")
            progress.drive(inner, monotonic() + PATIENCE, lambda: order.append("started"))
            order.append(inner.done)
            outer.done = True

    before = signal.signal(signal.SIGUSR1, handler)

    def complete():
        assert asleep.wait(PATIENCE)
        asleep.clear()
        while not order:  # a signal that comes just before the system call does not interrupt it
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(1e-3)
        assert asleep.wait(PATIENCE)
        progress.submit(lambda: setattr(inner, "done", True))

    other = threading.Thread(target=complete)
    other.start()
    until = monotonic() + PATIENCE
    try:
        progress.drive(outer, until)
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join()
    assert monotonic() < until, "nothing woke the interrupted call"
    assert order == ["interrupted", "started", True]


def test_callback_in_a_blocking_call_may_wait(until, progress_of):
    """The driver that runs the callback is the thread itself."""
    flag, inner = Flag(), Flag()
    machine = IdleMachine()
    progress = progress_of(machine)

    def callback():
        progress.drive(inner, monotonic() + PATIENCE, lambda: setattr(inner, "done", True))
        flag.done = True

    progress.drive(flag, monotonic() + PATIENCE, lambda: machine.finished.append(callback))
    assert flag.done
    assert inner.done


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_interrupted_callback_leaves_the_others_to_run(raised, until, progress_of):
    """It leaves the call, and another driver continues what is pending."""
    flag, called, scheduled = Flag(), [], []
    machine = BusyMachine()
    progress = progress_of(machine)

    def interrupted():
        called.append("interrupted")
        raise raised

    def start():
        flag.done, machine.moves = True, False
        machine.finished += [interrupted, lambda: called.append("second"), interrupted, lambda: called.append("last")]

    progress.turns._schedule_loop = lambda: scheduled.append(True)
    with pytest.raises(raised):
        progress.drive(flag, monotonic() + PATIENCE, start)
    assert called == ["interrupted", "second", "interrupted", "last"]
    assert scheduled


@pytest.mark.parametrize("caller", ["turn", "attempt", "submit"])
def test_call_that_interrupts_a_turn_of_its_own_thread_is_refused_and_goes_on(caller, progress_of):
    """A signal handler may run between any two instructions, also where its thread holds the lock."""
    machine, flag, started = BusyMachine(), Flag(), []
    progress = progress_of(machine)

    def handler():
        with pytest.raises(UsageError, match="set a flag"):
            progress.drive(flag, monotonic() + PATIENCE, lambda: started.append(True))
        flag.done = True

    def schedule():
        handler()
        yield ()

    if caller == "turn":
        progress.drive(flag, monotonic() + PATIENCE, handler)
    elif caller == "submit":
        progress.submit(handler)
    else:
        assert completes(progress, schedule(), WorkingGroup(), wait=True) is False
    progress.submit(lambda: None)
    assert started


@pytest.mark.parametrize("seconds", [180e6, 1e12])
def test_blocking_calls_sleep_with_timeouts_that_no_poll_and_no_lock_takes(seconds, asleep, until, progress_of):
    """The first thread sleeps in poll and the second one stands by, each with a limit of years."""
    work = Work()
    progress = progress_of(IdleMachine())
    work._progress = progress
    threads = [threading.Thread(target=work.wait, args=[seconds]) for _ in range(2)]
    threads[0].start()
    assert asleep.wait(PATIENCE)
    threads[1].start()
    until(lambda: progress.turns.standby)
    work.finish()
    work.run_callbacks()
    progress.submit(lambda: None)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


class SocketMachine(MachineWithSocket):
    """A machine that waits for a socket until `leave` retires it."""

    retire = None

    def waits(self):
        return [(self.sock.fileno(), READ)] if self.retire else []

    def busy(self):
        return self.retire is not None

    def leave(self):
        retire, self.retire = self.retire, None
        retire(self.sock)


@pytest.fixture
def socket_machine(progress_of):
    machine = SocketMachine()
    progress = progress_of(machine)
    machine.retire = progress.retire
    return machine, progress


def test_socket_is_not_closed_while_a_loop_is_about_to_watch_it(socket_machine, monkeypatch, until):
    """A thread retires the socket between the loop's calls of `waits` and `watch`. uvloop aborts if it is closed then."""
    machine, progress = socket_machine
    watch, closed = progress.loop_driver.watcher.watch, []

    def watch_late(loop, wanted):
        if wanted:
            other = threading.Thread(target=progress.submit, args=(machine.leave,))
            other.start()
            other.join()
            closed.append(machine.sock.fileno() < 0)
        watch(loop, wanted)

    monkeypatch.setattr(progress.loop_driver.watcher, "watch", watch_late)
    progress.ensure_driven()
    until(lambda: closed)
    assert closed == [False]
    until(lambda: machine.sock.fileno() < 0)
    assert not progress.loop_driver.watcher.is_registered


@pytest.mark.parametrize("ending", ["stopped", "closed", "run"])
def test_close_in_another_thread_ends_when_the_loop_ends_first(socket_machine, ending, monkeypatch):
    """The loop runs for the last time when the other thread asks it to leave, and never runs what that thread has added."""
    machine, _ = socket_machine
    loop = asyncio.new_event_loop()
    added = threading.Event()
    lost = SimpleNamespace(
        is_running=loop.is_running, is_closed=loop.is_closed, call_soon=loop.call_soon, call_later=loop.call_later,
        call_soon_threadsafe=lambda *_: added.set(), remove_reader=loop.remove_reader, add_reader=loop.add_reader,
    )  # fmt: skip

    async def run():
        progress = Progress(machine, loop)
        progress.ensure_driven()
        assert progress.loop_driver.watcher.watched
        if ending != "run":
            progress.home._user_loop = lost
        closing.append(threading.Thread(target=progress.close))
        closing[0].start()
        if ending != "run":
            assert added.wait(PATIENCE)

    closing = []
    try:
        if ending == "run":
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(run())
        else:
            loop.run_until_complete(run())
            if ending == "closed":
                loop.close()
        closing[0].join(PATIENCE)
        assert not closing[0].is_alive()
    finally:
        loop.close()


def test_close_in_a_thread_for_which_the_loop_waits_is_refused(socket_machine, monkeypatch):
    monkeypatch.setattr(loop_driver, "LOOP_PATIENCE", 0.1)
    machine, _ = socket_machine

    async def run():
        progress = Progress(machine, asyncio.get_running_loop())
        progress.ensure_driven()
        with ThreadPoolExecutor(1) as pool:  # its end holds the loop
            closing = pool.submit(progress.close)
        with pytest.raises(UsageError, match=r"has run nothing for .* another thread destroys the world"):
            closing.result()
        await asyncio.to_thread(progress.close)
        assert not progress.loop_driver.watcher.is_registered

    asyncio.run(run())


def test_close_during_a_turn_of_the_loop_leaves_no_registration(socket_machine, monkeypatch):
    """Before the loop watches for the first time, another thread closes, and waits for the lock until the turn ends."""
    machine, progress = socket_machine
    requested = threading.Event()

    class Lock(Gate):
        def __enter__(self):
            if threading.current_thread() is closing:
                requested.set()
            self.acquire()

    def close():
        progress.submit(machine.leave)
        progress.close()

    def waits():
        closing.start()
        assert requested.wait(PATIENCE)
        return SocketMachine.waits(machine)

    closing = threading.Thread(target=close)
    progress.turns.lock = Lock(requested)
    monkeypatch.setattr(machine, "waits", waits)
    progress.ensure_driven()
    assert requested.wait(PATIENCE)
    closing.join(PATIENCE)
    background_loop().call(lambda: None)  # after that turn
    assert machine.sock.fileno() < 0
    assert not progress.loop_driver.watcher.is_registered


def test_background_operation_without_descriptors_for_the_loop_fails(monkeypatch):
    failed = threading.Event()

    def background_loop_of(thread):
        if threading.current_thread() is thread:
            raise OSError(errno.EMFILE, "Too many open files")
        return background_loop()

    def program(group):
        if group.rank() == 1:
            assert failed.wait(PATIENCE)
            return None
        thread = threading.current_thread()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(home_loop, "background_loop", lambda: background_loop_of(thread))
                return group.all_reduce(torch.ones(1)).wait(PATIENCE)
        finally:
            failed.set()

    with pytest.raises(GroupError, match=r"all_reduce #1 on group .*, rank 0, .*: rank 0 has no free file descriptor"):
        run_ranks(2, program)


async def test_failure_that_is_reported_without_the_lock_is_refused():
    async with world_of(2, transport="inproc") as (zero, _):
        with pytest.raises(AssertionError, match="pass it to submit"):
            zero.endpoint.lost(1, "the connection broke")
        assert zero.error is None


def test_promise_belongs_to_its_thread_and_ends_with_a_hand_over():
    handed_over = []
    promises = Promises(lambda: handed_over.append(promises.is_made_here()))
    elsewhere = []
    with promises.make():
        thread = threading.Thread(target=lambda: elsewhere.append(promises.is_made_here()))
        thread.start()
        thread.join()
        with promises.make():
            assert promises.is_made_here()
        assert promises.is_made_here()
        assert (elsewhere, handed_over) == ([False], [])
    assert not promises.is_made_here()
    assert handed_over == [False]


def test_others_take_over_while_a_promise_is_withdrawn():
    handed_over = []
    promises = Promises(lambda: handed_over.append(promises.is_made_here()))
    with promises.make(made=False):
        assert handed_over == []
    with promises.make():
        with promises.make(made=False):
            assert not promises.is_made_here()
            assert handed_over == [False]
        assert promises.is_made_here()
    assert handed_over == [False, False]


async def test_broken_connection_that_was_read_can_be_watched_for_writing(eventually):
    """uvloop ends the watch of a descriptor whose connection was reset."""
    events = []
    watcher, loop = LoopWatcher(events.append), asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        peer, _ = server.accept()
        sock.setblocking(False)
        watcher.watch(loop, {sock.fileno(): READ})
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        await eventually(lambda: events)
        # The loop may still be in the middle of the event.
        await asyncio.sleep(0)
        events.clear()
        watcher.watch(loop, {sock.fileno(): READ | WRITE})
        await eventually(lambda: sock.fileno() in events)
        watcher.leave(loop)
