"""The layout of two-level collectives: nodes, whose ranks share memory, and rails between the nodes.

A *node* is a set of members that share memory pairwise: the ranks of one host. A *rail* takes one member of each node,
its rail leader; there are as many rails as the smallest node has members. Data is reduced inside each node first, crosses
between nodes in slices, one per rail, and is broadcast inside each node last. So the bytes between hosts fall by the
number of ranks per host, and the rail leaders share the sending.

    node 0      0   1   2          rails: 0-3 and 1-4; rank 2 is not a rail leader
                  |   |
    node 1      3   4

Source: the "2D" all-reduce of Cho, Finkler, Kung, Hunter, "BlueConnect: decomposing all-reduce for deep learning on
heterogeneous network hierarchy", MLSys (2019).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from asyncdist.kernel.algorithms.cost import Cost
from asyncdist.kernel.algorithms.schedule import Combine, Place, Recv, Schedule, Send, Step
from asyncdist.kernel.algorithms.selection import DEFAULT, Model, candidates
from asyncdist.kernel.algorithms.sharing import Sharing

# Data is cut into this many parts, unless the slices or their blocks for the hosts would be smaller than the minimum.
_MIN_PARTS = 8
# The same for the parts times their blocks, one for each host.
_MIN_BLOCKS = 16
# Batches in which a node processes the blocks of a part. Each costs an exchange within the node.
_MOST_BATCHES = 3
_MIN_SLICE_NBYTES, _MIN_BLOCK_NBYTES = 256 << 10, 128 << 10


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a group, as seen by one member. Members are group ranks; nodes are ordered by their first member."""

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @cached_property
    def node(self) -> int:
        """Index of this rank's node."""
        return next(number for number, members in enumerate(self.nodes) if self.rank in members)

    @cached_property
    def place(self) -> int:
        """Index of this rank in its node; also the number of its rail, if it is a rail leader."""
        return self.members.index(self.rank)

    @cached_property
    def rails(self) -> int:
        """Number of rails."""
        return min(len(members) for members in self.nodes)

    @property
    def members(self) -> tuple[int, ...]:
        """The members of this rank's node."""
        return self.nodes[self.node]

    @property
    def carries(self) -> bool:
        """Whether this rank is a rail leader."""
        return self.place < self.rails

    def rail(self, number: int) -> tuple[int, ...]:
        """Return the leaders of a rail, by node."""
        return tuple(members[number] for members in self.nodes)

    def rail_leader(self, node: int, rank: int) -> int:
        """Return the member of ``node`` on the rail that carries the blocks of ``rank``, which is on another node."""
        home = next(members for members in self.nodes if rank in members)
        return self.nodes[node][home.index(rank) % self.rails]

    def carried(self, node: int, rail: int) -> tuple[int, ...]:
        """Return the members of a node whose blocks a rail carries."""
        return self.nodes[node][rail :: self.rails]

    def turns(self, node: int) -> Iterator[tuple[int, ...]]:
        """Yield the members of a node in batches of one member per rail."""
        members = self.nodes[node]
        for start in range(0, len(members), self.rails):
            yield members[start : start + self.rails]


def layout(members: Sequence[int], own: int, sharing: Sharing) -> NodeLayout | None:
    """Return the layout of a group, or None if it has no hierarchy.

    A group has no hierarchy if all ranks share memory, if no two do, or if sharing is not transitive. Ranks with equal
    ``sharing`` get the same nodes.

    Args:
        members: Global ranks, in order of the group rank.
        own: Global rank of this process.
        sharing: Which global ranks share memory.
    """
    nodes = sharing.nodes(members)
    if nodes is None or len(nodes) < 2 or len(nodes) == len(members):
        return None
    return NodeLayout(tuple(map(tuple, nodes)), members.index(own))


def among(members: Sequence[int], schedule: Schedule) -> Schedule:
    """Run in a group the schedule of a subset of its ranks, whose peers are indices into ``members``."""
    try:
        for step in schedule:
            if isinstance(step, int):
                yield members[step]
                continue
            yield tuple(
                [each if isinstance(each, Combine) else type(each)(members[each.peer], each.place) for each in step]
            )
    # The schedule may hold resources, so it is closed now and not by the garbage collector.
    finally:
        schedule.close()


