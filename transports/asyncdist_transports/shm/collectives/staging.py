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
PieceAction = Callable[[int, int], None]
"""``piece(k, round_index)`` stages or takes the k-th piece of everything, in the areas of that round of the collective."""


class CollectiveState:
    """One collective in its slot: which round it is in, and where the members' data lies."""

    __slots__ = ("_calls_checked", "_posted", "areas", "call", "location", "locations", "next_round", "number", "slots")

    def __init__(self, slots: SlotTable, number: int, call: int, location: int = 0, *, posted: bool = False) -> None:
        self.slots, self.number, self.call = slots, number, call
        self.location = location
        """Where ours lies for all to read, or a table of places: 1 + its offset in the arena; 0 if we stage it."""
        self.locations: dict[int, int] = {}
        """The same of the members whom we have met."""
        self._calls_checked = self._posted = posted
        self.next_round = 0
        """How many rounds we have begun."""
        self.areas = 2
        """How many areas we use in turn."""

    def publish_step(self, step: int) -> None:
        """Say that we have reached a step; with the first one, what we call and where our data lies."""
        if self._posted:
            self.slots.publish(self.number, step)
        else:
            self._posted = True
            self.slots.post(self.number, self.call, self.location, step)

    def wait_posted(self, members: Sequence[SlotMember]) -> Schedule:
        """Wait until some members have posted; compare what they call, and learn where their data lies."""
        slots = self.slots
        self._calls_checked = True
        yield from slots.wait_reached(self.number, POSTED, members)
        slots.check_calls(self.number, self.call, members)
        self.locations = {member.rank: slots.location(self.number, member) for member in members}

    def open_stream(self, areas: int, nbytes: int) -> Schedule:
        """Use so many pieces of our stream in turn from the next round on, of up to so many bytes each.

        If a later collective has the stream, things stay as they are. SharedMemoryError if there is no memory left.
        """
        if self.next_round:  # what they find where we have said until now
            yield from self.slots.wait_read(self.number, self.next_round - 1, self.slots.others)
        if (yield from self.slots.open_stream(self.number, self.next_round, areas, nbytes)):
            self.areas = areas

    def run_rounds(
        self,
        count: int,
        stage: PieceAction | None,
        read: PieceAction | None,
        sources: Sequence[SlotMember],
        readers: Sequence[SlotMember],
        *,
        reads_open: bool = True,
        ahead: int = 0,
    ) -> Schedule:
        """Run so many rounds. ``sources`` are whose data we take, ``readers`` who take ours.

        Where open memory is read (``reads_open``), those whose data lies open stage nothing, ourselves included. Others
        stage ``ahead`` rounds before they take, as far as they have room to.
        """
        slots, number = self.slots, self.number
        stages = None if reads_open and self.location else stage
        ahead = min(ahead, self.areas // 2 - 1) if stages is not None else 0
        first, self.next_round = self.next_round, self.next_round + count
        try:
            for k in range(count + ahead):
                if k < count:
                    round_index = first + k
                    if stages is not None:
                        yield from slots.wait_reusable(number, round_index, readers)
                        stages(k, round_index)
                        self.publish_step(round_index + STAGED)
                    elif not self._posted:
                        self.publish_step(POSTED)
                if k >= ahead and read is not None:
                    round_index = first + k - ahead
                    if not self._calls_checked:
                        yield from self.wait_posted(sources)
                    zero_copy_members = [member for member in sources if reads_open and self.locations[member.rank]]
                    staged = [member for member in sources if member not in zero_copy_members]
                    yield from slots.wait_reached(number, round_index + STAGED, staged)
                    read(k - ahead, round_index)
                    yield from slots.hold_if_withdrawn(zero_copy_members)
                    slots.publish_read(number, round_index)
                yield ()
        except BaseException:
            self._withdraw()
            raise

    def finish(self, readers: Sequence[SlotMember]) -> Schedule:
        """Leave the slot; if our data lay open, not before those who take it have finished with it."""
        if len(self.locations) < len(self.slots.others):  # those whom we have not met may have called something else
            self.slots.deferred_checks.append((self.number, self.call))
        if self.location:
            self.slots.publish(self.number, FINISHED)
            try:
                yield from self.slots.wait_reached(self.number, FINISHED, readers)
            except BaseException:
                self._withdraw()
                raise
        self.slots.publish(self.number, DONE)

    def _withdraw(self) -> None:
        if self.location:
            self.slots.withdraw()
