"""The keys of a store in alphabetical order, so that the keys under a prefix are found without a visit to the others."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator

_BLOCK = 512
"""Keys in a block that was just made; a block of twice as many is divided."""


class KeyIndex:
    """An ordered set of keys with their ages, in blocks: to add one moves at most a block's other keys.

    Args:
        keys: The first keys, oldest first.
    """

    def __init__(self, keys: Collection[str] = ()) -> None:
        ages = {key: age for age, key in enumerate(keys)}
        ordered = sorted(keys)
        self._blocks = [ordered[start : start + _BLOCK] for start in range(0, len(ordered), _BLOCK)] or [[]]
        self._ages = [[ages[key] for key in block] for block in self._blocks]
        self._firsts = ["", *(block[0] for block in self._blocks[1:])]
        """A text by block that is not after its first key, and after all keys of the block before."""
        self._last_age = len(ages)

    def add(self, key: str) -> None:
        number = bisect_right(self._firsts, key) - 1
        block, ages = self._blocks[number], self._ages[number]
        place = bisect_left(block, key)
        self._last_age += 1
        block.insert(place, key)
        ages.insert(place, self._last_age)
        if len(block) >= 2 * _BLOCK:
            self._blocks.insert(number + 1, block[_BLOCK:])
            self._ages.insert(number + 1, ages[_BLOCK:])
            self._firsts.insert(number + 1, block[_BLOCK])
            del block[_BLOCK:], ages[_BLOCK:]

    def remove(self, key: str) -> None:
        number = bisect_right(self._firsts, key) - 1
        block = self._blocks[number]
        place = bisect_left(block, key)
        del block[place], self._ages[number][place]
        if not block and number:
            del self._blocks[number], self._ages[number], self._firsts[number]

    def under(self, prefix: str) -> list[str]:
        return [key for block, _, start, end in self._ranges(prefix) for key in block[start:end]]

    def oldest_first(self, prefix: str) -> list[str]:
        # Not a list of pairs: the garbage collector would visit each of them.
        age_of: dict[str, int] = {}
        for block, ages, start, end in self._ranges(prefix):
            age_of.update(zip(block[start:end], ages[start:end], strict=True))
        return sorted(age_of, key=age_of.__getitem__)

    def count(self, prefix: str) -> int:
        return sum(end - start for _, _, start, end in self._ranges(prefix))

    def _ranges(self, prefix: str) -> Iterator[tuple[list[str], list[int], int, int]]:
        """Yield the blocks that hold keys with a prefix, with their ages, and where in them these keys begin and end."""
        number = bisect_right(self._firsts, prefix) - 1
        start = bisect_left(self._blocks[number], prefix)
        while number < len(self._blocks):
            block = self._blocks[number]
            end = len(block)
            if start < end and not block[-1].startswith(prefix):
                end = bisect_left(block, True, start, key=lambda key: not key.startswith(prefix))
                yield block, self._ages[number], start, end
                return
            yield block, self._ages[number], start, end
            number, start = number + 1, 0
