"""The slot table: how the members of one group synchronise their collectives in shared memory.

Each member has a slot table in its own arena. The n-th collective of a group uses slot ``n % SLOTS``. A slot is one cache
line of words and two areas for staged data. Its word STEP holds the member's progress: ``n << 24 | step``;
``n << 24 | FINISHED`` when the member has read all data of the other members; ``n << 24 | DONE`` when it will not read any
word of this collective again, so that members that have left may free their memory. Steps of later collectives are larger:
"has reached" is one comparison, and no word is ever reset. A member may reuse a slot when every member has published DONE
for the collective that used it before.

A slot table is an address range; memory is reserved behind its areas as messages need it. The *stream* after the slots
holds several pieces: successive collectives stage large tensors in it (see `streaming`).

`staging`, `zero_copy` and `small_exchange` run collectives over it; `deferred_free` frees it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from asyncdist.base.callables import Callback
from asyncdist.errors import SharedMemoryError
from asyncdist.kernel.algorithms.schedule import Schedule, Wait
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.memory.shared_arena import PAGE_NBYTES, Arena, ArenaMapping
from asyncdist_transports.shm.local_peer import LocalPeer
from asyncdist_transports.shm.memory_order import Fence

SLOTS = 8
STEP, CALL, LOCATION = 0, 1, 2
# In the first line only: 1 when this member will not read any slot again.
LEFT = 3
# ``n << 24 | first << 8 | areas``: round r of this member lies in piece (first + r) % areas of its stream.
STREAM = 4
# ``n << 24 | rounds`` of the other members' pieces that this member has read.
READ_ROUNDS = 5
# In the first line only: 1 when this member has aborted a collective that let others access its tensors.
WITHDRAWN = 6
# ``n`` when this member shows the result of the n-th collective after its staged data: see `small`.
RESULT = 7
LINE = 8
# The word LEFT of the second line: how many collectives of this member wait for the others to leave a slot.
AWAITS_SLOT = LINE + LEFT
SHIFT = 24
DONE = (1 << SHIFT) - 1
FINISHED = DONE - 1
STREAM_PIECES = 16
_LINES_NBYTES = PAGE_NBYTES
_CACHED_VIEWS = 8192


class SlotMember:
    """Another member of a group: its words and memory, once its slot table has been found.

    Args:
        rank: The member's rank in the group.
        world_rank: Its rank in the world.
        wait: What a schedule yields to wait for the member.
    """

    __slots__ = ("asleep", "mapping", "offset", "rank", "signal", "wait", "words", "world_rank")

    asleep: memoryview
    mapping: ArenaMapping
    signal: Callback

    def __init__(self, rank: int, world_rank: int, wait: Wait) -> None:
        self.rank, self.world_rank, self.wait = rank, world_rank, wait
        self.offset = -1
        self.words: memoryview = memoryview(b"")

    def find(self, number: int, local_peer: LocalPeer | None) -> bool:
        """Return whether the slot table of a group has been found, in the memory of the member's process if it has met."""
        if self.offset >= 0:
            return True
        offset = None if local_peer is None else local_peer.control.group_slots(number)
        if local_peer is None or offset is None:
            return False
        self.mapping, self.asleep, self.signal = local_peer.mapping, local_peer.asleep, local_peer.signal
        self.offset, self.words = offset, self.mapping.words(offset, SLOTS * LINE)
        return True


