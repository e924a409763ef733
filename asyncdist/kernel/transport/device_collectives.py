"""The contract of a device backend: whole collectives, enqueued on a device stream.

`asyncdist.kernel.devices` creates one `DeviceCollectives` on every rank of a group, for one device of each rank. Every rank
publishes its *capabilities*; from those of all ranks, each rank computes whether they fit together (`refusal`, the same
answer everywhere). The backend is then started on every rank or on none.

Each collective is a method. It enqueues its work on the device and returns. It never waits for the device, but may block
the host until the peers have made the same call. It is called within ``streams.on_comm_stream()``, in issue order, on the
executor's thread or the calling thread.

To write a backend, implement `DeviceCollectives`, and register the class under the entry-point group
``asyncdist.device_backends``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from asyncdist.base.ops import Collective
from asyncdist.kernel.memory.buffers import Memory, block_memories, copy_overlapping_inputs, flat_memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams
from asyncdist.kernel.transport.host_group import HostGroup, HostWork
from asyncdist.kernel.transport.native import CallSignature, all_gather_rows
from asyncdist.net.network import machine_name

if TYPE_CHECKING:
    from asyncdist.kernel.transport.device_loans import DeviceLoans
    from asyncdist.kernel.transport.device_p2p import DeviceP2P

Capabilities = Mapping[str, Any]


class _Gather:
    """The tensors of the gathers of payloads of one length, and views of their memory."""

    def __init__(self, nbytes: int, size: int) -> None:
        self.own = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.all = torch.empty(size * nbytes, dtype=torch.uint8, device="cpu")
        self.own_view = Memory(self.own).view
        self.views = [Memory(part).view for part in self.all.split(nbytes)]


class DeviceContext:
    """The group of a backend: the ranks, this rank's device, and the CPU group for control traffic.

    Attributes:
        host: CPU group with the same ranks.
        streams: The device and the group's communication stream.
        others: All ranks in the group but this one.
        deadline: Monotonic time at which the current call, or the start of the backend, times out.
        inherited: By backend name, the objects that a larger group has split off for this one.
        when_passed: Returns a work that completes when the device has passed an event. Only point-to-point backends have
            it: collectives wait.
    """

    when_passed: Callable[[DeviceEvent], HostWork]

    def __init__(self, host: HostGroup, streams: Streams) -> None:
        self.host = host
        self.streams = streams
        self.rank = host.rank()
        self.size = host.size()
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.deadline = math.inf
        self.inherited: dict[str, Any] = {}
        self._gathers: dict[int, _Gather] = {}

    @property
    def machine(self) -> str:
        """Name of the machine that this rank runs on."""
        return self.host.endpoint.config.host or machine_name()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; at least 0."""
        return max(0.0, self.deadline - monotonic())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather an object (plain data) from every rank, and return them by rank. Blocks; raises GroupError."""
        gathered: list[Any] = [None] * self.size
        self.host.all_gather_object(gathered, value, background=False, timeout=self.remaining).result()
        return gathered

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gather payloads of equal length from all ranks, and return them by rank. Blocks; raises GroupError."""
        gather = self._gathers.get(len(payload))
        if gather is None:
            gather = self._gathers[len(payload)] = _Gather(len(payload), self.size)
        gather.own_view[:] = payload
        self.host.all_gather_single(gather.all, gather.own, background=False, timeout=self.remaining).result()
        return list(map(bytes, gather.views))

    def mismatch_error(self, rank: int, own: int, other: int) -> Exception:
        """Return the error to raise if the fingerprint of ``rank``'s call differs from this rank's."""
        return self.host.endpoint.difference(self.host.member_ids[rank], own, other)

    def barrier(self) -> None:
        """Block until every rank has called this. Raises GroupError."""
        self.host.barrier(background=False, timeout=self.remaining).result()


