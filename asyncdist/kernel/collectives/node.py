"""The collectives inside one node, which `hierarchical` combines with messages between the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.base.ops import Collective
from asyncdist.kernel.algorithms.hierarchy import NodeLayout
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.memory.bounded_cache import BoundedCache
from asyncdist.kernel.memory.buffers import Memory, TensorBlocks
from asyncdist.kernel.memory.reduce_kernels import Arithmetic, divide
from asyncdist.kernel.transport.native import CallSignature, Native, PreparedCall

_CACHED_CALLS = 512


class NodeCollectives:
    """The native collectives of the members of this rank's node. Without another member they only copy.

    Their argument ``number`` is the number of the native collective, ``call`` the fingerprint of the whole call.

    Args:
        layout: The nodes of the group, as seen by this rank.
        native: The collectives inside the node; None if this rank is alone there.
    """

    def __init__(self, layout: NodeLayout, native: Native | None) -> None:
        self._layout, self._native = layout, native
        self._calls: BoundedCache[CallSignature, PreparedCall] = BoundedCache(_CACHED_CALLS)

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only member."""
        return self._native is None

    def prepared(
        self,
        collective: Collective,
        call: int,
        memory: Memory,
        kernels: Arithmetic | None = None,
        *,
        root: int = -1,
        sizes: tuple[int, ...] = (),
    ) -> PreparedCall:
        """Return the prepared native call for one tensor, or for one block of it on each member."""
        assert self._native is not None
        signature = CallSignature(collective, call, memory.dtype, (memory.count,), kernels, root, sizes)
        return self._calls.get(signature) or self._calls.add(signature, self._native.prepare(signature))

    def reduce_scatter(
        self, number: int, call: int, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic
    ) -> Schedule:
        """Reduce ``inputs[place]`` of all members into ``own``, which may be this rank's own input."""
        if self._native is not None:
            run = self.prepared(Collective.reduce_scatter, call, own, plain(kernels), sizes=_sizes(inputs))
            yield from run(number, own.tensor, [block.tensor for block in inputs]) or ()
        elif own is not inputs[0]:
            own.tensor.copy_(inputs[0].tensor)

    def all_gather(self, number: int, call: int, rows: Sequence[Sequence[Memory]]) -> Schedule:
        """Copy, for each row, each member's ``row[place]`` to all members."""
        if self._native is None:
            return
        owns = [row[self._layout.place] for row in rows]
        lists = [[block.tensor for block in row] for row in rows]
        if len(rows) == 1:
            run = self.prepared(Collective.all_gather, call, owns[0], sizes=_sizes(rows[0]))
            yield from run(number, lists[0], owns[0].tensor) or ()
        else:
            sizes = tuple(block.count for row in rows for block in row)
            run = self.prepared(Collective.all_gather_coalesced, call, owns[0], sizes=sizes)
            yield from run(number, lists, [own.tensor for own in owns]) or ()

    def slices(self, memory: Memory) -> list[Memory]:
        """Cut memory into one slice per rail, and an empty slice for each member of the node outside the rails."""
        blocks = TensorBlocks.split(memory, self._layout.rails)
        return self.on_rails([blocks[rail] for rail in range(self._layout.rails)])

    def on_rails(self, blocks: list[Memory]) -> list[Memory]:
        """Return one block per member of the node: the given blocks, then empty ones."""
        return blocks + [blocks[0].slice(0, 0)] * (len(self._layout.members) - len(blocks))


def _sizes(blocks: Sequence[Memory]) -> tuple[int, ...]:
    """Return the element counts of blocks; an empty tuple if all are equal."""
    counts = tuple(block.count for block in blocks)
    return () if len(set(counts)) == 1 else counts


def plain(kernels: Arithmetic) -> Arithmetic:
    """Return the arithmetic of partial results, in the dtype of the accumulator and without division."""
    return kernels._replace(widens=False, averages=False)


def widened(memory: Memory, kernels: Arithmetic) -> Memory:
    """Return memory of the accumulator's dtype with the same values; the memory itself if that is its dtype."""
    return Memory(memory.tensor.to(kernels.accumulator)) if kernels.widens else memory


def store_result(own: Memory, result: Memory, kernels: Arithmetic, size: int) -> None:
    """Store a reduction over all ``size`` ranks as the result: divide an average, and round to the dtype of ``result``."""
    if kernels.averages:
        divide(own.tensor, size)
    if kernels.widens:
        result.tensor.copy_(own.tensor)
