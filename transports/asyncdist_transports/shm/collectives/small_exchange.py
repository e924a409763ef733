"""Small messages: everybody shows what it has, and takes what it wants from what the others show, with one meeting.

Of small tensors a program makes thousands of calls a second, whose cost is Python's own: so everything that is the same
for calls of one kind is worked out once a slot (see `small`), and what follows is written out where it would read better
as calls of `SlotTable`, whose protocol it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncdist.algorithms.schedule import Schedule
from asyncdist.transport.native import PreparedCall
from asyncdist_transports.shm.collectives.slot_table import (
    CALL,
    DONE,
    LINE,
    LOCATION,
    SHIFT,
    SLOTS,
    SlotMember,
    SlotTable,
)

_SLOTS_AGO = (SLOTS << SHIFT) - DONE  # between this collective's first word and the last one of the collective before


class Moves(NamedTuple):
    """What a member does in one slot for calls of one kind. Both get the tensors of the call."""

    stage: Callable[..., object] | None
    """Copies into our area what others take from there; None if they take nothing from us."""
    read: Callable[..., object] | None
    """Copies, or reduces, out of the others' areas; None if we take nothing, and need not wait for anybody."""
    location: int = 0
    """What we post as the place of our data: see `rounds.Turn`."""


class NonUniformBlocks(Exception):
    """A member's call is not of the kind that ours is, though it goes with it. Raised before anything is taken."""


class SmallExchange:
    """Calls of one kind: ``moves(number)`` says what we do in that slot.

    ``first`` is the step that we have reached when we have staged; it may be the last. ``sources`` are the members whom
    we wait for then, until they have reached the step ``goal``. Where what we take says that a member's call is `NonUniformBlocks`
    ours, ``fallback(number, *tensors)`` goes on, and leaves the slot.
    """

    def __init__(
        self,
        slots: SlotTable,
        call: int,
        moves: Callable[[int], Moves],
        sources: Sequence[SlotMember],
        *,
        first: int,
        goal: int,
        fallback: PreparedCall | None = None,
    ) -> None:
        self._slots, self._call, self._make = slots, call, moves
        self._sources, self._first, self._goal, self._fallback = sources, first, goal, fallback
        self._moves: list[Moves | None] = [None] * SLOTS

    def schedule(self, number: int, *tensors: Any) -> Schedule:
        """Do the group's n-th collective on contiguous tensors."""
        slots, call = self._slots, self._call
        words, others, rank = slots.words, slots.others, slots.rank
        light, full = slots.fence.light, slots.fence.full
        if slots.unresolved:
            yield from slots.enter(number)
        slot = number % SLOTS
        stage, read, location = self._moves[slot] or self._made(number)
        at, now = slot * LINE, number << SHIFT
        free = now - _SLOTS_AGO
        while words[at] < free:  # as in `SlotTable.enter`
            yield rank
        for member in others:
            while member.words[at] < free:
                yield member.rank
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
        for member in others:
            if member.asleep[0]:
                member.signal()
        if read is None:
            slots.deferred_checks.append((number, call))
            return
        goal = now + self._goal
        for member in self._sources:
            theirs = member.words
            while (seen := theirs[at]) <= now:
                yield member.rank
            light()
            if theirs[at + CALL] != call:  # perhaps it waits for us, and would for ever
                slots.check_calls(number, call, [member])
            if seen < goal:
                while theirs[at] < goal:
                    yield member.rank
                light()
        if slots.deferred_checks:
            slots.check_deferred(number)
        try:
            read(*tensors)
        except NonUniformBlocks:
            assert self._fallback is not None, "only who has another way finds out that it needs one"
            yield from self._fallback(number, *tensors)
            return
        light()
        words[at] = now + DONE
        full()
        for member in others:
            if member.asleep[0]:
                member.signal()

    def _made(self, number: int) -> Moves:
        made = self._moves[number % SLOTS] = self._make(number)
        return made
