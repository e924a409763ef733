"""Plans of point-to-point operations on tensors, and of all operations on Python objects.

The receiver of an object does not know its size. A plan therefore exchanges the sizes of the packed objects first, and then
their bytes. The content of long tensors, arrays and bytes follows, from and to the memory in which it lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, MutableSequence, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncdist.base.ops import Collective
from asyncdist.errors import UsageError
from asyncdist.kernel.algorithms import pairwise, ring, tree
from asyncdist.kernel.algorithms.schedule import Recv, Schedule, Send
from asyncdist.kernel.collectives.arguments import list_of
from asyncdist.kernel.collectives.group_context import GroupContext
from asyncdist.kernel.collectives.validation import check_length
from asyncdist.kernel.engine.operation import Plan, RecvAny
from asyncdist.kernel.memory.buffers import NOTHING, Memory, OutputTensor, dtype_number, input_memory
from asyncdist.kernel.memory.serialization import Beside, copy_of, pack, unpack
from asyncdist.kernel.transport.wire_format import Fingerprint

ReceivingSchedule = Generator[Any, Any, None]
"""A schedule that may also yield `RecvAny`; the engine sends the global rank of the sender into the generator."""

# -- tensors between two ranks --------------------------------------------------------------------


def _transfer(dtype: torch.dtype, count: int) -> int:
    """Return the fingerprint of a transfer, which is the same for the send and the receive."""
    return Fingerprint(Collective.send, dtype=dtype_number(dtype), count=count & 0xFFFFFF).pack()


def send(group: GroupContext, tensor: Any, destination: int) -> Plan:
    """Send a tensor to a member of the group."""
    group.other(destination, "dst")
    memory = input_memory(tensor)

    def part() -> Schedule:
        yield (Send(destination, memory),)

    return Plan((part(),), _transfer(memory.dtype, memory.count), nbytes=memory.nbytes, peer=destination)


def receive(group: GroupContext, tensor: Any, source: int | None, members: Sequence[int]) -> Plan:
    """Receive into a tensor from a member, or from any (None); the result is the sender's global rank."""
    if source is not None:
        group.other(source, "src")
    target = OutputTensor(tensor)
    memory = target.memory
    sender: int | None = None if source is None else members[source]

    def part() -> ReceivingSchedule:
        nonlocal sender
        if source is None:
            sender = yield (RecvAny(memory),)
        else:
            yield (Recv(source, memory),)

    def finish() -> int | None:
        target.store()
        return sender

    return Plan(
        (part(),), _transfer(memory.dtype, memory.count), None, finish, nbytes=memory.nbytes, peer=source,
        only_receives=True,
    )  # fmt: skip


# -- objects --------------------------------------------------------------------------------------


class _Parcel:
    """An object on its way.

    Attributes:
        sizes: The bytes of the head, and the number of buffers.
        head: The bytes of each buffer, and the packed object.
        buffers: The long content of the object.
        is_own: Whether this rank has packed the object, which therefore need not arrive.
    """

    is_own = False

    def __init__(self) -> None:
        self.sizes = Memory(torch.zeros(2, dtype=torch.int64, device="cpu"))
        self.head = NOTHING
        self.buffers: list[Memory] = []

    @classmethod
    def of(cls, group: GroupContext, value: Any, weights_only: bool) -> _Parcel:
        """Pack an object. Its long content must not change until it has been sent."""
        beside = Beside()
        data = pack(value, allow_pickle=group.config.allow_pickle, weights_only=weights_only, beside=beside)
        parcel = cls()
        parcel.is_own = True
        for view in beside.buffers:
            memory = Memory.unbound(view.nbytes, torch.uint8)
            memory.view = view
            parcel.buffers.append(memory)
        lengths = np.array([memory.nbytes for memory in parcel.buffers], np.int64).tobytes()
        parcel.head = Memory(torch.frombuffer(bytearray().join((lengths, data)), dtype=torch.uint8))
        parcel.sizes.tensor[0], parcel.sizes.tensor[1] = parcel.head.count, len(parcel.buffers)
        return parcel

    def expect_head(self) -> None:
        """Allocate the head, unless this is the rank's own object: the sizes have arrived."""
        if not self.is_own:
            self.head = _blob(int(self.sizes.tensor[0]))

    def expect_buffers(self) -> None:
        """Allocate the buffers, unless this is the rank's own object: the head has arrived."""
        if not self.is_own:
            self.buffers = [_blob(int(nbytes)) for nbytes in self._lengths]

    @property
    def _lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.frombuffer(self.head.view, np.int64, int(self.sizes.tensor[1]))

    def value(self, group: GroupContext, weights_only: bool) -> Any:
        """Return the object. It shares its memory with the buffers, unless it is this rank's own."""
        return unpack(
            self.head.view[self._lengths.nbytes :],
            allow_pickle=group.config.allow_pickle,
            weights_only=weights_only,
            beside=[copy_of(memory.view) if self.is_own else memory.view for memory in self.buffers],
        )


