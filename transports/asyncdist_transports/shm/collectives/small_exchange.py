"""The exchange protocol of small tensors: every member stages its data and reads the others' data, with one
synchronisation.

A program makes thousands of calls with small tensors a second, and their cost is the interpreter's. Everything that calls
with the same signature share is therefore computed once per slot (see `small`), and `SmallExchange.schedule` contains
the code of `SlotTable`'s methods inline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.transport.native import PreparedCall
from asyncdist_transports.shm.collectives.slot_table import (
    AWAITS_SLOT,
    CALL,
    DONE,
    LINE,
    LOCATION,
    SHIFT,
    SLOTS,
    SlotMember,
    SlotTable,
)

# The distance between the first word of this collective and the last word of the previous collective in its slot.
_SLOTS_AGO = (SLOTS << SHIFT) - DONE


Move = Callable[..., object]
"""Gets the tensors of a call."""


class Moves(NamedTuple):
    """A member's actions in one slot for calls with one signature. Both functions get the tensors of the call."""

    stage: Move | None
    """Copies the data that others read into this member's area; None if they read nothing."""
    read: Move | None
    """Copies or reduces data from the others' areas; None if this member reads nothing, and so waits for no member."""
    location: int = 0
    """The location that this member posts: see `staging.CollectiveState`."""


MovesOf = Callable[[int], Moves]
"""Returns the moves in the slot of the n-th collective."""


class NonUniformBlocks(Exception):
    """A member's call matches but differs in its block sizes. Raised before anything is read."""


class SmallExchange:
    """Calls with one signature.

    Args:
        slots: The group's slot table.
        call: The fingerprint that the members compare.
        nbytes: Bytes of its area that this member uses.
        moves: ``moves(number)`` returns this member's actions in the slot of the n-th collective.
        sources: The members that this member waits for.
        first: The step that this member has reached after staging; it may be the last one.
        goal: The step that each source has to reach.
        fallback: ``fallback(number, *tensors)`` continues after `NonUniformBlocks`, and leaves the slot.
    """

    def __init__(
        self,
        slots: SlotTable,
        call: int,
        nbytes: int,
        moves: MovesOf,
        sources: Sequence[SlotMember],
        *,
        first: int,
        goal: int,
        fallback: PreparedCall | None = None,
    ) -> None:
        self._slots, self._call, self._nbytes, self._make = slots, call, nbytes, moves
        self._sources, self._first, self._goal, self._fallback = sources, first, goal, fallback
        self._moves: list[Moves | None] = [None] * SLOTS

    def schedule(self, number: int, *tensors: Any) -> Schedule:
        """Run the group's n-th collective on contiguous tensors."""
        slots, call = self._slots, self._call
        words, others = slots.words, slots.others
        light, full = slots.fence.light, slots.fence.full
        if slots.unresolved:
            yield from slots.enter(number)
        slot = number % SLOTS
        stage, read, location = self._moves[slot] or self._made(number)
        at, now = slot * LINE, number << SHIFT
        free, done = now - _SLOTS_AGO, now + DONE
        # As in `SlotTable.enter`.
        for member in others:
            if member.words[at] < free or words[at] < free:
                yield from slots.wait_done(number - SLOTS)
        if slots.deferred_checks:
            slots.check_deferred(number)
        slots.last_numbers[slot] = number
        if stage is not None:
            stage(*tensors)
        words[at] = now
        light()
        words[at + CALL], words[at + LOCATION] = call, location
        light()
        words[at] = now + self._first
        full()
        # A member that is done with this collective sleeps in a later one, for which this rank has posted nothing yet.
        for member in others:
            if member.asleep[0] and (member.words[at] < done or member.words[AWAITS_SLOT]):
                member.signal()
        if read is None:
            slots.deferred_checks.append((number, call))
            return
        goal = now + self._goal
        for member in self._sources:
            theirs = member.words
            while (seen := theirs[at]) <= now:
                yield member.wait
            light()
            # A member that calls something else may wait for this one without end.
            if theirs[at + CALL] != call:
                slots.check_calls(number, call, [member])
            if seen < goal:
                while theirs[at] < goal:
                    yield member.wait
                light()
        if slots.deferred_checks:
            slots.check_deferred(number)
        try:
            read(*tensors)
        except NonUniformBlocks:
            assert self._fallback is not None, "only an all-to-all has blocks of several sizes"
            yield from self._fallback(number, *tensors)
            return
        light()
        words[at] = done
        full()
        for member in others:
            if member.asleep[0] and member.words[AWAITS_SLOT]:
                member.signal()

    def _made(self, number: int) -> Moves:
        self._slots.reserve(number, 0, self._nbytes)
        made = self._moves[number % SLOTS] = self._make(number)
        return made
