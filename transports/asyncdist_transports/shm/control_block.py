"""The control block: words in a rank's memory that its peers read.

It holds the rank's sleep flag, the core that it runs on, and the offsets of its slot tables and rings. `transport` makes it
and opens those of peers; `local_peer`, `byte_ring`, `transport`, `deferred_free` and `collectives` use its words.
The block lies in the rank's arena and consists of 8-byte words. A line is 8 words, one cache line.

    line 0         word 0: 1 while the rank sleeps; the peer that wakes it sets 0 before it sends the wake-up
    line 1         word 0: the number of directory entries that peers search: those that were ever in use
                   word 1: the core that the rank last published, plus 1; 0 before the first time
                   word 2: the heartbeats of the rank so far
    line 2 + peer  word 0: 1 + the offset of the ring to that peer; 0 before there is one
                   word 1: the bytes written to that ring
                   word 2: the bytes read from the peer's ring to this rank
    directory      entries of two words: a group's number, 0 in a free entry; the offset of the group's slot table

The owner writes the offset before the number, so that no peer finds an entry without its offset.
"""

from __future__ import annotations

from asyncdist.errors import SharedMemoryError
from asyncdist.kernel.memory.shared_arena import Arena, ArenaBlock, ArenaMapping
from asyncdist_transports.shm.memory_order import Fence

WORDS_PER_LINE = 8
_ASLEEP, _USED, _CORE, BEATS, _PEERS = 0, *range(WORDS_PER_LINE, WORDS_PER_LINE + 3), 2 * WORDS_PER_LINE
_PAIRS = 1024
"""The number of entries in the directory."""
RING, WRITTEN, READ = 0, 1, 2
"""The positions of a ring's offset, the bytes written and the bytes read in a peer's line."""
_SIGN_BIT = 1 << 63


def _to_signed(number: int) -> int:
    """Return the signed value of a word that holds an unsigned 64-bit number."""
    return number - (1 << 64) if number & _SIGN_BIT else number


class ControlBlock:
    """The control block of this rank or of a peer, at ``offset`` of the arena that ``mapping`` maps."""

    def __init__(self, mapping: ArenaMapping, offset: int, world_size: int) -> None:
        self._directory = _PEERS + WORDS_PER_LINE * world_size
        self.words = mapping.words(offset, self._directory + 2 * _PAIRS)

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Return the size in bytes of a control block in a world of that size."""
        return 8 * (_PEERS + WORDS_PER_LINE * world_size + 2 * _PAIRS)

    def peer_words(self, peer: int) -> memoryview:
        """Return the line of one peer; its words are at `RING`, `WRITTEN` and `READ`."""
        start = _PEERS + WORDS_PER_LINE * peer
        return self.words[start : start + WORDS_PER_LINE]

    def group_slots(self, number: int) -> int | None:
        """Return the offset of a group's slot table in the owner's arena; None while the group has none."""
        entry = self._entry_of(number)
        return None if entry is None else self.words[entry + 1]

    def _entry_of(self, number: int) -> int | None:
        words, wanted = self.words, _to_signed(number)
        # If the owner has freed the block, the arena may hold other data here.
        used = min(words[_USED], _PAIRS)
        entries = range(self._directory, self._directory + 2 * used, 2)
        return next((entry for entry in entries if words[entry] == wanted), None)

    @property
    def asleep(self) -> memoryview:
        """The word that is 1 while the rank sleeps, as a view of length 1."""
        return self.words[_ASLEEP : _ASLEEP + 1]

    @property
    def core(self) -> int:
        """The core that the rank last published, -1 before the first time. Only the owner may set it."""
        return self.words[_CORE] - 1

    @core.setter
    def core(self, core: int) -> None:
        self.words[_CORE] = core + 1


class OwnControlBlock(ControlBlock):
    """The control block of this rank, which alone writes the directory."""

    def __init__(self, arena: Arena, world_size: int, fence: Fence) -> None:
        self.block: ArenaBlock = arena.allocate(self.nbytes(world_size))
        super().__init__(arena.mapping, self.block.offset, world_size)
        self.words.cast("B")[:] = bytes(self.words.nbytes)
        self._fence = fence
        self._free = list(range(self._directory, self._directory + 2 * _PAIRS, 2))[::-1]

    def reserve_entry(self) -> int:
        """Return the position of a free entry for `publish_group`. Raises SharedMemoryError if all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            raise SharedMemoryError(
                f"this rank is in more than {_PAIRS} groups at once whose members share memory: destroy some of them"
            ) from None

    def publish_group(self, entry: int, number: int, offset: int) -> None:
        """Publish a group's slot table, at ``offset`` of the arena, in an entry from `reserve_entry`."""
        words = self.words
        words[entry + 1] = offset
        self._fence.full()
        words[entry] = _to_signed(number)
        words[_USED] = max(words[_USED], (entry - self._directory) // 2 + 1)

    def remove_group(self, number: int) -> None:
        """Remove a group's slot table from the directory, and make the entry free."""
        entry = self._entry_of(number)
        if entry is not None:
            self.words[entry] = 0
            self._free.append(entry)
