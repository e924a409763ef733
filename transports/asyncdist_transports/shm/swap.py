"""All-reduces of what fits into an area: everybody shows its tensor and everybody adds all of them, with one meeting.

Of small tensors a program makes thousands of calls a second, whose cost is Python's own: so everything that is the same
for tensors of one shape is worked out once, and what follows is written out where it would read better as calls of
`Window`, whose protocol it is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from asyncdist.collectives.schedule import Schedule
from asyncdist.reduce import Arithmetic
from asyncdist_transports.shm.rounds import STAGED
from asyncdist_transports.shm.window import CALL, DONE, LINE, PLACE, SHIFT, SLOTS, Window


class Swap:
    """All-reduces of tensors of one shape and dtype with one reduction; each is a schedule.

    ``openly(number, tensor)`` gives the schedule of a tensor that lies open for all members, None of one that does not.
    """

    def __init__(
        self,
        window: Window,
        call: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        how: Arithmetic,
        openly: Callable[[int, torch.Tensor], Schedule | None] | None,
    ) -> None:
        self._window, self._call, self._shape, self._dtype = window, call, shape, dtype
        self._words, self._others = window.words, window.others
        self._light, self._full = window.fence.light, window.fence.full
        self._how = how
        self._combine = how.of_two if window.size == 2 else None
        self._openly = openly
        self._areas: list[list[torch.Tensor] | None] = [None] * SLOTS  # by slot, and member

    def __call__(self, number: int, tensor: torch.Tensor) -> Schedule:
        """Reduce a contiguous tensor over the members, in place, as the group's n-th collective."""
        if self._openly is not None:
            open_one = self._openly(number, tensor)
            if open_one is not None:
                return open_one
        return self._swapped(number, tensor)

    def _swapped(self, number: int, tensor: torch.Tensor) -> Schedule:
        window, words, others, call, combine = self._window, self._words, self._others, self._call, self._combine
        light, full = self._light, self._full
        if window.newcomers:
            yield from window.enter(number)
        slot = number % SLOTS
        areas = self._areas[slot] or self._made(number)
        at, now, free = slot * LINE, number << SHIFT, (number - SLOTS) << SHIFT | DONE
        staged = now | STAGED
        while words[at] < free:  # as in `Window.enter`
            yield window.rank
        for member in others:
            while member.words[at] < free:
                yield member.rank
        window.last[slot] = number
        words[at] = now
        light()
        words[at + CALL], words[at + PLACE] = call, 0
        areas[window.rank].copy_(tensor)
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
            if theirs[at + CALL] != call:
                window.check(number, call, [member])
        if window.unchecked:
            window.recheck(number)
        light()
        if combine is None:
            self._how.reduce(areas, tensor)
        elif window.rank == 0:  # our own is still in the nearest cache, and need not be read from the area
            combine(tensor, areas[1], out=tensor)
        else:
            combine(areas[0], tensor, out=tensor)
        light()
        words[at] = now | DONE
        full()
        for member in others:
            if member.asleep[0]:
                member.ring()

    def _made(self, number: int) -> list[torch.Tensor]:
        """Return the members' areas of a slot, with memory behind ours."""
        window, count = self._window, prod(self._shape)
        window.reserve(number, 0, count * self._dtype.itemsize)
        made = [window.only(number, rank, count, self._dtype).view(self._shape) for rank in range(window.size)]
        self._areas[number % SLOTS] = made
        return made