def _blob(nbytes: int) -> Memory:
    return Memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def _check_list(name: str, output: object) -> None:
    """Raise UsageError if ``output`` is given and cannot receive objects."""
    if output is not None and not isinstance(output, MutableSequence):
        raise UsageError(f"{name} is a list, into which the received objects are written, not {output!r}")


Move = Callable[[Sequence[Any]], Schedule]
"""Moves one memory of each parcel; None stands for one that a parcel does not have."""


def _object_plan(
    collective: Collective,
    parcels: Sequence[_Parcel],
    move: Move,
    finish: Callable[[], Any],
    root: int | None = None,
    *,
    move_sizes: Move | None = None,
    absent: Memory | None = None,
) -> Plan:
    """Move the parcels: their sizes, their heads, the first buffer of each, then the second, and so on."""

    def part() -> Schedule:
        yield from (move_sizes or move)([parcel.sizes for parcel in parcels])
        for parcel in parcels:
            parcel.expect_head()
        yield from move([parcel.head for parcel in parcels])
        for parcel in parcels:
            parcel.expect_buffers()
        for buffers in itertools.zip_longest(*[parcel.buffers for parcel in parcels], fillvalue=absent):
            yield from move(buffers)

    fingerprint = Fingerprint(collective, root=0 if root is None else root + 1).pack()
    return Plan((part(),), fingerprint, None, finish)


def all_gather_object(group: GroupContext, output: list[Any], value: Any, weights_only: bool) -> Plan:
    """Gather every rank's object into every rank's list."""
    _check_list("the output list", output)
    check_length(output, group.size, "the output list")
    parcels = [_Parcel() for _ in range(group.size)]
    parcels[group.rank] = _Parcel.of(group, value, weights_only)

    def finish() -> Any:
        output[:] = [parcel.value(group, weights_only) for parcel in parcels]
        return output

    return _object_plan(
        Collective.all_gather_object, parcels, partial(ring.all_gather, group.rank, group.size), finish,
        move_sizes=partial(pairwise.all_gather, group.rank, group.size), absent=NOTHING,
    )  # fmt: skip


def gather_object(group: GroupContext, value: Any, output: list[Any] | None, root: int, weights_only: bool) -> Plan:
    """Gather every rank's object into the root's list."""
    at_root = group.rank == group.peer(root, "dst")
    if at_root:
        _check_list("object_gather_list", output)
        check_length(output, group.size, "object_gather_list on the destination rank")
    parcels = [_Parcel() for _ in range(group.size if at_root else 1)]
    parcels[root if at_root else 0] = _Parcel.of(group, value, weights_only)

    def finish() -> Any:
        if at_root and output is not None:
            output[:] = [parcel.value(group, weights_only) for parcel in parcels]
        return output

    def move(memories: Sequence[Any]) -> Schedule:
        return pairwise.gather(group.rank, group.size, root, memories[0], memories)

    return _object_plan(Collective.gather_object, parcels, move, finish, root)


