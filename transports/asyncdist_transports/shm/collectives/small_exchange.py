"""The exchange protocol of small tensors: every member stages its data and reads the others' data, with one
synchronisation.

A program makes thousands of calls with small tensors a second, and their cost is the interpreter's. Everything that calls
with the same signature share is therefore computed once per slot (see `small`), and `SmallExchange.begin` contains
the code of `SlotTable`'s methods inline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.memory.bounded_cache import BoundedCache
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
_BOUND_TENSORS = 64
_POLLS = 32
"""Polls of the sources before a call yields to wait: they take no longer than the way back to the engine."""


Move = Callable[[Any], object]


class Moves(NamedTuple):
    """A member's actions in one slot for calls with one signature. Both functions get the tuple of the call's tensors, or
    what is bound to the memory of its only tensor: ``stage`` the source, ``read`` the target."""

    stage: Move | None
    """Copies the data that others read into this member's area; None if they read nothing."""
    read: Move | None
    """Copies or reduces data from the others' areas; None if this member reads nothing, and so waits for no member."""
    location: int = 0
    """The location that this member posts: see `staging.CollectiveState`."""


Bind = Callable[[torch.Tensor], tuple[Any, Any]]
"""Returns what stands for the memory of a tensor, and does not keep it alive: as the source and as the target of data."""

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
        bind: ``bind(tensor)`` returns what the moves get. It is kept for the next call with a tensor at this address.
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
        bind: Bind | None = None,
    ) -> None:
        self._slots, self._call, self._nbytes, self._make = slots, call, nbytes, moves
        self._sources, self._first, self._goal, self._fallback = sources, first, goal, fallback
        self._moves: list[tuple[Move | None, Move | None, int] | None] = [None] * SLOTS
        self._bind = bind
        self._bound: BoundedCache[int, tuple[Any, Any]] = BoundedCache(_BOUND_TENSORS)
        self._bound_to = self._bound.get

    def begin(self, number: int, *tensors: Any) -> Schedule | None:
        """Begin the group's n-th collective on contiguous tensors; see `PreparedCall`."""
        if self._bind is None:
            return self._exchange(tensors, tensors, number, *tensors)
        tensor = tensors[0]
        address = tensor.data_ptr()
        source, target = self._bound_to(address) or self._bound.add(address, self._bind(tensor))
        return self._exchange(source, target, number, tensor)

    def kept(self, *tensors: Any) -> PreparedCall:
        """Return `begin` for calls with these tensors alone, whose memory stays where it is."""
        if self._bind is None:
            return self.begin
        return functools.partial(self._exchange, *self._bind(tensors[0]))

    def _exchange(self, source: Any, target: Any, number: int, *tensors: Any) -> Schedule | None:
        slots, call = self._slots, self._call
        words, others, fence = slots.words, slots.others, slots.fence
        slot = number % SLOTS
        at, now = slot * LINE, number << SHIFT
        # As in `SlotTable.enter`.
        free = now - _SLOTS_AGO
        if slots.unresolved or words[at] < free:
            return self._enter(number, tensors, source, target)
        for member in others:
            if member.words[at] < free:
                return self._enter(number, tensors, source, target)
        if slots.deferred_checks:
            slots.check_deferred(number)
        slots.last_numbers[slot] = number
        moves = self._moves[slot] or self._made(number)
        stage, read, location = moves
        if stage is not None:
            stage(source)
        # As in `SlotTable.post`, unless the line has the same words already.
        if slots.posted[slot] is not moves:
            words[at] = now
            fence.light()
            words[at + CALL], words[at + LOCATION] = call, location
            slots.posted[slot] = moves
        if fence.is_needed:
            fence.light()
        words[at] = now + self._first
        try:
            fence.open()
            # A member that is done with this collective sleeps in a later one, for which this rank has posted nothing yet.
            for member in others:
                if member.asleep[0] and (member.words[at] < now + DONE or member.words[AWAITS_SLOT]):
                    member.signal()
            if read is None:
                slots.deferred_checks.append((number, call))
                return None
            goal, polls = now + self._goal, _POLLS
            for member in self._sources:
                theirs = member.words
                while theirs[at] < goal:
                    polls -= 1
                    if not polls:
                        return self._wait(number, tensors, target, read)
                if fence.is_needed:
                    fence.light()
                if theirs[at + CALL] != call:
                    slots.check_calls(number, call, [member])
            if (rest := self._read(number, tensors, target, read)) is not None:
                return rest
        finally:
            fence.close()
        for member in others:
            if member.asleep[0] and member.words[AWAITS_SLOT]:
                member.signal()
        return None

    def _enter(self, number: int, tensors: tuple[Any, ...], source: Any, target: Any) -> Schedule:
        """Begin when the slot is free."""
        yield from self._slots.enter(number)
        yield from self._exchange(source, target, number, *tensors) or ()

    def _wait(self, number: int, tensors: tuple[Any, ...], target: Any, read: Move) -> Schedule:
        """Wait for the sources, and complete the call. The schedule keeps the tensors."""
        slots, at, now = self._slots, number % SLOTS * LINE, number << SHIFT
        for member in self._sources:
            words = member.words
            while words[at] <= now:
                yield member.wait
            slots.fence.light()
            # A member that calls something else may wait for this one without end.
            slots.check_calls(number, self._call, [member])
            while words[at] < now + self._goal:
                yield member.wait
            slots.fence.light()
        yield from self._read(number, tensors, target, read) or ()
        slots.fence.full()
        for member in slots.others:
            if member.asleep[0] and member.words[AWAITS_SLOT]:
                member.signal()

    def _read(self, number: int, tensors: tuple[Any, ...], target: Any, read: Move) -> Schedule | None:
        """Read what the sources have staged, and leave the slot; return the schedule of a call with other blocks."""
        slots = self._slots
        if slots.deferred_checks:
            slots.check_deferred(number)
        try:
            read(target)
        except NonUniformBlocks:
            assert self._fallback is not None, "only an all-to-all has blocks of several sizes"
            return self._fallback(number, *tensors)
        if slots.fence.is_needed:
            slots.fence.light()
        slots.words[number % SLOTS * LINE] = (number << SHIFT) + DONE
        return None

    def _made(self, number: int) -> tuple[Move | None, Move | None, int]:
        self._slots.reserve(number, 0, self._nbytes)
        stage, read, location = self._make(number)
        # An exact tuple is unpacked in less time.
        made = self._moves[number % SLOTS] = stage, read, location
        return made
