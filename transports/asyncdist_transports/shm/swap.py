"""All-reduces of what fits into an area: everybody shows its tensor and everybody adds all of them, with one meeting.

Of small tensors a program makes thousands of calls a second, whose cost is Python's own: so everything that is the same
for tensors of one shape is worked out once, and what follows is written out where it would read better as calls of
`Window`, whose protocol it is.
"""

from __future__ import annotations

import ctypes
from math import prod

import torch

from asyncdist.collectives.schedule import Schedule
from asyncdist.reduce import Arithmetic
from asyncdist_transports.shm.rounds import STAGED
from asyncdist_transports.shm.window import CALL, DONE, LINE, PLACE, SHIFT, SLOTS, Window

# Half of what `copy_` takes for less than a page. The interpreter is kept: to hand it over takes longer than the copy.
_move = ctypes.PyDLL(None).memmove
_move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move.restype = None

_SLOTS_AGO = (SLOTS << SHIFT) - DONE  # between this collective's first word and the last one of the collective before


class Swap:
    """All-reduces of tensors of one shape and dtype with one reduction."""

    def __init__(self, window: Window, call: int, shape: tuple[int, ...], dtype: torch.dtype, how: Arithmetic) -> None:
        self._window, self._call, self._shape, self._dtype = window, call, shape, dtype
        self._nbytes = prod(shape) * dtype.itemsize
        self._how = how
        self._combine = how.of_two if window.size == 2 else None
        self._areas: list[tuple[int, list[torch.Tensor]] | None] = [None] * SLOTS

    def schedule(self, number: int, tensor: torch.Tensor) -> Schedule:
        """Reduce a contiguous tensor over the members, in place, as the group's n-th collective."""
        window, call, combine = self._window, self._call, self._combine
        words, others, rank = window.words, window.others, window.rank
        light, full = window.fence.light, window.fence.full
        if window.newcomers:
            yield from window.enter(number)
        slot = number % SLOTS
        place, areas = self._areas[slot] or self._made(number)
        at, now = slot * LINE, number << SHIFT
        free, staged = now - _SLOTS_AGO, now + STAGED
        while words[at] < free:  # as in `Window.enter`
            yield rank
        for member in others:
            while member.words[at] < free:
                yield member.rank
        window.last[slot] = number
        _move(place, tensor.data_ptr(), self._nbytes)
        words[at] = now
        light()
        words[at + CALL], words[at + PLACE] = call, 0
        light()
        words[at] = staged
        full()
        for member in others:
            if member.asleep[0]:
                member.ring()
        for member in others:
            theirs = member.words
            while theirs[at] < staged:
                yield member.rank
            light()
            if theirs[at + CALL] != call:
                window.check(number, call, [member])
        if window.unchecked:
            window.recheck(number)
        if combine is None:
            self._how.reduce(areas, tensor)
        elif rank == 0:  # our own is still in the nearest cache, and need not be read from the area
            combine(tensor, areas[1], out=tensor)
        else:
            combine(areas[0], tensor, out=tensor)
        light()
        words[at] = now + DONE
        full()
        for member in others:
            if member.asleep[0]:
                member.ring()

    def _made(self, number: int) -> tuple[int, list[torch.Tensor]]:
        """Return where our area of a slot is, with memory behind it, and the members' areas."""
        window = self._window
        window.reserve(number, 0, self._nbytes)
        areas = [
            window.only(number, rank, prod(self._shape), self._dtype).view(self._shape) for rank in range(window.size)
        ]
        made = self._areas[number % SLOTS] = areas[window.rank].data_ptr(), areas
        return made
