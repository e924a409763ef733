"""Runs short collectives inline, in the calling thread and without an operation object."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Sequence
from threading import get_ident
from time import monotonic
from typing import Any

from asyncdist.base.callables import Callback, Predicate
from asyncdist.kernel.algorithms.schedule import END_ATTEMPT, Schedule
from asyncdist.kernel.engine.drivers.loop_driver import LoopDriver, LoopState
from asyncdist.kernel.engine.drivers.turns import LONGEST_ATTEMPT, TIME_SLICE, Turns, give_back
from asyncdist.kernel.engine.drivers.waiting import MOST_POLLS
from asyncdist.kernel.engine.machine import ScheduleChannel
from asyncdist.kernel.transport.base import Advance, Sleep
from asyncdist.kernel.transport.native import PreparedCall, beginning

_TURN_EVERY = 0.5e-3
"""Seconds after which a program whose calls are all complete at once drives its pending receives."""


class Attempts:
    """The attempts of one rank to complete a collective at once.

    Args:
        hand_over: Lets other drivers continue what is pending.
    """

    def __init__(self, turns: Turns, loop_driver: LoopDriver, hand_over: Callback) -> None:
        self._turns, self._machine, self._waiting = turns, turns.machine, turns.waiting
        self._loop_driver, self._hand_over = loop_driver, hand_over
        self._turn_at = 0.0
        lock: Any = turns.lock
        self._holds_lock: Predicate = lock._is_owned

    def run(
        self,
        call: PreparedCall,
        number: int,
        tensors: Sequence[Any],
        channel: ScheduleChannel,
        wait: bool,
        polls: int = MOST_POLLS,
        block: bool = False,
    ) -> Schedule | None:
        """Begin a native call, or a direct one over links, and run it inline and without an operation object.

        The call does not begin if its group has failed: the memory of a destroyed group may belong to another group.
        It does not begin either if an operation is pending that does more than receive a message, because peers may wait
        for the progress of that operation. The calling thread has left the user's modes.

        Args:
            number: The number of the collective in the group.
            wait: Whether to wait for peers for as long as an inline driver polls.
            polls: Polls after which a waiting thread looks at the clock and offers its core, at most.
            block: Whether to sleep for peers for a while where an inline driver sleeps at once.

        Returns:
            None if the call is complete; else the schedule with which an operation continues it from where it stopped.
        """
        turns, machine, thread = self._turns, self._machine, get_ident()
        if machine.acting or turns.attempting or turns.driving or self._holds_lock():
            return beginning(call, number, tensors)
        asleep_until, ready = 0.0, None
        advance: Advance | None = None
        schedule: Schedule | None = None
        drives = has_driven = bool(machine.operations) and monotonic() >= self._turn_at
        try:
            while turns.lock.acquire(False):
                try:
                    if schedule is None:
                        # Another thread drives since, or sleeps in its attempt: a turn of this one would not wake it.
                        if turns.attempting or turns.driving:
                            return beginning(call, number, tensors)
                        turns.attempting = thread
                    if drives:
                        turns.turn_without_modes(ready)
                        self._turn_at = turns.expire() + _TURN_EVERY
                    elif advance is not None:
                        turns.turn_without_modes(ready, advance)
                    outcome: Sleep | bool
                    if schedule is not None:
                        outcome = self._poll(schedule, channel, wait, polls, block)
                    elif channel.error is not None or turns.inbox or machine.acting:
                        return beginning(call, number, tensors)
                    else:
                        schedule = call(number, tensors[0]) if len(tensors) == 1 else call(number, *tensors)
                        outcome = schedule is None or self._poll(schedule, channel, wait, polls, block)
                    if outcome is True:
                        channel.started += 1
                        channel.highest = number if number > channel.highest else channel.highest
                        return None
                    if outcome is not False and not asleep_until:
                        asleep_until = monotonic() + LONGEST_ATTEMPT
                        if not turns.driver_lock.acquire(False):  # another thread is about to drive
                            turns.sleeping, outcome, asleep_until = False, False, 0.0
                except BaseException as cause:
                    if not isinstance(cause, Exception):
                        turns.interrupt(cause)
                    raise
                finally:
                    turns.lock.release()
                if not isinstance(outcome, Sleep) or monotonic() >= asleep_until:
                    break
                ready, advance = turns.sleep(outcome.waits, asleep_until), outcome.advance
                drives = ready is None or advance == machine.advance
                has_driven = has_driven or advance is not None
            return beginning(call, number, tensors) if schedule is None else schedule
        except BaseException:
            give_back(turns.lock)
            raise
        finally:
            if turns.attempting == thread:
                turns.attempting = 0
                if asleep_until:
                    turns.sleeping = False
                    give_back(turns.driver_lock)
            if machine.finished or machine.operations or turns.standby or turns.inbox:
                self._end(has_driven)

    def _end(self, has_driven: bool) -> None:
        """Let others go on once this attempt has ended."""
        turns, machine = self._turns, self._machine
        if machine.finished:
            turns.deliver()
        if turns.standby or turns.inbox:
            self._hand_over()
        # Peers no longer signal to the loop, another thread has begun an operation, or the loop has met this thread.
        elif turns.is_driven:
            return
        elif machine.operations and (has_driven or machine.acting or self._loop_driver.state is LoopState.IDLE):
            self._loop_driver.resume()

    def _poll(self, schedule: Schedule, channel: ScheduleChannel, wait: bool, most: int, block: bool) -> Sleep | bool:
        """Run a schedule; return whether it is complete or an operation continues it, or how to sleep for its peers."""
        turns, waiting = self._turns, self._waiting
        inbox = turns.inbox
        if channel.error is not None or inbox or self._machine.acting:
            return False
        until, polls, allowed = 0.0, 0, waiting.polls if wait else waiting.attempts
        enough = most if most < allowed else allowed
        # In an event loop the loop's other callbacks must run after each time slice.
        end = 0.0 if wait or not (_get_running_loop() or turns.in_trio) else monotonic() + TIME_SLICE
        sleep: Sleep | None = None
        awaited = -1
        for step in schedule:
            if inbox or step is END_ATTEMPT:  # another thread needs the lock, or the schedule an operation
                return False
            if type(step) is not int:
                polls, until = 0, 0.0
                if end and monotonic() >= end:
                    turns.slice_exhausted = True
                    return False
                continue
            polls += 1
            if polls < enough:
                continue
            if sleep is not None and step == awaited:
                return sleep
            polls, now = 0, monotonic()
            if now >= waiting.look_at:
                waiting.look(now)
            if block and not waiting.spin:
                sleep, awaited = self._prepare_sleep(channel.members[step]), step
                if sleep is None or sleep.advance is None:
                    return sleep or False
                # The schedule is polled once more before the sleep: a peer that has moved before does not signal.
                polls = enough - 1
                continue
            until = until or (now + waiting.spin if wait else now)
            if now >= until:
                return False
            waiting.offer_core(now)
        if sleep is not None and sleep.advance is not None:
            # Peers need not signal any more, which would cost them a system call.
            sleep.advance(())
        return True

    def _prepare_sleep(self, peer: int) -> Sleep | None:
        """Return how a schedule sleeps for a peer; None to continue it in an operation."""
        turns, machine = self._turns, self._machine
        if turns.waker is not None and not machine.operations:
            sleep = machine.sleep(peer)
            if sleep is not None:
                turns.sleeping = True
                return sleep
        waits = turns.prepare_sleep()
        return None if waits is None else Sleep(waits, machine.advance)