class SlotTable:
    """The slot tables of one group, as one member sees them.

    Args:
        number: The group's number, the same on all members.
        rank: This member's rank in the group.
        local_peers: The processes by rank in the world, as far as this rank has met them.
        fence: The barriers of this rank.
        area_nbytes: Size in bytes of an area, rounded up to whole pages.
        waits: What schedules yield to wait for each member: see `Transport.native`.
        mismatch_error: Returns the error for a member's world rank, and this rank's and the member's call fingerprints.
        meet: ``meet(world_rank)`` begins to meet a process.
        oversubscribed: Whether members share cores.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        world_ranks: Sequence[int],
        local_peers: Mapping[int, LocalPeer],
        arena: Arena,
        fence: Fence,
        area_nbytes: int,
        waits: Sequence[Wait],
        mismatch_error: Callable[[int, int, int], Exception],
        *,
        meet: Callable[[int], object],
        oversubscribed: bool = False,
    ) -> None:
        self.number, self.rank, self.size = number, rank, len(world_ranks)
        self._local_peers, self._meet = local_peers, meet
        self.world_ranks = tuple(world_ranks)
        self.area_nbytes = -(-area_nbytes // PAGE_NBYTES) * PAGE_NBYTES
        self.arena, self.fence = arena, fence
        self._mismatch_error = mismatch_error
        self.oversubscribed = oversubscribed
        """Whether members share cores, so that one member's work delays the others."""
        self.wait = waits[rank]
        self.others = [
            SlotMember(member, each, waits[member]) for member, each in enumerate(world_ranks) if member != rank
        ]
        self.members_by_rank: dict[int, SlotMember] = {member.rank: member for member in self.others}
        self._by_world_rank = {member.world_rank: member for member in self.others}
        self.unresolved = list(self.others)
        """The members whose slot tables have not been found yet."""
        self.block = arena.hold(_LINES_NBYTES + (SLOTS * 2 + STREAM_PIECES) * self.area_nbytes)
        try:
            arena.reserve(self.block.offset, _LINES_NBYTES)
        except SharedMemoryError:
            self.block.free()
            raise
        self.words = arena.mapping.words(self.block.offset, SLOTS * LINE)
        for word in range(len(self.words)):
            self.words[word] = 0
        # The collective before the first one in this slot, number 0, is done.
        self.words[STEP] = DONE
        self._reserved = [0] * (2 * SLOTS + STREAM_PIECES)
        # The number of the collective that used the stream last, and the piece after the last one staged in it.
        self.streamed = 0
        self._position = 0
        # By area: the number, round and readers of its last use, for `wait_reusable`.
        self._staged: dict[int, tuple[int, int, Sequence[SlotMember]]] = {}
        self._tables: dict[int, memoryview] = {}
        self._views: BoundedCache[tuple[int, int, int, torch.dtype], torch.Tensor] = BoundedCache(_CACHED_VIEWS)
        self.last_numbers = [0] * SLOTS
        """The last collective in each slot."""
        self.posted: list[object] = [None] * SLOTS
        """For each slot the object that stands for its words CALL and LOCATION; None if none does."""
        self.kept_tensors: list[torch.Tensor | Sequence[torch.Tensor]] = []
        """Tensors of a failed all-reduce, kept until this member leaves: another member may still write to them."""
        self.deferred_checks: deque[tuple[int, int]] = deque()
        """Number and fingerprint of the collectives that waited for some members only: see `check_deferred`."""

    # -- steps ---------------------------------------------------------------------------------

    def enter(self, number: int) -> Schedule:
        """Wait until the slot of the n-th collective is free."""
        for member in self.unresolved:
            self._meet(member.world_rank)
        while self.unresolved:
            member = self.unresolved[-1]
            if not member.find(self.number, self._local_peers.get(member.world_rank)):
                yield member.wait
                continue
            self.unresolved.pop()
        yield from self.wait_done(number - SLOTS)
        if self.deferred_checks:
            self.check_deferred(number)
        self.last_numbers[number % SLOTS] = number

    def wait_done(self, number: int) -> Schedule:
        """Wait until every member, this one included, has published DONE for a collective."""
        at, done = number % SLOTS * LINE, number << SHIFT | DONE
        while self.words[at] < done:
            yield self.wait
        # An aborted collective leaves the count too high, which only makes others signal in vain: a forked child, which
        # closes its copy of the generator, must not write the words.
        self.words[AWAITS_SLOT] += 1
        for member in self.others:
            words = member.words
            while words[at] < done:
                yield member.wait
        self.words[AWAITS_SLOT] -= 1

    def post(self, number: int, call: int, location: int, step: int) -> None:
        """Publish the call's fingerprint and the location of this member's data (0: staged) with the first step."""
        at, words = number % SLOTS * LINE, self.words
        # This invalidates the line of the previous collective: see `check_deferred`.
        words[at + STEP] = number << SHIFT
        self.posted[number % SLOTS] = None
        self.fence.light()
        words[at + CALL], words[at + LOCATION] = call, location
        self.publish(number, step)

    def pass_by(self, number: int, call: int) -> Schedule:
        """Publish the call of a collective that uses no slot, and leave the slot.

        This waits for others only if the collective before used the slot: they may still read the words of that one. It
        wakes only members that wait for this one in this table.
        """
        at, words, now, before = number % SLOTS * LINE, self.words, number << SHIFT, number - SLOTS
        while words[at] < now - (SLOTS << SHIFT) + DONE:
            yield self.wait
        if before > 0 and self.last_numbers[number % SLOTS] == before:
            yield from self.wait_done(before)
            self.check_deferred(number)
        words[at], self.posted[number % SLOTS] = now, None
        self.fence.light()
        words[at + CALL], words[at + LOCATION] = call, 0
        self.fence.light()
        words[at] = now | DONE
        self.fence.full()
        # In a crowd only a few have met.
        for world_rank, local_peer in list(self._local_peers.items()):
            member = self._by_world_rank.get(world_rank)
            if member is not None and member.find(self.number, local_peer) and member.asleep[0]:
                theirs = member.words
                if theirs[AWAITS_SLOT] or now <= theirs[at] < now | DONE:
                    member.signal()

    def publish(self, number: int, step: int) -> None:
        """Publish that this member has reached a step, and wake sleeping members."""
        self._store_word(number, STEP, step)

    def publish_read(self, number: int, round_index: int) -> None:
        """Publish that this member has read the others' pieces up to a round, and wake sleeping members."""
        self._store_word(number, READ_ROUNDS, round_index + 1)

    def _store_word(self, number: int, word: int, count: int) -> None:
        # The data's loads and stores come before the word.
        self.fence.light()
        self.words[number % SLOTS * LINE + word] = number << SHIFT | count
        # The word comes before the loads of the sleep flags: see `memory_order`.
        self.fence.full()
        for member in self.others:
            if member.asleep[0]:
                member.signal()

    def wait_reached(self, number: int, step: int, members: Sequence[SlotMember]) -> Schedule:
        """Wait until all ``members`` have reached a step."""
        at, goal = number % SLOTS * LINE, number << SHIFT | step
        for member in members:
            words = member.words
            while words[at] < goal:
                yield member.wait
        # The members' words are loaded before their data.
        self.fence.light()

    def wait_read(self, number: int, round_index: int, members: Sequence[SlotMember]) -> Schedule:
        """Wait until each of ``members`` has read this member's piece of a round, or has finished.

        Raises the mismatch error if one of them has made another call: it may wait for its own readers.
        """
        at, goal, finished = number % SLOTS * LINE, number << SHIFT | round_index + 1, number << SHIFT | FINISHED
        for member in members:
            words = member.words
            while words[at + READ_ROUNDS] < goal and words[at] < finished:
                self._check_reader(number, member)
                yield member.wait
        # The members' loads of the piece come before the next stores to it.
        self.fence.light()

    def wait_finished(self, number: int, members: Sequence[SlotMember]) -> Schedule:
        """Wait until all ``members`` have read all data of the others. Raises the mismatch error as `wait_read` does."""
        at, finished = number % SLOTS * LINE, number << SHIFT | FINISHED
        for member in members:
            words = member.words
            while words[at] < finished:
                self._check_reader(number, member)
                yield member.wait
            self._check_reader(number, member)
        # The members' loads of the data come before the next stores to it.
        self.fence.light()

    def _check_reader(self, number: int, member: SlotMember) -> None:
        """Raise the mismatch error if a member that this one waits for has made another call than this one."""
        own_call = self.words[number % SLOTS * LINE + CALL]
        if self._call_of(member, number) not in (None, own_call):
            self.check_calls(number, own_call, (member,))

    def _call_of(self, member: SlotMember, number: int) -> int | None:
        """Return the fingerprint of a member's call; None if it has not posted, or is in a later collective already."""
        words, at = member.words, number % SLOTS * LINE
        if words[at] <= number << SHIFT:
            return None
        self.fence.light()
        call = words[at + CALL]
        self.fence.light()
        return call if words[at] >> SHIFT == number else None

    def check_calls(self, number: int, call: int, members: Sequence[SlotMember]) -> None:
        """Raise the mismatch error if one of ``members``, which have all posted, has made another call."""
        at = number % SLOTS * LINE + CALL
        for member in members:
            member_call = member.words[at]
            if member_call != call:
                raise self._mismatch_error(self.world_ranks[member.rank], call, member_call)
        if self.deferred_checks:
            self.check_deferred(number)

    def check_deferred(self, number: float) -> None:
        """Raise the mismatch error if a member made another call in a collective that this member did not wait for.

        ``number`` is the current collective; infinity after the last one. A member checks before it runs the next
        collective in a slot, so at least one of two members that differ detects it.
        """
        while self.deferred_checks and self.deferred_checks[0][0] < number:
            before, call = self.deferred_checks[0]
            at = before % SLOTS * LINE
            for member in self.others:
                # The member has not posted yet.
                if member.words[at] <= before << SHIFT:
                    return
                member_call = self._call_of(member, before)
                if member_call is not None and member_call != call:
                    self.deferred_checks.clear()
                    raise self._mismatch_error(self.world_ranks[member.rank], call, member_call)
            self.deferred_checks.popleft()

    def location(self, number: int, member: SlotMember) -> int:
        """Return the location of a member's data for this collective, or of its table of locations; 0 if it is staged."""
        return member.words[number % SLOTS * LINE + LOCATION]

    # -- zero-copy data ------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Publish that this member has aborted: its user may overwrite the tensors that other members could access."""
        # A forked child shares the words with its parent, and must not write them.
        if self.arena.pid == os.getpid():
            self.words[WITHDRAWN] = 1
            self.fence.full()

    def hold_if_withdrawn(self, members: Sequence[SlotMember]) -> Schedule:
        """Wait while one of ``members`` has withdrawn its data, because its user may have overwritten the data.

        The member's abort notice ends the wait. If the member has destroyed the group, the deadline of the call ends it.
        """
        # The members' data is loaded before their words.
        self.fence.light()
        for member in members:
            while member.words[WITHDRAWN]:
                yield member.wait

    # -- areas ---------------------------------------------------------------------------------

    def reserve(self, number: int, round_index: int, nbytes: int) -> None:
        """Back this member's area of a round with memory. Raises SharedMemoryError if none is left."""
        self.back(self.area_index(number, round_index, self.words), nbytes)

    def area_index(self, number: int, round_index: int, words: memoryview) -> int:
        """Return which area a member uses in a round: a half of its slot, or a piece of its stream."""
        stream = words[number % SLOTS * LINE + STREAM]
        if stream >> SHIFT == number:
            return 2 * SLOTS + ((stream >> 8 & 0xFF) + round_index) % (stream & 0xFF)
        return number % SLOTS * 2 + (round_index & 1)

    def back(self, index: int, nbytes: int) -> None:
        """Back one of this member's areas with memory."""
        if nbytes > self._reserved[index]:
            start = self.block.offset + _LINES_NBYTES + index * self.area_nbytes
            self.arena.reserve(start, nbytes)
            self._reserved[index] = nbytes

    def area(
        self, number: int, round_index: int, rank: int, start: int, count: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return elements of a member's area of a round, from byte ``start`` on.

        This member's own is backed with memory. Raises SharedMemoryError if none is left.
        """
        is_own = rank == self.rank
        index = self.area_index(number, round_index, self.words if is_own else self.members_by_rank[rank].words)
        if is_own:
            self.back(index, start + count * dtype.itemsize)
        return self.view(rank, self._area_start(index, rank) + start, count, dtype)

    def first_half(self, number: int, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return elements of the first half of a member's slot, from byte ``start`` on, for collectives without rounds."""
        return self.view(rank, self._area_start(number % SLOTS * 2, rank) + start, count, dtype)

    def location_of(self, number: int, rank: int, start: int) -> int:
        """Return the location that a member posts if its data starts there: see `first_half`."""
        return 1 + self._area_start(number % SLOTS * 2, rank) + start

    def view(self, rank: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``count`` elements of a member's arena from byte ``offset`` on. Training uses the same in each step."""
        key = (rank, offset, count, dtype)
        tensor = self._views.get(key)
        if tensor is None:
            mapping = self.arena.mapping if rank == self.rank else self.members_by_rank[rank].mapping
            tensor = self._views.add(key, mapping.tensor(offset, count, dtype))
        return tensor

    def table(self, number: int, rank: int) -> memoryview:
        """Return the words of the first half of a member's slot, as far as it has reserved them."""
        index = number % SLOTS * 2
        words = self._tables.get(index * self.size + rank)
        if words is None:
            mapping = self.arena.mapping if rank == self.rank else self.members_by_rank[rank].mapping
            words = mapping.words(self._area_start(index, rank), self.area_nbytes // 8)
            self._tables[index * self.size + rank] = words
        return words

    def _area_start(self, index: int, rank: int) -> int:
        offset = self.block.offset if rank == self.rank else self.members_by_rank[rank].offset
        return offset + _LINES_NBYTES + index * self.area_nbytes

    def wait_reusable(self, number: int, round_index: int, readers: Sequence[SlotMember]) -> Schedule:
        """Wait until every reader has read the last contents of this member's area; ``readers`` read the next ones."""
        index = self.area_index(number, round_index, self.words)
        before = self._staged.get(index)
        if before is not None:
            yield from self.wait_read(*before)
        self._staged[index] = number, round_index, readers
        if index >= 2 * SLOTS:
            self._position = index - 2 * SLOTS + 1

    def open_stream(self, number: int, round_index: int, areas: int, nbytes: int) -> Schedule:
        """Let the n-th collective stage in the stream from a round on, in ``areas`` pieces in turn, if the stream is free.

        The collective continues after the piece that was staged last. It waits until this member has finished the earlier
        collective that used the stream. It does not wait for a later one, which may wait for this one on another member.
        Returns whether the stream is free. Raises SharedMemoryError if no memory is left for pieces of ``nbytes`` bytes.
        """
        before = self.streamed
        if before > number:
            return False
        for index in range(2 * SLOTS, 2 * SLOTS + areas):
            self.back(index, nbytes)
        self.streamed = number
        done = before << SHIFT | DONE
        while before != number and self.words[before % SLOTS * LINE] < done:
            yield self.wait
        first = (self._position - round_index) % areas
        self.words[number % SLOTS * LINE + STREAM] = number << SHIFT | first << 8 | areas
        return True

    # -- the end -------------------------------------------------------------------------------

    def mark_left(self) -> None:
        """Publish that this member will not read any slot again, even of collectives that it aborted."""
        self.fence.light()
        self.words[LEFT] = 1

    def pending_readers(self) -> Iterator[SlotMember]:
        """Yield the members that may still read what this member has written."""
        for member in self.others:
            peer = self._local_peers.get(member.world_rank)
            if peer is None:
                continue
            # A process that was excluded, perhaps while it was stopped, may begin further calls before it knows.
            is_excluded = peer.end_reason == ""
            if (member.offset < 0 and not is_excluded) or peer.has_left():
                continue
            if peer.control.group_slots(self.number) is None:
                continue
            if is_excluded:
                yield member
                continue
            words = member.words
            unseen = any(
                number and words[slot * LINE] < (number << SHIFT | DONE)
                for slot, number in enumerate(self.last_numbers)
            )
            if unseen and not words[LEFT]:
                yield member
