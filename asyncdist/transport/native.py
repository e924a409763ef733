"""The contract of native collectives: whole collectives of a group as schedules without messages.

Where all ranks of a group share memory or a device, messages are a detour. A `Native` runs a collective where the data is:
its methods return schedules that send nothing. A schedule does a piece of the work and yields ``()``, or it yields the
member that it waits for and is resumed when something may have changed. It runs under either driver, or in the calling
thread without a driver, and one driver may continue what another began.

``number`` counts the collectives of the group from 1. Every collective passes through the native, at least by
`announce`, so that ranks that call different collectives detect it. ``fingerprint`` identifies the call of this rank.
Members and roots are ranks in the group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.base.ops import Collective
from asyncdist.memory.buffers import Memory
from asyncdist.memory.reduce_kernels import Arithmetic


class MemoryBlocks(Protocol):
    """Memory by number."""

    def __getitem__(self, which: int, /) -> Memory: ...


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What calls of one collective have in common that differ only in their memory."""

    collective: Collective
    fingerprint: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the tensor; of one member's block where a tensor, or a list of them, has a block for each, all alike."""
    how: Arithmetic | None = None
    root: int = -1

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def writes(self, rank: int) -> bool:
        """Return whether such a call writes the first tensor, or list of tensors, of a member."""
        if self.collective in (Collective.reduce, Collective.gather):
            return rank == self.root
        if self.collective is Collective.broadcast:
            return rank != self.root
        return self.collective is not Collective.barrier

    @property
    def arithmetic(self) -> Arithmetic:
        assert self.how is not None, "this collective reduces nothing"
        return self.how


PreparedCall = Callable[..., Schedule]
"""``quick(number, *tensors)`` is the schedule of one call, on contiguous tensors in the order of the group's method.

They may overlap as the user's tensors do: no plan has looked at them.
"""


class Native(ABC):
    """The collectives of one group, all of whose members its transport reaches. Called under the world's lock.

    What is read overlaps nothing that is written (see `apart`), except that a rank's own block may be both.
    """

    def quick(self, kind: CallSignature) -> PreparedCall | None:
        """Return a faster implementation of the calls with one signature; None if the methods below are the fastest.

        It is compatible with members that use the methods for the same call.
        """
        return None

    @abstractmethod
    def open(self) -> None:
        """Make this rank visible to the members, which may have called collectives already."""

    @abstractmethod
    def announce(self, number: int, fingerprint: int) -> Schedule:
        """Publish the fingerprint of a collective that then runs over links; wait for no data."""

    @abstractmethod
    def all_reduce(self, number: int, fingerprint: int, memories: Sequence[Memory], how: Arithmetic) -> Schedule:
        """Reduce each memory over the members, in place, the same bits on all of them."""

    @abstractmethod
    def reduce(self, number: int, fingerprint: int, memory: Memory, root: int, how: Arithmetic) -> Schedule:
        """Leave the reduction in the root's memory; that of the others is only read."""

    @abstractmethod
    def reduce_scatter(
        self, number: int, fingerprint: int, inputs: MemoryBlocks, own: Memory, how: Arithmetic
    ) -> Schedule:
        """Leave in ``own`` the reduction of all members' ``inputs[rank]``; inputs are only read."""

    @abstractmethod
    def broadcast(self, number: int, fingerprint: int, memory: Memory, root: int) -> Schedule:
        """Copy the root's memory to all members."""

    @abstractmethod
    def all_gather(self, number: int, fingerprint: int, rows: Sequence[tuple[MemoryBlocks, Memory]]) -> Schedule:
        """Copy, for each row (blocks, own), each member's ``own`` into every member's ``blocks[rank]``, its own
        included."""

    @abstractmethod
    def gather(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        """Copy each member's ``own`` into the root's ``blocks[rank]``, but for the root's, which is there."""

    @abstractmethod
    def scatter(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        """Copy the root's ``blocks[rank]`` into each member's ``own``, but for the root's, which is there."""

    @abstractmethod
    def all_to_all(
        self, number: int, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]
    ) -> Schedule:
        """Copy each member's ``outgoing[rank]`` into our ``incoming[member]``, our own too."""

    @abstractmethod
    def barrier(self, number: int, fingerprint: int) -> Schedule:
        """Complete when every member has called it."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory of the group; memory that members still read stays until they are done."""


def announced(announcement: Schedule, parts: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield the parts, the first of them preceded by an announcement."""

    def first(part: Schedule) -> Schedule:
        yield from announcement
        yield from part

    for number, part in enumerate(parts):
        yield part if number else first(part)


def raising(cause: Exception) -> Schedule:
    """Return a schedule that raises the error of a schedule that failed before it had an operation."""
    yield ()
    raise cause
