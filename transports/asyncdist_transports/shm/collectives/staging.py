"""Staged data: large messages in pieces that stay in the cache, copied in by one member and out by the others.

One round moves one piece of everything. A member copies its piece into one half of its slot, says so (*staged*), waits for
the pieces that it needs, takes them, and says so (*taken*). The halves are used in turn: before it copies into one again
it waits until those who take have taken what was there two rounds ago, which they mostly have. So the members work side by
side, and a round costs one meeting.

    round r      wait taken(r - 2)   stage half r % 2   say staged(r)   wait staged(r) of the others   take   say taken(r)

Staged and taken are counted apart, so a member may stage further ahead than one round, in more room than two halves: in
its stream, see `stream`. How far is its own affair.

Compared with staging the whole message first: the piece is still in the second-level cache when a peer reads it, so
memory proper sees each byte of a tensor read once and written once. On the machine where this was chosen, an all-reduce
of 25 MiB between two ranks took 3.0 ms in pieces of 512 KiB, 6.6 ms staged whole, and 4.1 ms with the kernel copying
straight from the peer's address space (`process_vm_readv`), which needs the right to trace it besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncdist.algorithms.schedule import Schedule
from asyncdist_transports.shm.collectives.slot_table import DONE, FINISHED, SlotMember, SlotTable

POSTED, STAGED = 1, 2
Piece = Callable[[int, int], None]
"""``piece(k, turn)`` stages or takes the k-th piece of everything, in the areas of that round of the collective."""


class CollectiveState:
    """One collective in its slot: which round it is in, and where the members' data lies."""

    __slots__ = ("_met", "_posted", "call", "number", "place", "places", "room", "round", "window")

    def __init__(self, window: SlotTable, number: int, call: int, place: int = 0, *, posted: bool = False) -> None:
        self.window, self.number, self.call = window, number, call
        self.place = place
        """Where ours lies for all to read, or a table of places: 1 + its offset in the arena; 0 if we stage it."""
        self.places: dict[int, int] = {}
        """The same of the members whom we have met."""
        self._met = self._posted = posted
        self.round = 0
        """How many rounds we have begun."""
        self.room = 2
        """How many areas we use in turn."""

    def say(self, step: int) -> None:
        """Say that we have reached a step; with the first one, what we call and where our data lies."""
        if self._posted:
            self.window.publish(self.number, step)
        else:
            self._posted = True
            self.window.post(self.number, self.call, self.place, step)

    def meet(self, members: Sequence[SlotMember]) -> Schedule:
        """Wait until some members have posted; compare what they call, and learn where their data lies."""
        window = self.window
        self._met = True
        yield from window.reached(self.number, POSTED, members)
        window.check(self.number, self.call, members)
        self.places = {member.rank: window.place(self.number, member) for member in members}

    def open_stream(self, room: int, nbytes: int) -> Schedule:
        """Use so many pieces of our stream in turn from the next round on, of up to so many bytes each.

        If a later collective has the stream, things stay as they are. SharedMemoryError if there is no memory left.
        """
        if self.round:  # what they find where we have said until now
            yield from self.window.taken(self.number, self.round - 1, self.window.others)
        if (yield from self.window.open_stream(self.number, self.round, room, nbytes)):
            self.room = room

    def rounds(
        self,
        count: int,
        stage: Piece | None,
        take: Piece | None,
        sources: Sequence[SlotMember],
        takers: Sequence[SlotMember],
        *,
        reads_open: bool = True,
        ahead: int = 0,
    ) -> Schedule:
        """Run so many rounds. ``sources`` are whose data we take, ``takers`` who take ours.

        Where open memory is read (``reads_open``), those whose data lies open stage nothing, ourselves included. Others
        stage ``ahead`` rounds before they take, as far as they have room to.
        """
        window, number = self.window, self.number
        stages = None if reads_open and self.place else stage
        ahead = min(ahead, self.room // 2 - 1) if stages is not None else 0
        first, self.round = self.round, self.round + count
        try:
            for k in range(count + ahead):
                if k < count:
                    turn = first + k
                    if stages is not None:
                        yield from window.claim(number, turn, takers)
                        stages(k, turn)
                        self.say(turn + STAGED)
                    elif not self._posted:
                        self.say(POSTED)
                if k >= ahead and take is not None:
                    turn = first + k - ahead
                    if not self._met:
                        yield from self.meet(sources)
                    opened = [member for member in sources if reads_open and self.places[member.rank]]
                    staged = [member for member in sources if member not in opened]
                    yield from window.reached(number, turn + STAGED, staged)
                    take(k - ahead, turn)
                    yield from window.still_open(opened)
                    window.publish_taken(number, turn)
                yield ()
        except BaseException:
            self._withdraw()
            raise

    def end(self, takers: Sequence[SlotMember]) -> Schedule:
        """Leave the slot; if our data lay open, not before those who take it have finished with it."""
        if len(self.places) < len(self.window.others):  # those whom we have not met may have called something else
            self.window.unchecked.append((self.number, self.call))
        if self.place:
            self.window.publish(self.number, FINISHED)
            try:
                yield from self.window.reached(self.number, FINISHED, takers)
            except BaseException:
                self._withdraw()
                raise
        self.window.publish(self.number, DONE)

    def _withdraw(self) -> None:
        if self.place:
            self.window.withdraw()
