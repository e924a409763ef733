"""The steps of collectives over links, recorded once for all calls with tensors of the same dtypes and shapes.

Making the memory, the blocks and the steps of a small call takes longer than exchanging its data. `RecordedCall` makes them
when the call is planned, and lets them belong to the tensors of one call at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncdist.kernel.algorithms.schedule import Combine, Recv, Reduce, Schedule, Send, Step, Wait
from asyncdist.kernel.engine.direct_calls import MAX_DIRECT_NBYTES, DirectStep, PlannedCalls
from asyncdist.kernel.memory.buffers import (
    Memory,
    Scratch,
    TensorBlocks,
    outside_inference_mode,
    overlapping_inputs,
    view_at,
)
from asyncdist.kernel.memory.reduce_kernels import (
    COPIED_ARRAY_NBYTES,
    MOST_ARRAY_NBYTES,
    Arithmetic,
    Fold,
    divide,
    on_arrays,
)
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES

_address_of = torch.Tensor.data_ptr
_KEPT_NBYTES = 1 << 20
"""Bytes of scratch in the recordings of one call that are kept: programs begin hundreds of calls before the first ends."""
_LEAST_NBYTES = 4 << 10
"""Bytes for which a recording counts at least."""
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


class _ArrayFold:
    """Do a Combine of few elements as arrays of numpy, which takes a third of the time of tensors."""

    def __init__(self, action: Combine, combine: Any, dtype: Any) -> None:
        self.place, self.other, self._swapped = action
        self._combine, self._dtype = combine, dtype
        # numpy takes four times as long to change one element in place; to copy many takes longer.
        total: Any = None if self.place.nbytes > COPIED_ARRAY_NBYTES else np.empty(self.place.count, dtype)
        self._total, self._result = total, None if total is None else memoryview(total).cast("B")
        self._views: tuple[memoryview | None, memoryview | None] = None, None

    def run(self) -> None:
        place, other = self.place.view, self.other.view
        before, other_before = self._views
        if place is not before or other is not other_before:
            self._views = place, other
            own, theirs = [np.frombuffer(view, self._dtype) for view in (place, other)]
            total = own if self._total is None else self._total
            self._run = partial(self._combine, *((theirs, own) if self._swapped else (own, theirs)), total)
        self._run()
        if self._result is not None:
            place[:] = self._result


Recording = Iterable[Step | Wait | LocalCopy | LocalDivision]
"""The steps of a schedule without waits, and between them what the rank does alone."""

Form = tuple[int, torch.dtype]
"""The number of elements of a tensor, and their dtype."""
Record = Callable[..., Recording]
"""Yields the steps of one part of a call, given the memory of a tensor, a list of memories, or None, for each argument."""


class RecordedCall:
    """The schedules over links of all calls with tensors of the same dtypes and shapes. Their steps are recorded once.

    The recorded places are ranges of memories that belong to the tensors of one call at a time. Calls that run at the same
    time have a recording each. Between calls a recording keeps no tensor alive. A call whose inputs overlap its outputs
    reads copies of its inputs.

    Args:
        records: Yield the steps of one part each. The steps depend on nothing but their arguments.
        arguments: The arguments of such a call, in the order of the group's method: tensors, lists of tensors, and None.
        kernels: The arithmetic of Combine.
        scratch: Element counts and dtypes of the temporary memories that ``records`` get also.
        pool: Pool of this memory, unless it is so small that each recording keeps its own.
    """

    def __init__(
        self,
        records: Sequence[Record],
        arguments: Sequence[Any],
        kernels: Arithmetic | None = None,
        scratch: Sequence[Form] = (),
        pool: Scratch | None = None,
    ) -> None:
        nbytes = sum(count * dtype.itemsize for count, dtype in scratch)
        keeps_scratch = nbytes <= MAX_DIRECT_NBYTES
        self._records, self._kernels, self._pool = records, kernels, pool or Scratch()
        self._kept = scratch if keeps_scratch else ()
        self._taken = () if keeps_scratch else scratch
        self._forms = [_each(lambda tensor: (tensor.numel(), tensor.dtype), argument) for argument in arguments]
        recording = self._recording()
        nbytes = recording.nbytes + (nbytes if keeps_scratch else 0)
        self._free = deque([recording], max(1, _KEPT_NBYTES // max(nbytes, _LEAST_NBYTES)))

    def _recording(self) -> _Recording:
        return _Recording(self._records, self._forms, self._kernels, self._kept, self._taken)

    def schedules(self, *arguments: Any) -> list[Schedule]:
        """Return the schedules of the parts of a call with contiguous tensors. They run under the lock of the world."""
        try:
            recording = self._free.pop()
        except IndexError:
            recording = self._recording()
        return [recording.schedule(part, arguments, self._pool, self._free) for part in recording.parts]

    def begin(self, calls: PlannedCalls, number: int, *arguments: Any) -> Schedule | None:
        """Begin a call with one part as `PlannedCalls.run` does, but without a generator until the call has to wait."""
        pool, free = self._pool, self._free
        try:
            recording = free.pop()
        except IndexError:
            recording = self._recording()
        (part,) = recording.parts
        key = calls.key(number)
        if calls.early_calls or key in calls.operations:
            return calls.run(recording.schedule(part, arguments, pool, free), number)
        # The usual call has the tensors of the one before, and the recording has nothing to let go of afterwards.
        is_bound = recording.keeps_nothing and recording.addresses == list(map(_address_of, arguments))
        if not is_bound:
            recording.bind(arguments, pool)
        try:
            for done, item in enumerate(part, 1):
                if type(item) is not DirectStep:
                    item.run()
                elif (left := calls.perform(item, key)) is not None:
                    recording.unfinished = 1
                    rest = recording.schedule(part[done:], arguments, pool, free)
                    return calls.run(rest, number, (item, left))
        except BaseException:
            recording.unfinished = 1
            recording.end_part(pool, free)
            raise
        if is_bound:
            free.append(recording)
        else:
            recording.end_part(pool, free)
        return None

    def schedule(self, *arguments: Any) -> Schedule:
        """Return the schedule of a call with one part."""
        (schedule,) = self.schedules(*arguments)
        return schedule


class _Recording:
    """The recorded steps of one call at a time.

    Args:
        kept: Scratch that the recording keeps.
        taken: Scratch that it takes for each call.

    Attributes:
        parts: The steps of each part of the call, and between them what the rank does alone.
        nbytes: Bytes of memory in which it receives, without ``kept``.
    """

    def __init__(
        self,
        records: Sequence[Record],
        forms: Sequence[Any],
        kernels: Arithmetic | None,
        kept: Sequence[Form],
        taken: Sequence[Form],
    ) -> None:
        made = [_each(lambda form: Memory.unbound(*form), form) for form in forms]
        buffers = [Memory.unbound(*form) for form in taken]
        memories = _listed(made) + buffers
        buffers = buffers or [Memory.framed(HEADER_NBYTES, *form) for form in kept]
        # Parts run at the same time, so each has rooms of its own.
        rooms: list[dict[Any, Memory]] = [{} for _ in records]
        self.parts = [
            _prepared(record(*made, *buffers), kernels, own) for record, own in zip(records, rooms, strict=True)
        ]
        self.nbytes = sum(room.nbytes for of_part in rooms for room in of_part.values())
        places = _Places(memories, list(chain(*self.parts)))
        self._places = places.places
        self._read, self._written, self._own = places.read, places.written, places.own
        self._wholes, self._computed = list(places.wholes.items()), list(places.computed.items())
        self._with_tensor = [*places.wholes, *places.computed]
        self._reads_only = [places.reads_only(_listed(argument)) for argument in made]
        self._takes_tensors = not taken and all(isinstance(argument, Memory) for argument in made)
        self.keeps_nothing = self._takes_tensors and not self._with_tensor
        lists = [argument for argument in made if isinstance(argument, list)]
        self._is_nested = not all(isinstance(each, Memory) for each in chain(*lists))
        self.addresses: list[int] = []
        """The addresses of the tensors to which the places belong, or have belonged in the last call."""
        self._copies: list[torch.Tensor] = []
        """Keeps the copies and the scratch of the present call alive, because the places are addresses."""
        self._taken, self._scratch = taken, list[Memory]()
        self.unfinished = 0
        """The number of parts of the present call that have not ended; 0 until the first begins."""

    def schedule(
        self, part: Sequence[Any], arguments: Sequence[Any], pool: Scratch, free: deque[_Recording]
    ) -> Schedule:
        """Return the schedule of a part. After the last part the recording is in ``free``, unless the call has failed."""
        if not self.unfinished:
            self.bind(arguments, pool)
        try:
            for item in part:
                if type(item) is DirectStep:
                    yield item
                else:
                    item.run()
        finally:
            self.end_part(pool, free)

    def end_part(self, pool: Scratch, free: deque[_Recording]) -> None:
        """Let go of the tensors and the scratch after the last part."""
        self.unfinished -= 1
        if not self.unfinished:
            for place in self._with_tensor:
                del place.tensor
            if self._copies:
                for memory in self._scratch:
                    pool.give(memory)
                self._copies, self._scratch = [], []
            free.append(self)

    def bind(self, arguments: Sequence[Any], pool: Scratch) -> None:
        """Let the places belong to the tensors of a call."""
        tensors = arguments
        if not self._takes_tensors:
            tensors = []
            for argument in arguments:
                if type(argument) is list:
                    # `_listed` takes a Python frame for each value.
                    tensors += _listed(argument) if self._is_nested else argument
                elif argument is not None:
                    tensors.append(argument)
            if self._taken:
                self._scratch = [pool.take(*form) for form in self._taken]
                tensors += [memory.tensor for memory in self._scratch]
                self._copies = tensors
        addresses = list(map(_address_of, tensors))
        if addresses != self.addresses:
            if self._read and overlapping_inputs(_at(addresses, self._read), _at(addresses, self._written), self._own):
                copied = [
                    _each(torch.clone, argument) if reads_only else argument
                    for argument, reads_only in zip(arguments, self._reads_only, strict=True)
                ]
                copies = _listed(copied)
                tensors = self._copies = [*copies, *tensors[len(copies) :]]
                addresses = list(map(_address_of, tensors))
            # An error, such as exhausted memory, leaves no places of two calls.
            self.addresses = []
            for place, number, start in self._places:
                place.view = view_at(addresses[number] + start, place.nbytes)
            self.addresses = addresses
        for memory, number in self._wholes:
            tensor = tensors[number]
            if tensor.is_inference():
                tensor = outside_inference_mode(tensor)
            is_flat = tensor.dim() == 1 and tensor.stride(0) == 1
            memory.tensor = tensor if is_flat else tensor.as_strided((memory.count,), (1,))
        for place, (memory, start) in self._computed:
            place.tensor = memory.tensor[start : start + place.count]
        self.unfinished = len(self.parts)


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
    if isinstance(item, _ArrayFold):
        return [_PlaceUse(item.place, True, False), _PlaceUse(item.other, False, False)]
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


def _prepared(recording: Recording, kernels: Arithmetic | None, rooms: dict[Any, Memory]) -> list[Any]:
    """Return the items of a part in the form in which `RecordedCall` runs them.

    A Reduce of few elements becomes a Recv and a fold as arrays. ``rooms`` gets the memory between them: what a step has
    received is folded before the next step, which may receive in the same memory.
    """
    items: list[Any] = []
    for item in recording:
        if isinstance(item, LocalCopy | LocalDivision):
            items.append(item)
            continue
        assert not isinstance(item, int), "a recording does not wait"
        if kernels is not None and len(item) == 1 and isinstance(item[0], Combine):
            items.append(_fold(item[0], kernels))
            continue
        actions, folds = list[Any](item), list[_Fold | _ArrayFold]()
        for at, action in enumerate(item):
            if kernels is not None and isinstance(action, Reduce) and _array_kernel(action.place, kernels):
                form = action.place.count, action.place.dtype
                room = rooms[form, at] = rooms.get((form, at)) or Memory.framed(HEADER_NBYTES, *form)
                actions[at] = Recv(action.peer, room)
                folds.append(_fold(Combine(action.place, room, swapped=False), kernels))
        items += [DirectStep(actions), *folds]
    return items


def _array_kernel(place: Memory, kernels: Arithmetic) -> tuple[Any, Any] | None:
    """Return the function and the dtype with which numpy folds into a place; None if it takes longer than torch."""
    arrays = on_arrays(kernels._replace(averages=False), place.dtype)
    if arrays is None or place.wire is not None or not 0 < place.nbytes <= MOST_ARRAY_NBYTES:
        return None
    return arrays[0].combine, arrays[1]


def _fold(action: Combine, kernels: Arithmetic) -> _Fold | _ArrayFold:
    arrays = _array_kernel(action.place, kernels)
    return _Fold(action, kernels.fold) if arrays is None else _ArrayFold(action, *arrays)


def _each(function: Callable[[Any], Any], argument: Any) -> Any:
    """Apply a function to a value, or to each value in nested lists; return None for None."""
    if isinstance(argument, list):
        return [_each(function, each) for each in argument]
    return None if argument is None else function(argument)


def _listed(argument: Any) -> list[Any]:
    """Return the values of an argument in one list: itself, those in nested lists, or nothing for None."""
    if isinstance(argument, list):
        return [value for each in argument for value in _listed(each)]
    return [] if argument is None else [argument]


def recorded_blocks(argument: Any, counts: Sequence[int]) -> list[Memory] | TensorBlocks:
    """Return the blocks of an argument of a `RecordedCall`: a list of memories, or one memory with blocks of ``counts``."""
    return argument if isinstance(argument, list) else TensorBlocks(argument, [0, *accumulate(counts)])
