"""All-reduces in which everybody shows its tensor and everybody adds all of them: one meeting a piece, nothing else.

Between two members nothing moves fewer bytes, and of small tensors a program makes thousands of calls a second, whose
cost is Python's own: so everything that is the same for tensors of one shape is worked out once, and what follows is
written out where it would read better as calls of `Window`, whose protocol it is.

Unlike the rounds of `rounds`, these need no *taken*: who stages a piece has taken the one before.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self._step = window.area_nbytes // dtype.itemsize
        count = torch.Size(shape).numel()
        self._rounds = max(1, -(-count // self._step))
        self._last_count = count - (self._rounds - 1) * self._step
        self._areas: list[list[list[torch.Tensor]] | None] = [None] * SLOTS  # by slot, round (see `_made`), and member

    def __call__(self, number: int, tensor: torch.Tensor) -> Schedule:
        """Reduce a contiguous tensor over the members, in place, as the group's n-th collective."""
        if self._openly is not None:
            open_one = self._openly(number, tensor)
            if open_one is not None:
                return open_one
        return self._swapped(number, tensor)

    def _swapped(self, number: int, tensor: torch.Tensor) -> Schedule:
        window, words, others, combine = self._window, self._words, self._others, self._combine
        light, full = self._light, self._full
        if window.newcomers:
            yield from window.enter(number)
        slot = number % SLOTS
        at, staged, free = slot * LINE, number << SHIFT | STAGED, (number - SLOTS) << SHIFT | DONE
        areas = self._areas[slot] or self._made(number)
        while words[at] < free:  # as in `Window.enter`
            yield window.rank
        for member in others:
            while member.words[at] < free:
                yield member.rank
        window.last[slot] = number
        words[at] = number << SHIFT
        light()
        words[at + CALL], words[at + PLACE] = self._call, 0
        pieces = (tensor,) if self._rounds == 1 else tensor.view(-1).split(self._step)
        last = self._rounds - 1
        for turn, piece in enumerate(pieces):
            everyone = areas[turn % 2 if turn < last else 2]
            everyone[window.rank].copy_(piece)
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
                if theirs[at + CALL] != self._call:
                    window.check(number, self._call, [member])
            if window.unchecked:
                window.recheck(number)
            light()
            if combine is None:
                self._how.reduce(everyone, piece)
            elif window.rank == 0:  # our own is still in the nearest cache, and need not be read from the area
                combine(piece, everyone[1], out=piece)
            else:
                combine(everyone[0], piece, out=piece)
            if turn < last:
                staged += 2
                yield ()
        light()
        words[at] = staged | DONE
        full()
        for member in others:
            if member.asleep[0]:
                member.ring()

    def _made(self, number: int) -> list[list[torch.Tensor]]:
        """Return the members' areas of a slot: in each half for a whole piece, and for the last."""
        window, dtype, step, size = self._window, self._dtype, self._step, range(self._window.size)
        made: list[list[torch.Tensor]] = [[], [], []]
        for half in range(min(2, self._rounds)):
            window.reserve(number, half, min(step, self._last_count if self._rounds == 1 else step) * dtype.itemsize)
            if self._rounds > 1:
                made[half] = [window.area(number, half, rank, 0, step, dtype) for rank in size]
        half = (self._rounds - 1) % 2
        last = [window.area(number, half, rank, 0, self._last_count, dtype) for rank in size]
        made[2] = last if self._rounds > 1 else [area.view(self._shape) for area in last]
        self._areas[number % SLOTS] = made
        return made
