"""Where the collectives of one group meet: numbered slots, in each member's own memory, with steps that only grow.

The n-th collective of a group uses slot ``n % SLOTS``. A slot is a line of words and two areas for staged data. Its word
STEP says how far this member is: ``n << 24 | step``; ``n << 24 | FINISHED`` when it is through with everybody's data, and
``n << 24 | DONE`` when it will not even look at anybody's words for this collective again: then those who have left may
free them. Since steps of later collectives are larger, "has reached" is one comparison, and nothing is ever
reset. A member may use a slot again when all have said DONE to the collective before it there.

A window is an address range; memory is reserved behind its areas as far as messages need it. Behind the slots lies the
*stream*, room for many pieces, in which one collective after the other stages what is large: see `stream`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.errors import SharedMemoryError
from asyncdist.memory.shared_arena import PAGE_NBYTES, Arena, ArenaMapping
from asyncdist_transports.shm.memory_order import Fence

SLOTS = 8
STEP, CALL, LOCATION = 0, 1, 2
LEFT = 3  # in the first line only: 1 when this member will not look at any slot again
STREAM = 4  # ``n << 24 | first << 8 | room``: round r of this member lies in piece (first + r) % room of its stream
READ_ROUNDS = 5  # ``n << 24 |`` of how many rounds this member has taken the others' pieces
WITHDRAWN = 6  # in the first line only: 1 when this member has given up a collective for which its data lay open
RESULT = 7  # ``n`` when this member shows the result of the n-th collective behind what it has staged: see `small`
LINE = 8
SHIFT = 24
DONE = (1 << SHIFT) - 1
FINISHED = DONE - 1
STREAM_PIECES = 16
_LINES_NBYTES = PAGE_NBYTES


class PeerHandle(NamedTuple):
    """A member of a window other than ourselves, as its transport knows it."""

    mapping: ArenaMapping
    find: Callable[[int], int | None]
    asleep: memoryview
    signal: Callable[[], None]
    gone: Callable[[], bool]


class SlotMember:
    """Another member of a group: its words and memory, once its window has been found."""

    __slots__ = ("asleep", "handle", "mapping", "offset", "rank", "signal", "words")

    def __init__(self, rank: int, handle: PeerHandle) -> None:
        self.rank = rank
        self.handle = handle
        self.mapping, self.asleep, self.signal = handle.mapping, handle.asleep, handle.signal
        self.offset = -1
        self.words: memoryview = memoryview(b"")


class SlotTable:
    """One group's meeting place, as one member sees it.

    ``handles`` are the members by rank in the group, None for ourselves. ``mismatch_error(member, ours, theirs)`` returns the
    error to raise when a member has called something else.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        world_ranks: Sequence[int],
        handles: Sequence[PeerHandle | None],
        arena: Arena,
        fence: Fence,
        area_nbytes: int,
        mismatch_error: Callable[[int, int, int], Exception],
        *,
        oversubscribed: bool = False,
    ) -> None:
        self.number, self.rank, self.size = number, rank, len(handles)
        self.world_ranks = tuple(world_ranks)
        self.area_nbytes = -(-area_nbytes // PAGE_NBYTES) * PAGE_NBYTES
        self.arena, self.fence = arena, fence
        self._mismatch_error = mismatch_error
        self.oversubscribed = oversubscribed
        """Whether members share cores: what one has worked out, others had better not."""
        self.others = [SlotMember(peer, handle) for peer, handle in enumerate(handles) if handle is not None]
        self.members_by_rank: dict[int, SlotMember] = {member.rank: member for member in self.others}
        self.unresolved = list(self.others)
        """The members whose windows we have not found yet."""
        self.block = arena.hold(_LINES_NBYTES + (SLOTS * 2 + STREAM_PIECES) * self.area_nbytes)
        try:
            arena.reserve(self.block.offset, _LINES_NBYTES)
        except SharedMemoryError:
            self.block.free()
            raise
        self.words = arena.mapping.words(self.block.offset, SLOTS * LINE)
        for word in range(len(self.words)):
            self.words[word] = 0
        self.words[STEP] = DONE  # the collective before the first in this slot, number 0, is over
        self._reserved = [0] * (2 * SLOTS + STREAM_PIECES)
        self._streamed = 0  # the collective that used the stream last
        self._position = 0  # after the piece of the stream that was staged last
        self._staged: dict[
            int, tuple[int, int, Sequence[SlotMember]]
        ] = {}  # what each area was used for last, by `wait_reusable`
        self._tables: dict[int, memoryview] = {}
        self._areas: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self.last_numbers = [0] * SLOTS
        """The last collective in each slot."""
        self.kept_tensors: list[torch.Tensor | Sequence[torch.Tensor]] = []
        """Into which a member may still write because its side of a failed all-reduce goes on: kept until it has left."""
        self.deferred_checks: deque[tuple[int, int]] = deque()
        """Collectives that we did with some members only, and what we called: see `check_deferred`."""

    # -- steps ---------------------------------------------------------------------------------

    def enter(self, number: int) -> Schedule:
        """Wait until the slot of the n-th collective is free."""
        while self.unresolved:
            member = self.unresolved[-1]
            offset = member.handle.find(self.number)
            if offset is None:
                yield member.rank
                continue
            member.offset = offset
            member.words = member.mapping.words(offset, SLOTS * LINE)
            self.unresolved.pop()
        yield from self._wait_done(number - SLOTS)
        if self.deferred_checks:
            self.check_deferred(number)
        self.last_numbers[number % SLOTS] = number

    def _wait_done(self, number: int) -> Schedule:
        """Wait until all have done with a collective, ourselves included: others may have before we do."""
        at, done = number % SLOTS * LINE, number << SHIFT | DONE
        while self.words[at] < done:
            yield self.rank
        for member in self.others:
            words = member.words
            while words[at] < done:
                yield member.rank

    def post(self, number: int, call: int, location: int, step: int) -> None:
        """Say what we call, and where our data lies (0: it is staged), with the first step."""
        at, words = number % SLOTS * LINE, self.words
        words[at + STEP] = number << SHIFT  # the line is no longer that of the collective before: see `check_deferred`
        self.fence.light()
        words[at + CALL], words[at + LOCATION] = call, location
        self.publish(number, step)

    def publish(self, number: int, step: int) -> None:
        """Say that we have reached a step; wake who sleeps."""
        self._store_word(number, STEP, step)

    def publish_read(self, number: int, round_index: int) -> None:
        """Say that we have taken the others' pieces of a round, and of all before it; wake who sleeps."""
        self._store_word(number, READ_ROUNDS, round_index + 1)

    def _store_word(self, number: int, what: int, count: int) -> None:
        self.fence.light()  # what we have written, and read, before the word that says so
        self.words[number % SLOTS * LINE + what] = number << SHIFT | count
        self.fence.full()  # and that before we look who sleeps: see `order`
        for member in self.others:
            if member.asleep[0]:
                member.signal()

    def wait_reached(self, number: int, step: int, members: Sequence[SlotMember]) -> Schedule:
        """Wait until each of some members has reached a step."""
        at, goal = number % SLOTS * LINE, number << SHIFT | step
        for member in members:
            words = member.words
            while words[at] < goal:
                yield member.rank
        self.fence.light()  # their words before their data

    def wait_read(self, number: int, round_index: int, members: Sequence[SlotMember]) -> Schedule:
        """Wait until each of some members has taken our piece of a round, or is through with everything."""
        at, goal, over = number % SLOTS * LINE, number << SHIFT | round_index + 1, number << SHIFT | FINISHED
        for member in members:
            words = member.words
            while words[at + READ_ROUNDS] < goal and words[at] < over:
                yield member.rank
        self.fence.light()  # their loads of our piece before our next stores to it

    def check_calls(self, number: int, call: int, members: Sequence[SlotMember]) -> None:
        """Raise if one of some members, who have posted, called something else."""
        at = number % SLOTS * LINE + CALL
        for member in members:
            theirs = member.words[at]
            if theirs != call:
                raise self._mismatch_error(member.rank, call, theirs)
        if self.deferred_checks:
            self.check_deferred(number)

    def check_deferred(self, number: int) -> None:
        """Raise if a member called something else where we did not wait for it, as a root that only sends does not.

        ``number`` is the collective that we are at. Who is at one that uses the same slot has looked before it began, so
        of two members that differ one finds out.
        """
        while self.deferred_checks and self.deferred_checks[0][0] < number:
            before, call = self.deferred_checks[0]
            at = before % SLOTS * LINE
            for member in self.others:
                if member.words[at] <= before << SHIFT:  # not there yet: another time
                    return
                self.fence.light()
                theirs = member.words[at + CALL]
                self.fence.light()
                if theirs != call and member.words[at] >> SHIFT == before:
                    raise self._mismatch_error(member.rank, call, theirs)
            self.deferred_checks.popleft()

    def location(self, number: int, member: SlotMember) -> int:
        """Return where a member's data for this collective lies, or a table that says so; 0 if it is staged."""
        return member.words[number % SLOTS * LINE + LOCATION]

    # -- open data -----------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Say that we have given up: what lay open for all is its owner's again, who may write over it."""
        if self.arena.pid == os.getpid():  # a forked child gives up for itself, and has our words before it
            self.words[WITHDRAWN] = 1
            self.fence.full()

    def hold_if_withdrawn(self, members: Sequence[SlotMember]) -> Schedule:
        """Let nobody go on who has read what some members had withdrawn by then: it may have been anything.

        Why they have is on its way to us, and ends this; if they have destroyed the group, our deadline does.
        """
        self.fence.light()  # the loads of their data before those of their words
        for member in members:
            while member.words[WITHDRAWN]:
                yield member.rank

    # -- areas ---------------------------------------------------------------------------------

    def reserve(self, number: int, round_index: int, nbytes: int) -> None:
        """See that there is memory behind our area of a round. SharedMemoryError if there is none left."""
        self._reserve(self._area_index(number, round_index, self.words), nbytes)

    def _area_index(self, number: int, round_index: int, words: memoryview) -> int:
        """Return which area a member uses in a round: a half of its slot, or a piece of its stream."""
        stream = words[number % SLOTS * LINE + STREAM]
        if stream >> SHIFT == number:
            return 2 * SLOTS + ((stream >> 8 & 0xFF) + round_index) % (stream & 0xFF)
        return number % SLOTS * 2 + (round_index & 1)

    def _reserve(self, index: int, nbytes: int) -> None:
        if nbytes > self._reserved[index]:
            start = self.block.offset + _LINES_NBYTES + index * self.area_nbytes
            self.arena.reserve(start, nbytes)
            self._reserved[index] = nbytes

    def own_area(self, number: int, round_index: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements of our area of a round, with memory behind them. SharedMemoryError if there is none left."""
        index = self._area_index(number, round_index, self.words)
        self._reserve(index, start + count * dtype.itemsize)
        return self._area(index, self.rank, start, count, dtype)

    def area(
        self, number: int, round_index: int, rank: int, start: int, count: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return elements of a member's area of a round, from byte ``start`` on; of ours if ``rank`` is our own."""
        words = self.words if rank == self.rank else self.members_by_rank[rank].words
        return self._area(self._area_index(number, round_index, words), rank, start, count, dtype)

    def first_half(self, number: int, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements of a member's first half of a slot, from byte ``start`` on, where there are no rounds."""
        return self._area(number % SLOTS * 2, rank, start, count, dtype)

    def location_of(self, number: int, rank: int, start: int) -> int:
        """Return what a member posts as the place of its data if that begins there: see `first_half`."""
        return 1 + self._area_start(number % SLOTS * 2, rank)[1] + start

    def _area(self, index: int, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        key = (index * self.size + rank, start, count, dtype)
        tensor = self._areas.get(key)
        if tensor is None:
            if len(self._areas) >= 4096:
                self._areas.clear()
            mapping, offset = self._area_start(index, rank)
            tensor = self._areas[key] = mapping.tensor(offset + start, count, dtype)
        return tensor

    def table(self, number: int, rank: int) -> memoryview:
        """Return the words of a member's first half of a slot, as far as it has reserved them."""
        index = number % SLOTS * 2
        words = self._tables.get(index * self.size + rank)
        if words is None:
            mapping, offset = self._area_start(index, rank)
            words = self._tables[index * self.size + rank] = mapping.words(offset, self.area_nbytes // 8)
        return words

    def _area_start(self, index: int, rank: int) -> tuple[ArenaMapping, int]:
        member = self.members_by_rank.get(rank)
        mapping, offset = (self.arena.mapping, self.block.offset) if member is None else (member.mapping, member.offset)
        return mapping, offset + _LINES_NBYTES + index * self.area_nbytes

    def wait_reusable(self, number: int, round_index: int, readers: Sequence[SlotMember]) -> Schedule:
        """Wait until nobody takes any more what our area of a round was used for last; who takes it now are ``readers``."""
        index = self._area_index(number, round_index, self.words)
        before = self._staged.get(index)
        if before is not None:
            yield from self.wait_read(*before)
        self._staged[index] = number, round_index, readers
        if index >= 2 * SLOTS:
            self._position = index - 2 * SLOTS + 1

    def open_stream(self, number: int, round_index: int, room: int, nbytes: int) -> Schedule:
        """Have the n-th collective stage in the stream from a round on, in ``room`` pieces in turn; return whether it does.

        It goes on behind what was staged there last. Waits until the collective that used the stream before is over for
        us, which must have been an earlier one: who would wait for a later one, which has come first here, might be what
        the later one waits for elsewhere. SharedMemoryError if there is no memory left for pieces of so many bytes.
        """
        before = self._streamed
        if before > number:
            return False
        for index in range(2 * SLOTS, 2 * SLOTS + room):
            self._reserve(index, nbytes)
        self._streamed = number
        over = before << SHIFT | DONE
        while before != number and self.words[before % SLOTS * LINE] < over:
            yield self.rank
        self.words[number % SLOTS * LINE + STREAM] = number << SHIFT | (self._position - round_index) % room << 8 | room
        return True

    # -- the end -------------------------------------------------------------------------------

    def mark_left(self) -> None:
        """Say that we look at nobody's slots again, whatever had become of the collectives in them."""
        self.fence.light()
        self.words[LEFT] = 1

    def pending_readers(self) -> Iterator[SlotMember]:
        """Yield the members who may still look at what we have written."""
        for member in self.others:
            if member.offset < 0 or member.handle.gone() or member.handle.find(self.number) is None:
                continue
            words = member.words
            unseen = any(
                number and words[slot * LINE] < (number << SHIFT | DONE)
                for slot, number in enumerate(self.last_numbers)
            )
            if unseen and not words[LEFT]:
                yield member
