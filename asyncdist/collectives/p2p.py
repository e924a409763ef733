"""Plans of point-to-point operations on tensors, and of all operations on Python objects.

The receiver of an object does not know its size. A plan therefore exchanges the sizes of the serialized objects first, and
then their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, MutableSequence, Sequence
from typing import Any

import torch

from asyncdist.algorithms import pairwise, ring, tree
from asyncdist.algorithms.schedule import Recv, Schedule, Send
from asyncdist.base.ops import Collective
from asyncdist.collectives.arguments import list_of
from asyncdist.collectives.group_context import GroupContext
from asyncdist.collectives.validation import check_length
from asyncdist.engine.operation import Plan, RecvAny
from asyncdist.errors import UsageError
from asyncdist.memory.buffers import Memory, OutputTensor, TensorBlocks, dtype_number, input_memory
from asyncdist.memory.serialization import pack, unpack
from asyncdist.transport.wire_format import Fingerprint

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


def _number(value: int = 0) -> Memory:
    return Memory(torch.tensor([value], dtype=torch.int64, device="cpu"))


def _blob(nbytes: int) -> Memory:
    return Memory(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def _packed(group: GroupContext, value: Any, weights_only: bool) -> Memory:
    data = pack(value, allow_pickle=group.config.allow_pickle, weights_only=weights_only)
    return Memory(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _unpacked(group: GroupContext, memory: Memory, weights_only: bool) -> Any:
    return unpack(memory.view, allow_pickle=group.config.allow_pickle, weights_only=weights_only)


def _check_list(name: str, output: object) -> None:
    """Raise UsageError if ``output`` is given and cannot receive objects."""
    if output is not None and not isinstance(output, MutableSequence):
        raise UsageError(f"{name} is a list, into which the received objects are written, not {output!r}")


def _object_plan(
    collective: Collective, part: ReceivingSchedule, finish: Callable[[], Any], root: int | None = None
) -> Plan:
    fingerprint = Fingerprint(collective, root=0 if root is None else root + 1).pack()
    return Plan((part,), fingerprint, None, finish)


def all_gather_object(group: GroupContext, output: list[Any], value: Any, weights_only: bool) -> Plan:
    """Gather every rank's object into every rank's list."""
    _check_list("the output list", output)
    check_length(output, group.size, "the output list")
    blobs: list[Memory] = []
    own = _packed(group, value, weights_only)

    def part() -> Schedule:
        sizes = Memory(torch.zeros(group.size, dtype=torch.int64, device="cpu"))
        sizes.tensor[group.rank] = own.count
        yield from pairwise.all_gather(group.rank, group.size, TensorBlocks.split(sizes, group.size))
        blobs.extend(own if rank == group.rank else _blob(int(n)) for rank, n in enumerate(sizes.tensor))
        yield from ring.all_gather(group.rank, group.size, blobs)

    def finish() -> Any:
        output[:] = [_unpacked(group, blob, weights_only) for blob in blobs]
        return output

    return _object_plan(Collective.all_gather_object, part(), finish)


def gather_object(group: GroupContext, value: Any, output: list[Any] | None, root: int, weights_only: bool) -> Plan:
    """Gather every rank's object into the root's list."""
    at_root = group.rank == group.peer(root, "dst")
    if at_root:
        _check_list("object_gather_list", output)
        check_length(output, group.size, "object_gather_list on the destination rank")
    blobs: list[Memory] = []
    own = _packed(group, value, weights_only)

    def part() -> Schedule:
        sizes = Memory(torch.zeros(group.size, dtype=torch.int64, device="cpu"))
        sizes.tensor[group.rank] = own.count
        yield from pairwise.gather(
            group.rank, group.size, root, _number(own.count), TensorBlocks.split(sizes, group.size)
        )
        if at_root:
            blobs.extend(own if rank == group.rank else _blob(int(n)) for rank, n in enumerate(sizes.tensor))
        yield from pairwise.gather(group.rank, group.size, root, own, blobs)

    def finish() -> Any:
        if at_root and output is not None:
            output[:] = [_unpacked(group, blob, weights_only) for blob in blobs]
        return output

    return _object_plan(Collective.gather_object, part(), finish, root)


def scatter_objects(
    group: GroupContext, output: list[Any], values: Sequence[Any] | None, root: int, weights_only: bool
) -> Plan:
    """Give each rank its object of the root's list, as the first element of ``output``."""
    group.peer(root, "src")
    _check_list("scatter_object_output_list", output)
    if not output:
        raise UsageError("scatter_object_output_list needs room for one object: pass a list of length 1 or more")
    blobs: list[Memory] = []
    if group.rank == root:
        check_length(values, group.size, "scatter_object_input_list on the source rank")
        blobs = [_packed(group, value, weights_only) for value in values or ()]
    own = blobs[root] if blobs else _blob(0)

    def part() -> Schedule:
        nonlocal own
        sizes = Memory(torch.tensor([blob.count for blob in blobs], dtype=torch.int64, device="cpu"))
        size = _number()
        yield from pairwise.scatter(group.rank, group.size, root, size, TensorBlocks.split(sizes, group.size))
        if group.rank != root:
            own = _blob(int(size.tensor[0]))
        yield from pairwise.scatter(group.rank, group.size, root, own, blobs)

    def finish() -> Any:
        output[0] = _unpacked(group, own, weights_only)
        return output

    return _object_plan(Collective.scatter_object_list, part(), finish, root)


