"""The contract of native collectives: whole collectives of a group as schedules without messages.

If all ranks of a group share memory or a device, a `Native` runs collectives directly on the data, without messages.
`Native.prepare` does the work that all calls with one `CallSignature` have in common, and returns a `PreparedCall`. That
begins a call and returns the schedule of the rest, which sends nothing: it does a piece of the work and yields ``()``, or
it yields the rank of the member that it waits for and is resumed when that member may have made progress. Either driver
may run it, or the calling thread without a driver, and one driver may continue a schedule that another began.

The native sees every collective of the group, at least by `Native.publish`, so that ranks detect different calls. Members
and roots are ranks in the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from asyncdist.base.ops import Collective
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.memory.buffers import Memory, block_memories, copy_overlapping_rows, flat_memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The properties that calls of one collective share if they differ only in their memory.

    Attributes:
        collective: The collective.
        fingerprint: Identifies the call of this rank; members compare their fingerprints.
        dtype: Dtype of the (first) tensor.
        shape: Shape of the tensor; if the call has a block of this shape for each member, the shape of a block.
        kernels: Arithmetic of a reduction; None if the collective reduces nothing.
        root: The root; -1 if the collective has none.
        sizes: Element counts of the blocks if they differ, else empty.
    """

    collective: Collective
    fingerprint: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    kernels: Arithmetic | None = None
    root: int = -1
    sizes: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def arithmetic(self) -> Arithmetic:
        assert self.kernels is not None, "this collective reduces nothing"
        return self.kernels


PreparedCall = Callable[..., Schedule | None]
"""``call(sequence, *tensors)`` begins one call; ``sequence`` counts the group's collectives from 1.

It is called under the world's lock and does not wait. It returns the schedule of the rest; None if the call is complete.
The tensors are contiguous and may overlap. Their order is that of the group's method:

======================  =====================================  ==========================================
collective              tensors                                result
======================  =====================================  ==========================================
all_reduce              tensor                                 the reduction, with the same bits everywhere
all_reduce_coalesced    tensors                                as all_reduce, each
reduce                  tensor                                 the reduction on the root; only read elsewhere
reduce_scatter          output, blocks                         the reduction of all members' ``blocks[rank]``
broadcast               tensor                                 the tensor of the root
all_gather              blocks, tensor                         ``blocks[i]`` is the tensor of member i
all_gather_coalesced    lists of blocks, tensors               as all_gather, each
gather                  blocks (None but on the root), tensor  as all_gather on the root
scatter                 tensor, blocks (None but on the root)  the root's ``blocks[rank]``
all_to_all              incoming, outgoing                     ``incoming[i]`` is ``outgoing[rank]`` of member i
barrier                                                        every member has called it
======================  =====================================  ==========================================

Blocks are a list with one tensor for each member, or one tensor that holds blocks of equal size.
"""


class Native(ABC):
    """The collectives of one group whose members all reach each other. Called under the world's lock."""

    def open(self) -> None:  # noqa: B027 - optional
        """Make this rank visible to the members, which may have called collectives already."""

    def publish(self, sequence: int, fingerprint: int) -> Schedule:
        """Publish the fingerprint of a collective that then runs over links, without waiting for data."""
        yield from ()

    @abstractmethod
    def prepare(self, signature: CallSignature) -> PreparedCall:
        """Return the prepared call of one signature. Any thread may call this, with or without the lock."""

    def kept(self, call: PreparedCall, tensors: Sequence[Any]) -> PreparedCall:
        """Return ``call`` for these tensors alone, whose memory stays where it is."""
        return call

    def close(self) -> None:  # noqa: B027 - optional
        """Release the memory of the group; memory that members still read is released when they have read it."""


def all_gather_rows(
    signature: CallSignature, blocks: Any, tensors: Any, size: int, rank: int
) -> list[tuple[list[Memory], Memory]]:
    """Return the memory of an all-gather, coalesced or not, as (blocks, own input); no input overlaps another block."""
    if signature.collective is Collective.all_gather:
        blocks, tensors = [blocks], [tensors]
    rows = [(block_memories(each, size), flat_memory(own)) for each, own in zip(blocks, tensors, strict=True)]
    return copy_overlapping_rows(rows, size, rank)


def preceded(publication: Schedule, parts: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield the parts; the first one runs ``publication`` before its own steps."""

    def first(part: Schedule) -> Schedule:
        yield from publication
        yield from part

    for number, part in enumerate(parts):
        yield part if number else first(part)


def beginning(call: PreparedCall, sequence: int, tensors: Iterable[Any]) -> Schedule:
    """Return the schedule of a whole call, which it begins when it runs first."""
    yield from call(sequence, *tensors) or ()


def raising(cause: Exception) -> Schedule:
    """Return a schedule that raises an error: that of a schedule that failed before it had an operation."""
    yield ()
    raise cause
