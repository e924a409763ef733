"""The control block: what a rank publishes to its peers in its own memory.

It holds the rank's sleep flag, the core that it runs on, and where its slot tables and rings are. `transport` and
`local_peer` read and write it. The block lies in the rank's arena and consists of 8-byte words; a line is 8 words, one
cache line.

    line 0         asleep: 1 while the rank has to be woken; the waking peer sets it to 0 before it sends the wake-up
    line 1         directory entries ever used; 1 + the core that the rank last published
    line 2 + peer  own ring to that peer (its offset, 0: none yet; bytes written); bytes read from the peer's ring
    directory      pairs (group number, offset of its slot table); 0: free

The owner writes the first word of a pair last, which makes the pair visible.
"""

from __future__ import annotations

from asyncdist.errors import SharedMemoryError
from asyncdist.memory.shared_arena import Arena, ArenaBlock, ArenaMapping
from asyncdist_transports.shm.memory_order import Fence

WORDS_PER_LINE = 8
_ASLEEP, _USED, _CORE, _PEERS = 0, WORDS_PER_LINE, WORDS_PER_LINE + 1, 2 * WORDS_PER_LINE
_PAIRS = 1024
RING, WRITTEN, READ = 0, 1, 2
_SIGN = 1 << 63


def to_signed(number: int) -> int:
    """Return a 64-bit number as the signed value that a word holds."""
    return number - (1 << 64) if number & _SIGN else number


class ControlBlock:
    """A rank's control block, its own or a peer's, at ``offset`` of the process's arena."""

    def __init__(self, mapping: ArenaMapping, offset: int, world_size: int) -> None:
        self._directory = _PEERS + WORDS_PER_LINE * world_size
        self.words = mapping.words(offset, self._directory + 2 * _PAIRS)

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Return the size in bytes of a control block in a world of that size."""
        return 8 * (_PEERS + WORDS_PER_LINE * world_size + 2 * _PAIRS)

    def peer_words(self, peer: int) -> memoryview:
        """Return the words about one peer: see `RING`, `WRITTEN`, `READ`."""
        start = _PEERS + WORDS_PER_LINE * peer
        return self.words[start : start + WORDS_PER_LINE]

    def group_slots(self, number: int) -> int | None:
        """Return the offset of a group's slot table; None while it has none."""
        words, wanted = self.words, to_signed(number)
        # The owner may have freed the block, so the count may be any value.
        used = min(words[_USED], _PAIRS)
        for entry in range(self._directory, self._directory + 2 * used, 2):
            if words[entry] == wanted:
                return words[entry + 1]
        return None

    @property
    def asleep(self) -> memoryview:
        """The word that is 1 while the rank sleeps and has to be woken."""
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
        for entry in range(len(self.words)):
            self.words[entry] = 0
        self._fence = fence
        self._free = list(range(self._directory, self._directory + 2 * _PAIRS, 2))[::-1]

    def reserve_entry(self) -> int:
        """Return a free entry of the directory for `publish_group`. Raises SharedMemoryError if all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            raise SharedMemoryError(f"more than {_PAIRS} groups at once share memory: destroy some") from None

    def publish_group(self, entry: int, number: int, offset: int) -> None:
        """Let peers find a group's slot table, at an entry from `reserve_entry`."""
        words = self.words
        words[entry + 1] = offset
        self._fence.full()
        words[entry] = to_signed(number)
        words[_USED] = max(words[_USED], (entry - self._directory) // 2 + 1)

    def remove_group(self, number: int) -> None:
        """Remove a group's slot table from the directory."""
        words, wanted = self.words, to_signed(number)
        for entry in range(self._directory, self._directory + 2 * words[_USED], 2):
            if words[entry] == wanted:
                words[entry] = 0
                self._free.append(entry)