class DeviceCollectives(ABC):
    """One rank's part of a device backend.

    Attributes:
        name: The name by which users select the backend.
        preference: The backend with the highest preference that all ranks support is chosen.
        blocks: Whether a collective may block the host until the peers make the same call.
        compares: Whether the backend raises an error on ranks whose calls differ.
    """

    name: ClassVar[str]
    preference: ClassVar[int] = 0
    blocks: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    def __init__(self, context: DeviceContext) -> None:
        self.context = context

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """Return None if this process can use the backend, else the reason."""

    @classmethod
    def make_p2p(cls, context: DeviceContext) -> DeviceP2P | None:
        """Return this rank's point-to-point part, or None if the backend has none. Must not communicate."""
        return None

    @classmethod
    def make_loans(cls, streams: Streams) -> DeviceLoans | None:
        """Return the loans of one device to and from processes in no common group, or None if the backend has none."""
        return None

    # -- start -----------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """Return this rank's properties for the other ranks, as plain data."""
        return {}

    def refusal(self, all_capabilities: Sequence[Capabilities]) -> str | None:
        """Return why these ranks cannot use the backend; None if they can. Must depend on the argument alone."""
        return None

    def start(self, all_capabilities: Sequence[Capabilities]) -> None:  # noqa: B027 - optional
        """Connect to the other ranks. Blocks; raises an error that says why the backend cannot be used."""

    # -- use -------------------------------------------------------------------------------

    def async_error(self) -> Exception | None:
        """Return a failure that no call has reported yet, else None. Called periodically, from any thread."""
        return None

    def split(self, context: DeviceContext | None, number: int) -> None:
        """Put the objects that a subgroup can share with this group into the ``inherited`` of the subgroup's context.

        Called on all ranks, in issue order; may block. The shared object needs a ``close`` method.

        Args:
            context: Context of the subgroup that this rank belongs to; None if it belongs to none.
            number: Number of that subgroup; -1 if this rank belongs to none.
        """
        return

    def abort(self) -> None:  # noqa: B027 - a backend whose streams wait for no peer has nothing to do
        """End the device's waits for peers, because the group has failed. Never blocks."""

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources. Called once, after the last collective."""

    # -- collectives ---------------------------------------------------------------------------
    # Input memory overlaps no output memory (see `copy_overlapping_inputs`), except that a rank's own block may be both.
    # ``fingerprint`` identifies the call of this rank.

    def run(self, signature: CallSignature, *tensors: Any) -> None:
        """Run one collective by its method below. ``tensors`` are those of a `PreparedCall`; they may overlap."""
        call, root, rank, size = signature.fingerprint, signature.root, self.context.rank, self.context.size
        match signature.collective:
            case Collective.all_reduce:
                self.all_reduce(call, [flat_memory(tensors[0])], signature.arithmetic)
            case Collective.all_reduce_coalesced:
                self.all_reduce(call, [flat_memory(tensor) for tensor in tensors[0]], signature.arithmetic)
            case Collective.reduce:
                self.reduce(call, flat_memory(tensors[0]), root, signature.arithmetic)
            case Collective.reduce_scatter:
                own = flat_memory(tensors[0])
                inputs = copy_overlapping_inputs(block_memories(tensors[1], size), [own], {rank: 0})
                self.reduce_scatter(call, inputs, own, signature.arithmetic)
            case Collective.broadcast:
                self.broadcast(call, flat_memory(tensors[0]), root)
            case Collective.all_gather | Collective.all_gather_coalesced:
                self.all_gather(call, all_gather_rows(signature, tensors[0], tensors[1], size, rank))
            case Collective.gather:
                own, blocks = flat_memory(tensors[1]), block_memories(tensors[0], size)
                if rank == root:
                    (own,) = copy_overlapping_inputs([own], blocks, {0: root})
                    blocks[root].tensor.copy_(own.tensor)
                self.gather(call, own, blocks, root)
            case Collective.scatter:
                own, blocks = flat_memory(tensors[0]), block_memories(tensors[1], size)
                if rank == root:
                    blocks = copy_overlapping_inputs(blocks, [own], {root: 0})
                    own.tensor.copy_(blocks[root].tensor)
                self.scatter(call, own, blocks, root)
            case Collective.all_to_all:
                incoming = block_memories(tensors[0], size)
                outgoing = copy_overlapping_inputs(block_memories(tensors[1], size), incoming, {rank: rank})
                self.all_to_all(call, incoming, outgoing)
            case _:
                self.barrier(call)

    @abstractmethod
    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], kernels: Arithmetic) -> None:
        """Reduce each memory over the members, in place, the same bits on all of them."""

    @abstractmethod
    def reduce(self, fingerprint: int, memory: Memory, root: int, kernels: Arithmetic) -> None:
        """Leave the reduction in the root's memory; the memory of the other members is only read."""

    @abstractmethod
    def reduce_scatter(self, fingerprint: int, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic) -> None:
        """Leave in ``own`` the reduction of all members' ``inputs[rank]``; inputs are only read."""

    @abstractmethod
    def broadcast(self, fingerprint: int, memory: Memory, root: int) -> None:
        """Copy the root's memory to all members."""

    @abstractmethod
    def all_gather(self, fingerprint: int, rows: Sequence[tuple[Sequence[Memory], Memory]]) -> None:
        """Copy, for each row (blocks, own), each member's ``own`` into ``blocks[rank]`` of all members, itself included."""

    @abstractmethod
    def gather(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        """Copy each other member's ``own`` into the root's ``blocks[rank]``; the root's own block is there already."""

    @abstractmethod
    def scatter(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        """Copy the root's ``blocks[rank]`` into each other member's ``own``; the root's ``own`` is there already."""

    @abstractmethod
    def all_to_all(self, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> None:
        """Copy each member's ``outgoing[rank]`` into this rank's ``incoming[member]``, this rank's own included."""

    @abstractmethod
    def barrier(self, fingerprint: int) -> None:
        """Return when every member has called it, or make later device work wait until then."""