def broadcast_objects(group: GroupContext, values: list[Any], root: int, weights_only: bool) -> Plan:
    """Replace every rank's list of objects by the root's; all lists have one length."""
    group.peer(root, "src")
    _check_list("object_list", values)
    blob = _packed(group, list(values), weights_only) if group.rank == root else _blob(0)

    def part() -> Schedule:
        nonlocal blob
        size = _number(blob.count)
        yield from tree.broadcast(group.rank, group.size, root, size)
        if group.rank != root:
            blob = _blob(int(size.tensor[0]))
        yield from tree.broadcast(group.rank, group.size, root, blob)

    def finish() -> Any:
        if group.rank != root:
            objects = _unpacked(group, blob, weights_only)
            if len(objects) != len(values):
                raise UsageError(
                    f"rank {root} broadcasts {len(objects)} objects, but this rank's list has {len(values)}"
                )
            values[:] = objects
        return values

    return _object_plan(Collective.broadcast_object_list, part(), finish, root)


# Sizes and bytes are two parts, so that concurrent messages with one tag keep their order.
_MESSAGE = Fingerprint(Collective.send).pack()


def send_objects(group: GroupContext, values: Sequence[Any], destination: int, weights_only: bool) -> Plan:
    """Send a list of objects to a member of the group."""
    group.other(destination, "dst")
    blob = _packed(group, list_of("object_list", values, "objects"), weights_only)

    def part(memory: Memory) -> Schedule:
        yield (Send(destination, memory),)

    return Plan((part(_number(blob.count)), part(blob)), _MESSAGE, peer=destination)


def receive_objects(
    group: GroupContext, values: list[Any], source: int | None, members: Sequence[int], weights_only: bool
) -> Plan:
    """Receive a list of objects from a member, or from any; the result is the sender's global rank."""
    if source is not None:
        group.other(source, "src")
    _check_list("object_list", values)
    size, blob = _number(), _blob(0)
    sender = -1 if source is None else members[source]

    def size_part() -> ReceivingSchedule:
        nonlocal sender
        if source is None:
            sender = yield (RecvAny(size),)
        else:
            yield (Recv(source, size),)

    def blob_part() -> Schedule:
        nonlocal blob
        blob = _blob(int(size.tensor[0]))
        yield (Recv(members.index(sender), blob),)

    def finish() -> int:
        objects = _unpacked(group, blob, weights_only)
        if len(objects) != len(values):
            raise UsageError(
                f"rank {sender} sent {len(objects)} objects, but the list to receive into has {len(values)}"
            )
        values[:] = objects
        return sender

    return Plan((size_part(), blob_part()), _MESSAGE, None, finish, window=1, peer=source, only_receives=True)
