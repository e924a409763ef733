"""The steps of collectives over links, recorded once for all calls with tensors of the same dtypes and shapes.

Making the memory, the blocks and the steps of a small call takes longer than exchanging its data. `RecordedCall` makes them
when the call is planned, and lets them belong to the tensors of one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from asyncdist.kernel.algorithms.schedule import Combine, Reduce, Schedule, Send, Step, Wait
from asyncdist.kernel.engine.direct_calls import DirectStep
from asyncdist.kernel.memory.buffers import Memory, TensorBlocks, flat_memory, overlapping_inputs, view_at
from asyncdist.kernel.memory.reduce_kernels import Fold, divide

_address_of = torch.Tensor.data_ptr
KEPT_NBYTES = 64 << 10
"""Bytes of the largest scratch that a recording takes and keeps."""
_LONG_NBYTES = 1 << 20
"""Bytes of a copy that torch makes, on several threads and without the GIL."""


class LocalCopy(NamedTuple):
    """Copy ``other`` to ``place``, both local, which may be the same memory but must not overlap otherwise."""

    place: Memory
    other: Memory

    @property
    def is_computed(self) -> bool:
        """Whether it needs the places as tensors."""
        return self.place.nbytes > _LONG_NBYTES

    def run(self) -> None:
        if self.is_computed:
            self.place.raw.copy_(self.other.raw)
        else:
            self.place.view[:] = self.other.view


class LocalDivision(NamedTuple):
    """Divide ``place`` in place, as an average does."""

    place: Memory
    by: int

    def run(self) -> None:
        divide(self.place.tensor, self.by)


class _Fold(NamedTuple):
    """Do a Combine."""

    action: Combine
    fold: Fold

    def run(self) -> None:
        place, other, swapped = self.action
        self.fold(place.tensor, other.tensor, swapped)


Recording = Iterable[Step | Wait | LocalCopy | LocalDivision]
"""The steps of a schedule without waits, and between them what the rank does alone."""


class RecordedCall:
    """The schedule of a call over links, whose steps are recorded once.

    The recorded places are ranges of memories that belong to the tensors of one call at a time. Between calls the recording
    keeps no tensor alive. A call whose inputs overlap its outputs, and one that begins during another, makes its own steps.

    Args:
        record: Yields the steps, given the memory of a tensor, a list of memories, or None, for each argument of the call.
            It may take scratch of its own. What it yields depends on nothing but its arguments.
        arguments: The arguments of such a call, in the order of the group's method: tensors, lists of tensors, and None.
        fold: Does the arithmetic of Combine.
    """

    def __init__(self, record: Callable[..., Recording], arguments: Sequence[Any], fold: Fold | None = None) -> None:
        self._record = record
        self._is_used = False
        made = [_each(lambda tensor: Memory.unbound(tensor.numel(), tensor.dtype), argument) for argument in arguments]
        memories = [memory for argument in made for memory in _listed(argument)]
        self._items = [_prepared(item, fold) for item in record(*made)]
        places = _Places(memories, self._items)
        self._places = places.places
        self._read, self._written, self._own = places.read, places.written, places.own
        self._wholes, self._computed = places.wholes, places.computed
        self._reads_only = [places.reads_only(_listed(argument)) for argument in made]
        self._addresses: list[int] = []
        """The addresses of the tensors to which the places belong, or have belonged in the last call."""

    def schedule(self, *arguments: Any) -> Schedule:
        """Return the schedule of a call with contiguous tensors. It runs under the lock of the world."""
        tensors: list[torch.Tensor] = []
        for argument in arguments:
            if type(argument) is list:
                tensors += argument
            elif argument is not None:
                tensors.append(argument)
        addresses = list(map(_address_of, tensors))
        overlaps = addresses != self._addresses and self._overlaps(addresses)
        if overlaps or self._is_used:
            yield from performed(self._anew(arguments, overlaps))
            return
        self._bind(tensors, addresses)
        self._is_used = True
        try:
            for item in self._items:
                if isinstance(item, DirectStep):
                    yield item
                else:
                    item.run()
        finally:
            for memory in self._wholes:
                memory.unbind()
            for place in self._computed:
                place.unbind()
            self._is_used = False

    def _overlaps(self, addresses: Sequence[int]) -> bool:
        """Return whether the inputs of a call overlap its outputs."""
        return bool(self._read) and bool(
            overlapping_inputs(_at(addresses, self._read), _at(addresses, self._written), self._own)
        )

    def _bind(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Let the places belong to the tensors of a call."""
        if addresses != self._addresses:
            # An error, such as exhausted memory, leaves no places of two calls.
            self._addresses = []
            for place, number, start in self._places:
                place.view = view_at(addresses[number] + start, place.nbytes)
            self._addresses = addresses
        for memory, number in self._wholes.items():
            memory.bind(tensors[number])
        for place, (memory, start) in self._computed.items():
            place.tensor = memory.tensor[start : start + place.count]

    def _anew(self, arguments: Sequence[Any], overlaps: bool) -> Recording:
        """Make the steps for one call. If its inputs overlap its outputs, it reads copies of them."""
        made = [
            _each(_copied if overlaps and reads_only else flat_memory, argument)
            for argument, reads_only in zip(arguments, self._reads_only, strict=True)
        ]
        return self._record(*made)


