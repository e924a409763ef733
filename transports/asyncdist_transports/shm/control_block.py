"""What a rank shows its peers in its own memory: whether it sleeps, and where its windows and rings are.

One block at the head of what a world has in the arena, in words of 8 bytes; a line is 8 words, a cache line.

    line 0         asleep: 1 while the rank must be rung; whoever rings sets it to 0 first
    line 1         places of the directory that were ever used; 1 + the core that the rank was on when it last said so
    line 2 + peer  our ring to that peer (its offset, 0: none yet; bytes written); bytes of its ring to us that we have read
    directory      pairs (group's number, offset of its window); 0: free

A pair becomes visible by its first word, which is written last.
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
    """Return a 64-bit number as a word has it."""
    return number - (1 << 64) if number & _SIGN else number


class ControlBlock:
    """A rank's board, ours or a peer's, at ``offset`` of its process's arena."""

    def __init__(self, mapping: ArenaMapping, offset: int, world_size: int) -> None:
        self._directory = _PEERS + WORDS_PER_LINE * world_size
        self.words = mapping.words(offset, self._directory + 2 * _PAIRS)

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Return how large the board of a rank of such a world is."""
        return 8 * (_PEERS + WORDS_PER_LINE * world_size + 2 * _PAIRS)

    def peer_words(self, peer: int) -> memoryview:
        """Return the words about one peer: see `RING`, `WRITTEN`, `READ`."""
        start = _PEERS + WORDS_PER_LINE * peer
        return self.words[start : start + WORDS_PER_LINE]

    def group_slots(self, number: int) -> int | None:
        """Return the offset of a group's window; None if there is none (yet, or any more)."""
        words, wanted = self.words, to_signed(number)
        used = min(words[_USED], _PAIRS)  # where its owner has left, anything may stand there
        for entry in range(self._directory, self._directory + 2 * used, 2):
            if words[entry] == wanted:
                return words[entry + 1]
        return None

    @property
    def asleep(self) -> memoryview:
        """The word that is 1 while the rank must be rung."""
        return self.words[_ASLEEP : _ASLEEP + 1]

    @property
    def core(self) -> int:
        """The core that the rank was on when it last said so, -1 if it never has; only the rank itself may set it."""
        return self.words[_CORE] - 1

    @core.setter
    def core(self, core: int) -> None:
        self.words[_CORE] = core + 1


class OwnControlBlock(ControlBlock):
    """Our board, of which only we write the directory."""

    def __init__(self, arena: Arena, world_size: int, fence: Fence) -> None:
        self.block: ArenaBlock = arena.allocate(self.nbytes(world_size))
        super().__init__(arena.mapping, self.block.offset, world_size)
        for entry in range(len(self.words)):
            self.words[entry] = 0
        self._fence = fence
        self._free = list(range(self._directory, self._directory + 2 * _PAIRS, 2))[::-1]

    def reserve_entry(self) -> int:
        """Return a place in the directory that is nobody's, for `publish_group`. SharedMemoryError if there are too many groups."""
        try:
            return self._free.pop()
        except IndexError:
            raise SharedMemoryError(f"more than {_PAIRS} groups at once share memory: destroy some") from None

    def publish_group(self, entry: int, number: int, offset: int) -> None:
        """Let peers find a group's window, at a place that was claimed for it."""
        words = self.words
        words[entry + 1] = offset
        self._fence.full()
        words[entry] = to_signed(number)
        words[_USED] = max(words[_USED], (entry - self._directory) // 2 + 1)

    def remove_group(self, number: int) -> None:
        """Take a group's window off the directory."""
        words, wanted = self.words, to_signed(number)
        for entry in range(self._directory, self._directory + 2 * words[_USED], 2):
            if words[entry] == wanted:
                words[entry] = 0
                self._free.append(entry)
