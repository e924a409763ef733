"""Collectives of a group on several hosts: shared memory inside each node, messages along the rails between nodes.

`asyncdist.kernel.algorithms.hierarchy` defines nodes and rails. Every collective is cut into parts, each with its own
generator, so that the links carry one part while the nodes process others:

====================  =========================  ==============================  ======================
                      inside                     along each rail                 inside
====================  =========================  ==============================  ======================
all_reduce            reduce-scatter to a slice  all-reduce of the slice         all-gather of slices
all_reduce, small     reduce to first member     all-reduce on the first rail    broadcast
reduce_scatter        reduce-scatter of the      partial results to their
                      blocks of each node        destination ranks
all_gather            (all-gather, if uneven)    all-gather of its blocks        all-gather of the rest
all_gather, small     gather to first member     all-gather on the first rail    broadcast
broadcast             broadcast (root's node)    broadcast of a slice            all-gather of slices
reduce                reduce to one member       tree among these members
barrier               reduce to first member     barrier on the first rail       broadcast
====================  =========================  ==============================  ======================

`asyncdist.kernel.collectives.first_rail` has the small ones.

**Numbers.** Each node numbers its own native collectives (`Native`). The n-th one must be the same on all members of
the node, in whatever order parts complete. A call therefore reserves the numbers of all its parts before it returns,
and members make calls in the same order. Its operation may start later, in another thread. A part has consecutive
numbers, and later parts have higher numbers.

**Two halves.** A large part of an all-reduce or all-gather has two generators, which run at the same time: the ring of
the rail, and the native collectives, each of which takes a batch of the blocks
(`asyncdist.kernel.algorithms.hierarchy.batches`). So the node reduces the next blocks and copies the last ones while the
link moves others. A half that waits for the other one yields its own rank.

**No deadlock.** The n-th native collective may wait until all members have completed earlier ones, because slots are
reused in turn. Numbers may be reserved for a part that has not begun. Call the part with the lower numbers the earlier
one, and consider the earliest part that is incomplete on some rank. It has begun on every rank that has issued it, with
both halves: halves begin in order, and only incomplete ones fill the window of an operation, none of which is earlier.
All earlier parts, for which its native collectives may wait, are complete on every rank. Every rank executes the native
collectives of one part in the same order, and its messages, too. A native collective that reduces blocks for the ring
waits for earlier native ones only. A step of the ring waits for these and for earlier steps. A native collective that
copies blocks waits for earlier native ones and for steps of the ring. So the part never waits for a later step of
itself, and completes. By induction all parts complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from asyncdist.base.ops import Collective
from asyncdist.kernel.algorithms import pairwise, ring, tree
from asyncdist.kernel.algorithms.hierarchy import (
    NodeLayout,
    RingProgress,
    among,
    batches,
    contiguous,
    gather_runs,
    part_count,
)
from asyncdist.kernel.algorithms.schedule import Reduce, Schedule, Send
from asyncdist.kernel.algorithms.selection import Model
from asyncdist.kernel.collectives.first_rail import FirstRailCollectives, reduce_by
from asyncdist.kernel.collectives.node import NodeCollectives, plain, store_result, widened
from asyncdist.kernel.memory.buffers import Memory, Scratch, TensorBlocks
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.kernel.transport.native import Native

Part = Callable[[int], Schedule]
"""``part(number)`` is the schedule of a part whose native collectives have the numbers from ``number`` on."""


class HierarchicalCollectives:
    """The collectives of one group over its nodes.

    Methods yield the parts of a plan, of which at most `window` run at once. Their argument ``call`` is the fingerprint of
    the call.

    Args:
        layout: The nodes of the group, as seen by this rank.
        native: The collectives inside the node of this rank; None if this rank is alone on its node.
        model: Cost model that selects the schedules along the rails.
        scratch: Pool of temporary memory.
    """

    window = 4

    def __init__(self, layout: NodeLayout, native: Native | None, model: Model, scratch: Scratch) -> None:
        self._layout, self._native = layout, native
        self._node = NodeCollectives(layout, native)
        self._model = model
        self._scratch = scratch
        self._last_number = 0
        self._reserving = threading.Lock()
        self._size = sum(len(members) for members in layout.nodes)
        self._hosts = hosts = len(layout.nodes)
        self._small = FirstRailCollectives(layout, self._node, model, scratch)
        self._ring_order = [(layout.node - 1 - passed) % hosts for passed in range(hosts)]
        """The nodes in the order in which a ring of nodes needs their blocks, and in which it delivers them."""

    def open(self) -> None:
        """Make the native collectives of this rank available to the members of its node."""
        if self._native is not None:
            self._native.open()

    def close(self) -> None:
        """Release the resources of the native collectives."""
        if self._native is not None:
            self._native.close()

    def _numbered(self, parts: Iterable[tuple[int, Part]]) -> Iterator[Schedule]:
        """Reserve the numbers of all parts, each of which comes with its count of native collectives; return schedules."""
        counted = list(parts)
        natives = [count for count, _ in counted]
        numbers = accumulate(natives, initial=self._reserve(sum(natives)))
        return (part(number) for (_, part), number in zip(counted, numbers, strict=False))

    def _reserve(self, natives: int) -> int:
        """Reserve the numbers of native collectives; return the first."""
        with self._reserving:
            first = self._last_number + 1
            self._last_number += natives
        return first

    def _cut(self, nbytes: int, *, overlaps: bool = False) -> int:
        segment_nbytes = self._model.segment_nbytes
        return part_count(nbytes, self._layout.rails, self._hosts, segment_nbytes, overlaps=overlaps)

    # -- reducing ------------------------------------------------------------------------------

    def all_reduce(self, kernels: Arithmetic, call: int, memories: Sequence[Memory]) -> Iterable[Schedule]:
        """Reduce each memory over all ranks in place, with equal bits on all ranks. The caller has applied any scaling."""
        small = self._small
        # A small call has no time for lists of parts.
        if len(memories) == 1 and small.takes("all_reduce", memories[0].nbytes):
            return [small.all_reduce(call, memories[0], kernels, self._reserve(small.NUMBERS))]

        def parts() -> Iterator[tuple[int, Part]]:
            for memory in memories:
                if small.takes("all_reduce", memory.nbytes):
                    yield small.NUMBERS, partial(small.all_reduce, call, memory, kernels)
                    continue
                blocks = TensorBlocks.split(memory, self._cut(memory.nbytes, overlaps=True))
                for part in range(len(blocks)):
                    if len(blocks) > 1:
                        yield from self._all_reduce_ring(call, blocks[part], kernels)
                    else:
                        yield 2, partial(self._all_reduce_slices, call, blocks[part], kernels)

        return self._numbered(parts())

    def _all_reduce_slices(self, call: int, memory: Memory, kernels: Arithmetic, number: int) -> Schedule:
        layout = self._layout
        narrow, wide = self._node.slices(memory), self._node.slices(widened(memory, kernels))
        own, result = wide[layout.place], narrow[layout.place]
        yield from self._node.reduce_scatter(number, call, wide, own, kernels)
        if layout.carries:
            rail = self._reduce_along(own, result if kernels.widens else own, kernels)
            yield from among(layout.rail(layout.place), rail)
        yield from self._node.all_gather(number + 1, call, [narrow])

    def _all_reduce_ring(self, call: int, memory: Memory, kernels: Arithmetic) -> Iterator[tuple[int, Part]]:
        """Yield the two halves of a part whose slices travel around the ring of each rail, block by block.

        One half reduces blocks within the node before the ring needs them, and gathers those that are complete. The other
        half is the ring.
        """
        layout, hosts, order = self._layout, self._hosts, self._ring_order
        progress = RingProgress(ready=0, arrived=0 if layout.carries else hosts)
        reduced = [(end, contiguous(blocks)) for end, blocks in batches(order, smallest=2, growing=True)]
        # The ring completes this node's own block first.
        complete = [(end, blocks) for end, blocks in batches(order[-1:] + order[:-1], smallest=1)]
        wide: list[Memory] = []

        def within_node(number: int) -> Schedule:
            narrow = self._node.slices(memory)
            wide[:] = self._node.slices(widened(memory, kernels))
            cut = [TensorBlocks.split(piece, hosts) for piece in wide]
            for end, ranges in reduced:
                for low, high in ranges:
                    inputs = [blocks[low:high] for blocks in cut]
                    yield from self._node.reduce_scatter(number, call, inputs, inputs[layout.place], kernels)
                    number += 1
                progress.ready = end
            cut = [TensorBlocks.split(piece, hosts) for piece in narrow]
            for end, blocks in complete:
                while progress.arrived < end:
                    yield layout.rank
                yield from self._node.all_gather(number, call, [[each[block] for each in cut] for block in blocks])
                number += 1

        def along_rail(number: int) -> Schedule:
            while not progress.ready:
                yield layout.rank
            own, result = wide[layout.place], self._node.slices(memory)[layout.place]
            blocks = TensorBlocks.split(own, hosts)
            results = TensorBlocks.split(result, hosts) if kernels.widens else blocks
            rail = layout.rail(layout.place)
            for passed, step in enumerate(among(rail, ring.reduce_scatter(layout.node, hosts, blocks))):
                while progress.ready < passed + 2:
                    yield layout.rank
                yield step
            store_result(blocks[layout.node], results[layout.node], kernels, self._size)
            progress.arrived = 1
            for step in among(rail, ring.all_gather(layout.node, hosts, results)):
                yield step
                progress.arrived += 1

        yield sum(len(ranges) for _, ranges in reduced) + len(complete), within_node
        if layout.carries:
            yield 0, along_rail

    def _reduce_along(self, own: Memory, result: Memory, kernels: Arithmetic) -> Schedule:
        """All-reduce ``own`` along the rail of this rank into ``result``, whose dtype may be narrower."""
        place, hosts = self._layout.node, self._hosts
        algorithm = self._small.choose("all_reduce", own.nbytes)
        if algorithm == "doubling" or not kernels.widens:
            scratch = self._scratch.take(own.count if algorithm == "doubling" else 0, own.dtype)
            yield from reduce_by(algorithm, place, hosts, own, scratch)
            self._scratch.give(scratch)
            store_result(own, result, kernels, self._size)
            return
        # The ring gathers narrow results where partial sums are wide.
        blocks, results = TensorBlocks.split(own, hosts), TensorBlocks.split(result, hosts)
        yield from ring.reduce_scatter(place, hosts, blocks)
        store_result(blocks[place], results[place], kernels, self._size)
        yield from ring.all_gather(place, hosts, results)

    def reduce(self, memory: Memory, root: int, kernels: Arithmetic, call: int) -> Iterator[Schedule]:
        """Store the reduction in the memory of the root. The memory of the other ranks is only read."""
        at_root = self._layout.rank == root
        leaders = [root if root in members else members[0] for members in self._layout.nodes]

        def part(piece: Memory, number: int) -> Schedule:
            layout, leader = self._layout, leaders[self._layout.node]
            own = piece
            if kernels.widens or (layout.rank == leader and not at_root):
                own = Memory(piece.tensor.to(kernels.accumulator, copy=True))
            if not self._node.is_alone:
                place = layout.members.index(leader)
                run = self._node.prepared(Collective.reduce, call, own, plain(kernels), root=place)
                yield from run(number, own.tensor) or ()
            if layout.rank == leader:
                yield from among(leaders, tree.reduce(layout.node, self._hosts, leaders.index(root), own))
            if at_root:
                store_result(own, piece, kernels, self._size)

        # A single rail carries all parts, because the root receives all of them.
        blocks = TensorBlocks.split(memory, part_count(memory.nbytes, 1, self._hosts, self._model.segment_nbytes))
        return self._numbered((1, partial(part, blocks[place])) for place in range(len(blocks)))

    def reduce_scatter(
        self, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic, call: int
    ) -> Iterator[Schedule]:
        """Store in ``own`` the reduction of ``inputs[rank]`` over all members. The inputs are only read."""
        count = self._cut(sum(inputs[rank].nbytes for rank in range(self._size)))
        cut = [TensorBlocks.split(inputs[rank], count) for rank in range(self._size)]
        owns, layout = TensorBlocks.split(own, count), self._layout
        natives = 1 + sum(len(list(layout.turns(other))) for other in range(self._hosts) if other != layout.node)

        def part(which: int, number: int) -> Schedule:
            wanted = [widened(blocks[which], kernels) for blocks in cut]
            result = owns[which]
            total = self._scratch.take(result.count, kernels.accumulator) if kernels.widens else result
            yield from self._node.reduce_scatter(
                number, call, [wanted[rank] for rank in layout.members], total, kernels
            )
            yield from self._give_partial_sums(number + 1, call, wanted, total, kernels)
            store_result(total, result, kernels, self._size)
            if kernels.widens:
                self._scratch.give(total)

        return self._numbered((natives, partial(part, which)) for which in range(count))

    def _give_partial_sums(
        self, number: int, call: int, wanted: Sequence[Memory], total: Memory, kernels: Arithmetic
    ) -> Schedule:
        """Reduce the blocks of each other node, send them there, and add the received partial sums to ``total``."""
        layout = self._layout
        for distance in range(1, self._hosts):
            there, back = (layout.node + distance) % self._hosts, (layout.node - distance) % self._hosts
            sends: list[Send] = []
            for turn in layout.turns(there):
                blocks = self._node.on_rails([wanted[rank] for rank in turn])
                out = blocks[layout.place]
                # Without a block of its own, `out` is an empty view of an input, whose version must not change.
                if not self._node.is_alone:
                    out = self._scratch.take(out.count, out.dtype)
                if layout.place < len(turn):
                    sends.append(Send(turn[layout.place], out))
                yield from self._node.reduce_scatter(number, call, blocks, out, kernels)
                number += 1
            yield (*sends, Reduce(layout.rail_leader(back, layout.rank), total))
            if not self._node.is_alone:
                for send in sends:
                    self._scratch.give(send.place)

    # -- movement ------------------------------------------------------------------------------

    def all_gather(self, rows: Sequence[Sequence[Memory]], call: int, *, equal: bool) -> Iterator[Schedule]:
        """Copy, for each row, each rank's ``row[rank]`` to all ranks. ``equal``: one row of equal blocks."""
        if equal and (steps := self._small.gather_steps(rows[0], call)) is not None:
            return self._numbered([(self._small.NUMBERS, partial(self._small.all_gather, steps, rows[0]))])

        def parts() -> Iterator[tuple[int, Part]]:
            for row in rows:
                count = self._cut(sum(row[rank].nbytes for rank in range(self._size)), overlaps=True)
                cut = [TensorBlocks.split(row[rank], count) for rank in range(self._size)]
                for which in range(count):
                    yield from self._gather_row(call, [blocks[which] for blocks in cut])

        return self._numbered(parts())

    def _gather_row(self, call: int, row: Sequence[Memory]) -> Iterator[tuple[int, Part]]:
        """Yield the two halves of a part of an all-gather: one copies blocks within the node as they arrive, the other
        passes them along the rail."""
        layout, order = self._layout, self._ring_order[:-1]
        all_carry = len(layout.members) == layout.rails
        progress = RingProgress(ready=int(all_carry), arrived=0 if layout.carries else len(order))
        arriving = list(batches(order, smallest=1))

        def within_node(number: int) -> Schedule:
            rows: list[Sequence[Memory]] = [[row[rank] for rank in layout.members]]
            # Members outside the rails pass their blocks to the members on rails.
            if not all_carry:
                yield from self._node.all_gather(number, call, rows)
                rows, number = [], number + 1
                progress.ready = 1
            for end, nodes in arriving:
                rows += [
                    self._node.on_rails([row[rank] for rank in turn]) for node in nodes for turn in layout.turns(node)
                ]
                while progress.arrived < end:
                    yield layout.rank
                yield from self._node.all_gather(number, call, rows)
                rows, number = [], number + 1

        def along_rail(number: int) -> Schedule:
            while not progress.ready:
                yield layout.rank
            rail = layout.rail(layout.place)
            runs = [[row[rank] for rank in layout.carried(node, layout.place)] for node in range(self._hosts)]
            nbytes, single = sum(block.nbytes for run in runs for block in run), all(len(run) == 1 for run in runs)
            if single and self._small.choose("all_gather", nbytes) == "direct":
                yield from among(rail, pairwise.all_gather(layout.node, self._hosts, [run[0] for run in runs]))
            else:
                for step in among(rail, gather_runs(layout.node, self._hosts, runs)):
                    yield step
                    progress.arrived += 1
            progress.arrived = len(order)

        yield len(arriving) + (not all_carry), within_node
        if layout.carries:
            yield 0, along_rail

    def broadcast(self, memory: Memory, root: int, call: int) -> Iterator[Schedule]:
        """Copy the root's memory to all ranks."""
        layout = self._layout
        root_node = next(number for number, members in enumerate(layout.nodes) if root in members)
        chosen = self._small.choose("broadcast", memory.nbytes // layout.rails)
        along: Callable[[int, int, int, Memory], Schedule]
        along = tree.broadcast if chosen == "tree" else tree.chain_broadcast

        def part(piece: Memory, number: int) -> Schedule:
            slices = self._node.slices(piece)
            if layout.node == root_node and not self._node.is_alone:
                place = layout.members.index(root)
                run = self._node.prepared(Collective.broadcast, call, piece, root=place)
                yield from run(number, piece.tensor) or ()
            if layout.carries:
                rail = along(layout.node, self._hosts, root_node, slices[layout.place])
                yield from among(layout.rail(layout.place), rail)
            if layout.node != root_node:
                yield from self._node.all_gather(number, call, [slices])

        blocks = TensorBlocks.split(memory, self._cut(memory.nbytes))
        return self._numbered((1, partial(part, blocks[place])) for place in range(len(blocks)))

    def barrier(self, call: int) -> Schedule:
        """Return the only part of a barrier."""
        return self._small.barrier(call, self._reserve(self._small.NUMBERS))