def performed(recording: Recording) -> Schedule:
    """Return the schedule of one call: do what the rank does alone, and yield the steps."""
    for item in recording:
        if isinstance(item, LocalCopy | LocalDivision):
            item.run()
        else:
            yield item


def _copied(tensor: torch.Tensor) -> Memory:
    return flat_memory(tensor.clone())


_Range = tuple[int, int, int]
"""The number of a tensor, and the bytes of it at which a range begins and ends."""


class _PlaceUse(NamedTuple):
    """How an action uses a place: whether it writes it, and whether it needs it as a tensor."""

    place: Memory
    is_written: bool
    is_computed: bool


def _uses(item: Any) -> list[_PlaceUse]:
    if isinstance(item, DirectStep):
        return [use for action in item for use in _uses(action)]
    if isinstance(item, _Fold):
        return _uses(item.action)
    if isinstance(item, LocalCopy | Combine):
        computes = isinstance(item, Combine) or item.is_computed
        return [_PlaceUse(item.place, True, computes), _PlaceUse(item.other, False, computes)]
    return [_PlaceUse(item.place, not isinstance(item, Send), isinstance(item, Reduce | LocalDivision))]


class _Places:
    """The places of a recording that belong to tensors of the call; others are scratch.

    Attributes:
        places: Each place, the number of its tensor, and its offset in bytes.
        read: The ranges that are read, of tensors that are not written.
        written: The ranges that are written.
        own: The inputs that may be outputs: numbers of ranges in ``read`` and ``written``.
        computed: The places that the arithmetic needs as tensors and that are ranges: in which memory, from which element.
        wholes: The memories of which the arithmetic needs all or a range as a tensor, and the numbers of the tensors.
    """

    def __init__(self, memories: Sequence[Memory], items: Sequence[Any]) -> None:
        self._number_of = {id(memory): number for number, memory in enumerate(memories)}
        uses = [(use, at) for item in items for use in _uses(item) if (at := self._range_of(use.place)) is not None]
        unique = {id(use.place): (use.place, number, start) for use, (number, start, _) in uses}
        self.places = list(unique.values())
        self.written = list(dict.fromkeys(at for use, at in uses if use.is_written))
        self._written_tensors = {number for number, _, _ in self.written}
        self.read = [at for at in dict.fromkeys(at for _, at in uses) if at[0] not in self._written_tensors]
        copies = [
            (self._range_of(item.other), self._range_of(item.place)) for item in items if isinstance(item, LocalCopy)
        ]
        self.own = {
            self.read.index(other): self.written.index(place)
            for other, place in copies
            if other in self.read and place in self.written
        }
        computed = [(use.place, *at) for use, at in uses if use.is_computed]
        self.wholes = {memories[number]: number for _, number, _, _ in computed}
        self.computed = {
            place: (memories[number], start // place.itemsize)
            for place, number, start, _ in computed
            if id(place) not in self._number_of
        }

    def _range_of(self, place: Memory) -> _Range | None:
        memory, start = place.located()
        number = self._number_of.get(id(memory))
        return None if number is None else (number, start, start + place.nbytes)

    def reads_only(self, memories: Sequence[Memory]) -> bool:
        """Return whether none of the memories is written."""
        return self._written_tensors.isdisjoint(self._number_of[id(memory)] for memory in memories)


def _at(addresses: Sequence[int], ranges: Sequence[_Range]) -> list[tuple[int, int]]:
    """Return the addresses at which ranges begin and end."""
    return [(addresses[number] + start, addresses[number] + stop) for number, start, stop in ranges]


def _prepared(
    item: Step | Wait | LocalCopy | LocalDivision, fold: Fold | None
) -> DirectStep | LocalCopy | LocalDivision | _Fold:
    if isinstance(item, LocalCopy | LocalDivision):
        return item
    assert not isinstance(item, int), "a recording does not wait"
    if fold is not None and len(item) == 1 and isinstance(item[0], Combine):
        return _Fold(item[0], fold)
    return DirectStep(item)


def _each(function: Callable[[torch.Tensor], Memory], argument: Any) -> Memory | list[Memory] | None:
    """Return the memory of a tensor, or of each tensor in a list; None for None."""
    if argument is None:
        return None
    return [function(tensor) for tensor in argument] if isinstance(argument, list) else function(argument)


def _listed(argument: Any) -> list[Any]:
    """Return an argument as a list: itself, the only element, or nothing for None."""
    if argument is None:
        return []
    return argument if isinstance(argument, list) else [argument]


def recorded_blocks(argument: Any, counts: Sequence[int]) -> list[Memory] | TensorBlocks:
    """Return the blocks of an argument of a `RecordedCall`: a list of memories, or one memory with blocks of ``counts``."""
    return argument if isinstance(argument, list) else TensorBlocks(argument, [0, *accumulate(counts)])