def gather_runs(place: int, size: int, runs: Sequence[Sequence[Place]]) -> Schedule:
    """Copy each member's blocks ``runs[place]`` to all members around a ring; runs may differ in length.

    Costs P-1 rounds.
    """
    left, right = (place - 1) % size, (place + 1) % size
    for passed in range(size - 1):
        sends = (Send(right, block) for block in runs[(place - passed) % size])
        receives = (Recv(left, block) for block in runs[(place - passed - 1) % size])
        step: Step = (*sends, *receives)
        if step:
            yield step


@dataclass(slots=True)
class RingProgress:
    """How far the two halves of a part have come, each for the other: see `batches`.

    Attributes:
        ready: Blocks that the node has made ready for the ring.
        arrived: Blocks that the ring has completed.
    """

    ready: int
    arrived: int


def batches(blocks: Sequence[int], *, smallest: int, growing: bool = False) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield consecutive blocks in batches, each with the number of blocks up to its end.

    A node processes a batch while its link, which is slower, moves the blocks of another one. So each batch has half of the
    blocks that are left, and only the last one, of ``smallest`` blocks or a quarter, overlaps with nothing. With
    ``growing`` the sizes are reversed, for a node that is ahead of its link.
    """
    sizes: list[int] = []
    left = len(blocks)
    while left > smallest and len(sizes) < _MOST_BATCHES - 1:
        sizes.append((left + 1) // 2)
        left //= 2
    sizes.append(left)
    end = 0
    for size in reversed(sizes) if growing else sizes:
        yield end + size, blocks[end : end + size]
        end += size


def contiguous(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Return blocks that a ring needs in turn, each the one below the block before it, as ranges ``(first, last + 1)``."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        if ranges and ranges[-1][0] == block + 1:
            ranges[-1] = block, ranges[-1][1]
        else:
            ranges.append((block, block + 1))
    return ranges


def part_count(nbytes: int, rails: int, hosts: int, segment_nbytes: int, *, overlaps: bool = False) -> int:
    """Return the number of parts of the data on the rails, so that the links are busy while nodes reduce or copy.

    A slice travels in blocks, one for each host, and each message has a cost of its own. Between many hosts the parts are
    therefore larger. Where the blocks of a part overlap with each other, too, fewer parts are enough.
    """
    blocks, parts = hosts * _MIN_BLOCK_NBYTES, max(2, _MIN_BLOCKS // hosts) if overlaps else _MIN_PARTS
    segments = -(-nbytes // (rails * max(1, segment_nbytes, 2 * blocks))) // (_MIN_PARTS // parts)
    return max(1, segments, min(parts, nbytes // (rails * max(_MIN_SLICE_NBYTES, blocks))))


def travels_whole(collective: str, nbytes: int, layout: NodeLayout, model: Model) -> bool:
    """Return whether a collective is faster with all of the data on the first rail than with a part of it on each rail.

    Parts save the time in which a rank moves bytes. A single rail saves the messages of all others, which the processors
    and the link of a host share. They also share the rate of the link: a byte that takes longer than one within a machine
    takes the rest of its time on the link, whichever rail it is on. The blocks that a rail carries in an all-gather are not
    contiguous. The arguments must be equal on every rank.
    """
    hosts, others = len(layout.nodes), layout.rails - 1
    on_link = max(0.0, model.beta - DEFAULT.beta)

    def costs(nbytes: int, *, contiguous: bool) -> list[Cost]:
        usable = (each for each in candidates(collective) if each.applies(hosts, contiguous))
        return [each.cost(hosts, nbytes, model) for each in usable]

    whole = min(map(model.seconds, costs(nbytes, contiguous=True)))
    parts = costs(nbytes // layout.rails, contiguous=collective == "all_reduce")
    shared = (others * (model.overhead * cost.messages + on_link * cost.nbytes) for cost in parts)
    return whole <= min(model.seconds(cost) + more for cost, more in zip(parts, shared, strict=True))