def scatter_objects(
    group: GroupContext, output: list[Any], values: Sequence[Any] | None, root: int, weights_only: bool
) -> Plan:
    """Give each rank its object of the root's list, as the first element of ``output``."""
    group.peer(root, "src")
    _check_list("scatter_object_output_list", output)
    if not output:
        raise UsageError("scatter_object_output_list needs room for one object: pass a list of length 1 or more")
    parcels, own = [_Parcel()], 0
    if group.rank == root:
        check_length(values, group.size, "scatter_object_input_list on the source rank")
        parcels, own = [_Parcel.of(group, value, weights_only) for value in values or ()], root

    def finish() -> Any:
        output[0] = parcels[own].value(group, weights_only)
        return output

    def move(memories: Sequence[Any]) -> Schedule:
        return pairwise.scatter(group.rank, group.size, root, memories[0], memories)

    return _object_plan(Collective.scatter_object_list, parcels, move, finish, root)


def broadcast_objects(group: GroupContext, values: list[Any], root: int, weights_only: bool) -> Plan:
    """Replace every rank's list of objects by the root's; all lists have one length."""
    group.peer(root, "src")
    _check_list("object_list", values)
    at_root = group.rank == root
    parcel = _Parcel.of(group, list(values), weights_only) if at_root else _Parcel()

    def finish() -> Any:
        if not at_root:
            objects = parcel.value(group, weights_only)
            if len(objects) != len(values):
                raise UsageError(
                    f"rank {root} broadcasts {len(objects)} objects, but this rank's list has {len(values)}"
                )
            values[:] = objects
        return values

    def move(memories: Sequence[Any]) -> Schedule:
        return tree.broadcast(group.rank, group.size, root, memories[0])

    return _object_plan(Collective.broadcast_object_list, [parcel], move, finish, root)


# Each part is one step, so that concurrent messages with one tag keep their order.
_MESSAGE = Fingerprint(Collective.send).pack()


def send_objects(group: GroupContext, values: Sequence[Any], destination: int, weights_only: bool) -> Plan:
    """Send a list of objects to a member of the group."""
    group.other(destination, "dst")
    parcel = _Parcel.of(group, list_of("object_list", values, "objects"), weights_only)

    def part(*memories: Memory) -> Schedule:
        if memories:
            yield tuple(Send(destination, memory) for memory in memories)

    parts = part(parcel.sizes), part(parcel.head), part(*parcel.buffers)
    return Plan(parts, _MESSAGE, peer=destination)


def receive_objects(
    group: GroupContext, values: list[Any], source: int | None, members: Sequence[int], weights_only: bool
) -> Plan:
    """Receive a list of objects from a member, or from any; the result is the sender's global rank."""
    if source is not None:
        group.other(source, "src")
    _check_list("object_list", values)
    parcel = _Parcel()
    sender = -1 if source is None else members[source]

    def sizes_part() -> ReceivingSchedule:
        nonlocal sender
        if source is None:
            sender = yield (RecvAny(parcel.sizes),)
        else:
            yield (Recv(source, parcel.sizes),)

    def head_part() -> Schedule:
        parcel.expect_head()
        yield (Recv(members.index(sender), parcel.head),)

    def buffers_part() -> Schedule:
        parcel.expect_buffers()
        if parcel.buffers:
            yield tuple(Recv(members.index(sender), buffer) for buffer in parcel.buffers)

    def finish() -> int:
        objects = parcel.value(group, weights_only)
        if len(objects) != len(values):
            raise UsageError(
                f"rank {sender} sent {len(objects)} objects, but the list to receive into has {len(values)}"
            )
        values[:] = objects
        return sender

    parts = sizes_part(), head_part(), buffers_part()
    return Plan(parts, _MESSAGE, None, finish, window=1, peer=source, only_receives=True)
