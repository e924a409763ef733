"""Which ranks reach which others by a transport that probes: in a few bytes, however many ranks a world has.

Ranks of one host that all reach each other form a block. A world in which the hosts have equal numbers of ranks, one host
after the other, is one entry of three numbers. Ranks with an exception are listed with what they reach.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Ranks = tuple[range, ...]
"""A set of ranks."""


def as_ranges(ranks: Iterable[int]) -> Ranks:
    """Return ranks in ascending order as ranges with a step."""
    return tuple(_ranges(sorted(ranks)))


def _ranges(ranks: Sequence[int]) -> Iterator[range]:
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 1
        stop = start + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        yield range(ranks[start], ranks[stop - 1] + 1, step)
        start = stop


class Sharing:
    """For each rank, the ranks that it reaches by one transport. A rank that is unknown reaches none.

    Args:
        blocks: First rank, size and number of consecutive blocks of ranks that reach each other.
        exceptions: Other ranks: what they reach, and which they are.
    """

    def __init__(
        self, blocks: Iterable[tuple[int, int, int]] = (), exceptions: Iterable[tuple[Ranks, Ranks]] = ()
    ) -> None:
        self._blocks = sorted(blocks)
        self._exceptions = list(exceptions)

    @classmethod
    def of(cls, rank: int, reached: Iterable[int]) -> Sharing:
        """Return what one rank knows: that it has ``reached`` others."""
        return cls(exceptions=[(as_ranges({rank, *reached}), (range(rank, rank + 1),))])

    @classmethod
    def joined(cls, parts: Iterable[Sharing]) -> Sharing:
        """Return what ranks know together; the parts are in ascending order of ranks."""
        blocks: list[tuple[int, int, int]] = []
        members: dict[Ranks, list[int]] = {}
        for part in parts:
            blocks += part._blocks
            for reached, ranks in part._exceptions:
                members.setdefault(reached, []).extend(rank for each in ranks for rank in each)
        exceptions = []
        for reached, listed in members.items():
            ranks = as_ranges(listed)
            if ranks == reached and len(ranks) == 1 and ranks[0].step == 1:
                blocks.append((ranks[0].start, len(ranks[0]), 1))
            else:
                exceptions.append((reached, ranks))
        return cls(_runs(sorted(blocks)), exceptions)

    def reached(self, rank: int) -> Ranks:
        """Return the ranks that a rank reaches, and itself."""
        place = bisect.bisect(self._blocks, (rank + 1, 0, 0)) - 1
        if place >= 0:
            start, size, number = self._blocks[place]
            if start <= rank < start + size * number:
                first = rank - (rank - start) % size
                return (range(first, first + size),)
        return next((reached for reached, ranks in self._exceptions if contains(ranks, rank)), ())

    def connects(self, rank: int, other: int) -> bool:
        """Return whether each of two ranks reaches the other."""
        reached = self.reached(rank)
        return contains(reached, other) and (len(self._exceptions) == 0 or contains(self.reached(other), rank))

    def connects_all(self, ranks: Sequence[int]) -> bool:
        """Return whether all of some ranks reach each other."""
        different = {self.reached(rank) for rank in ranks}
        return all(contains(reached, rank) for reached in different for rank in ranks)

    def connects_any(self, ranks: Sequence[int]) -> bool:
        """Return whether any two of some ranks reach each other."""
        among: dict[Ranks, list[int]] = {}
        for rank in ranks:
            among.setdefault(self.reached(rank), []).append(rank)
        if not self._exceptions:
            return any(len(each) > 1 for each in among.values())
        return any(self.connects(one, other) for one, other in itertools.combinations(ranks, 2))

    def nodes(self, members: Sequence[int]) -> list[list[int]] | None:
        """Return the indices of members that reach each other pairwise, together; None if that is not transitive."""
        found: dict[Ranks | int, list[int]] = {}
        for index, member in enumerate(members):
            found.setdefault(self.reached(member) or member, []).append(index)
        sets = [reached for reached in found if not isinstance(reached, int)]
        if self._exceptions and sum(contains(reached, member) for reached in sets for member in members) != sum(
            len(found[reached]) for reached in sets
        ):
            return self._nodes_of_pairs(members)
        return list(found.values())

    def _nodes_of_pairs(self, members: Sequence[int]) -> list[list[int]] | None:
        """Return the same if some ranks reach others that do not reach them, or not the same ones."""
        nodes: list[list[int]] = []
        for index, member in enumerate(members):
            homes = [node for node in nodes if any(self.connects(members[other], member) for other in node)]
            if not homes:
                nodes.append([index])
            elif len(homes) > 1 or not all(self.connects(members[other], member) for other in homes[0]):
                return None
            else:
                homes[0].append(index)
        return nodes

    def packed(self) -> list[Any]:
        """Return plain data for `unpacked`."""
        plain = [
            [[[each.start, each.stop, each.step] for each in ranks] for ranks in pair] for pair in self._exceptions
        ]
        return [self._blocks, plain]

    @classmethod
    def unpacked(cls, data: Sequence[Any]) -> Sharing:
        """Return what `packed` describes."""
        blocks, exceptions = data
        return cls(map(tuple, blocks), [(_of_plain(reached), _of_plain(ranks)) for reached, ranks in exceptions])


def contains(ranks: Ranks, rank: int) -> bool:
    return any(rank in each for each in ranks)


def _runs(blocks: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for start, size, number in blocks:
        if runs and runs[-1][1] == size and runs[-1][0] + size * runs[-1][2] == start:
            runs[-1] = (runs[-1][0], size, runs[-1][2] + number)
        else:
            runs.append((start, size, number))
    return runs


def _of_plain(data: Iterable[Sequence[int]]) -> Ranks:
    return tuple(range(*each) for each in data)
