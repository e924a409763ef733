"""Collectives of ranks that map one another's device memory (CUDA IPC): each rank reads and writes its peers' tensors.

Every collective exchanges data on the host twice, with the device work between:

    ready     each rank publishes where its tensors are, and records an event unless its stream is idle; the ranks that
              use these tensors then wait for the event
    done      each rank that has used tensors of others records its second event; the owners wait for it, after which no
              other rank uses their tensors any more

The host waits for the events of other processes, and no stream does: an event of a process that was killed never passes,
and a stream that waits for it could not be freed any more. The events are interprocess events, one for each of the two
steps. An event is recorded again only after all ranks have waited for the last record, which the exchange between the two
guarantees. Small tensors go through pinned host memory instead: where ranks share a device, the device would have to change
between the processes twice, and each change takes more than 0.1 ms. For the same reason no event is recorded that no rank
needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from asyncdist.base.ops import Collective
from asyncdist.errors import MismatchError, TransportUnavailableError
from asyncdist.kernel.memory.buffers import Memory, TensorBlocks
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.kernel.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.kernel.transport.device_loans import DeviceLoans
from asyncdist.kernel.transport.device_p2p import DeviceP2P, TransferRefused
from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams, passes
from asyncdist.kernel.transport.native import CallSignature
from asyncdist_transports.cuda_ipc.driver import Driver
from asyncdist_transports.cuda_ipc.handles import EXPORTED_NBYTES, ExportedMemory
from asyncdist_transports.cuda_ipc.loans import CudaIpcLoans
from asyncdist_transports.cuda_ipc.p2p import CudaIpcP2P
from asyncdist_transports.cuda_ipc.peer_memory import PeerMemory
from asyncdist_transports.staged import Staged

_SMALL_NBYTES = 64 << 10
# Fingerprint of the call, and whether the ready event was recorded.
_HEAD = struct.Struct("<Q?")

Views = dict[int, list[torch.Tensor]]
"""The tensors that each rank publishes in a call, flat, by rank."""


class CudaIpc(DeviceCollectives):
    """Collectives of ranks on one host whose devices can access one another's memory; several ranks may share a device."""

    name: ClassVar[str] = "cuda_ipc"
    preference: ClassVar[int] = 30
    make_driver: ClassVar[Callable[[torch.device], Driver]] = Driver

    def __init__(self, context: DeviceContext) -> None:
        super().__init__(context)
        self._driver = type(self).make_driver(context.streams.device)
        self._memory = PeerMemory(self._driver, context.streams)
        self._ready, self._ready_handle = self._driver.event()
        self._done, self._done_handle = self._driver.event()
        self._peer_events: dict[int, tuple[Any, Any]] = {}
        self._staged = Staged(context)

    @classmethod
    def probe(cls) -> str | None:
        return Driver.missing()

    @classmethod
    def make_p2p(cls, context: DeviceContext) -> DeviceP2P:
        return CudaIpcP2P(context, cls.make_driver(context.streams.device))

    @classmethod
    def make_loans(cls, streams: Streams) -> DeviceLoans:
        return CudaIpcLoans(streams, cls.make_driver(streams.device))

    # -- negotiation ---------------------------------------------------------------------------

    def capabilities(self) -> Mapping[str, Any]:
        return {
            "machine": self.context.machine,
            "ready": self._ready_handle,
            "done": self._done_handle,
            "probe": self._memory.probe,
        }

    def refusal(self, all_capabilities: Sequence[Mapping[str, Any]]) -> str | None:
        for rank, capabilities in enumerate(all_capabilities):
            if capabilities["machine"] != all_capabilities[0]["machine"]:
                return f"rank {rank} is on another host than rank 0"
        return None

    def start(self, all_capabilities: Sequence[Mapping[str, Any]]) -> None:
        for rank in self.context.others:
            capabilities = all_capabilities[rank]
            try:
                self._peer_events[rank] = (
                    self._driver.event_of(capabilities["ready"]),
                    self._driver.event_of(capabilities["done"]),
                )
                self._memory.verify(rank, capabilities["probe"])
            except (RuntimeError, TransferRefused) as cause:
                raise TransportUnavailableError(f"the memory of rank {rank} cannot be used: {cause}") from cause

    def close(self) -> None:
        self._memory.close((self._ready, self._done))

    # -- the choice of the path ----------------------------------------------------------------

    def run(self, signature: CallSignature, *tensors: Any) -> None:
        if self._prefers_host(signature):
            self._staged.run(signature, *tensors)
        else:
            super().run(signature, *tensors)

    def _prefers_host(self, signature: CallSignature) -> bool:
        """Return whether a call runs on the host. Depends only on what is the same on all ranks."""
        # Only pairs of ranks know the sizes of an all_to_all. A barrier also orders the streams.
        if signature.collective in (Collective.all_to_all, Collective.barrier):
            return False
        count = sum(signature.sizes) or signature.count
        if signature.collective in (Collective.reduce_scatter, Collective.all_gather) and not signature.sizes:
            count *= self.context.size
        return count * signature.dtype.itemsize <= _SMALL_NBYTES

    # -- the two exchanges ---------------------------------------------------------------------

    def _exchange_views(self, fingerprint: int, tensors: Sequence[torch.Tensor]) -> Views:
        """Exchange the ready events; return the published tensors by rank. All ranks publish the same number of tensors.

        A rank that publishes nothing but empty tensors needs not be waited for.
        """
        exported = [self._memory.exports.export(tensor, slot) for slot, tensor in enumerate(tensors)]
        streams = self.context.streams
        has_work = not streams.is_idle()
        if has_work:
            streams.record_event(self._ready)
        payload = _HEAD.pack(fingerprint, has_work) + b"".join(location.pack() for _, location in exported)
        gathered = self.context.all_gather_bytes(payload)
        views = {self.context.rank: [tensor for tensor, _ in exported]}
        for rank in self.context.others:
            peer_fingerprint, peer_has_work = _HEAD.unpack_from(gathered[rank])
            if peer_fingerprint != fingerprint:
                raise self.context.mismatch_error(rank, fingerprint, peer_fingerprint)
            if peer_has_work:
                self._wait_for(self._peer_events[rank][0])
            views[rank] = [self._view(rank, location, tensors[0].dtype) for location in _split(gathered[rank])]
        return views

    def _view(self, rank: int, location: ExportedMemory, dtype: torch.dtype) -> torch.Tensor:
        if not location.nbytes:
            return torch.empty(0, dtype=dtype, device=self.context.streams.device)
        return self._memory.imports.open(rank, location).view(dtype)

    def _finish(self, users: Sequence[int] | None = None, owners: Sequence[int] | None = None) -> None:
        """Exchange the done events, when all work of this rank is enqueued. The owners wait for them.

        Args:
            users: The ranks that have used tensors of others; None for all ranks.
            owners: The ranks whose tensors others have used; None for all ranks.
        """
        own_rank = self.context.rank
        if users is None or own_rank in users:
            self.context.streams.record_event(self._done)
        self.context.barrier()
        if owners is None or own_rank in owners:
            for rank in self.context.others if users is None else users:
                if rank != own_rank:
                    self._wait_for(self._peer_events[rank][1])

    def _wait_for(self, event: DeviceEvent) -> None:
        """Wait until the device of another rank has passed its event, or the group has failed."""
        host = self.context.host
        if not passes(event, lambda: host.error is not None):
            assert host.error is not None
            raise host.error

    def _all_but(self, root: int) -> list[int]:
        return [rank for rank in range(self.context.size) if rank != root]

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], kernels: Arithmetic) -> None:
        """Each rank reduces its block of all ranks' tensors, and writes the result into all of them."""
        tensors = [memory.tensor for memory in memories]
        views = self._exchange_views(fingerprint, tensors)
        for place in range(len(memories)):
            parts = {rank: TensorBlocks.split(Memory(views[rank][place]), self.context.size) for rank in views}
            blocks = {rank: parts[rank][self.context.rank].tensor for rank in parts}
            own = blocks[self.context.rank]
            self._reduce(kernels, own, [blocks[rank] for rank in self.context.others], own)
            for rank in self.context.others:
                blocks[rank].copy_(own)
        self._finish()
        # Peers have written their results into copies where this rank could not export the tensor itself.
        for published, tensor in zip(views[self.context.rank], tensors, strict=True):
            if published is not tensor:
                tensor.copy_(published)

    def reduce(self, fingerprint: int, memory: Memory, root: int, kernels: Arithmetic) -> None:
        views = self._exchange_views(fingerprint, [memory.tensor])
        if self.context.rank == root:
            self._reduce(kernels, memory.tensor, [views[rank][0] for rank in self.context.others], memory.tensor)
        self._finish(users=[root], owners=self._all_but(root))

    def reduce_scatter(self, fingerprint: int, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic) -> None:
        views = self._exchange_views(fingerprint, [block.tensor for block in inputs])
        own_rank = self.context.rank
        others = [views[rank][own_rank] for rank in self.context.others]
        self._reduce(kernels, inputs[own_rank].tensor, others, own.tensor)
        self._finish()

    def _reduce(
        self, kernels: Arithmetic, own: torch.Tensor, others: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Reduce ``own`` and ``others`` into ``out``, which may be ``own``; tensors of other devices are copied here."""
        kernels.reduce([own, *(other.to(own.device, non_blocking=True) for other in others)], out)

    # -- data movement ------------------------------------------------------------------------------

    def broadcast(self, fingerprint: int, memory: Memory, root: int) -> None:
        is_root = self.context.rank == root
        views = self._exchange_views(fingerprint, [memory.tensor if is_root else memory.tensor[:0]])
        if not is_root:
            memory.tensor.copy_(views[root][0])
        self._finish(users=self._all_but(root), owners=[root])

    def all_gather(self, fingerprint: int, rows: Sequence[tuple[Sequence[Memory], Memory]]) -> None:
        views = self._exchange_views(fingerprint, [own.tensor for _, own in rows])
        for place, (blocks, own) in enumerate(rows):
            own_block = blocks[self.context.rank].tensor
            if own_block.data_ptr() != own.tensor.data_ptr():
                own_block.copy_(own.tensor)
            for rank in self.context.others:
                blocks[rank].tensor.copy_(views[rank][place])
        self._finish()

    def gather(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        views = self._exchange_views(fingerprint, [own.tensor])
        if self.context.rank == root:
            for rank in self.context.others:
                blocks[rank].tensor.copy_(views[rank][0])
        self._finish(users=[root], owners=self._all_but(root))

    def scatter(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        is_root = self.context.rank == root
        published = [blocks[rank].tensor if is_root else own.tensor[:0] for rank in range(self.context.size)]
        views = self._exchange_views(fingerprint, published)
        if not is_root:
            own.tensor.copy_(views[root][self.context.rank])
        self._finish(users=self._all_but(root), owners=[root])

    def all_to_all(self, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> None:
        views = self._exchange_views(fingerprint, [memory.tensor for memory in outgoing])
        for rank in self.context.others:
            sent, block = views[rank][self.context.rank], incoming[rank].tensor
            if sent.numel() != block.numel():
                peer = self.context.host.member_ids[rank]
                raise MismatchError(peer, f"rank {peer} sent {sent.nbytes} bytes where {block.nbytes} were expected")
            block.copy_(sent)
        incoming[self.context.rank].tensor.copy_(outgoing[self.context.rank].tensor)
        self._finish()

    def barrier(self, fingerprint: int) -> None:
        """Return when every rank has called this; later work waits until every device has completed its earlier work."""
        self._exchange_views(fingerprint, ())
        self._finish()


def _split(payload: bytes) -> list[ExportedMemory]:
    return [
        ExportedMemory.unpack(payload[at : at + EXPORTED_NBYTES])
        for at in range(_HEAD.size, len(payload), EXPORTED_NBYTES)
    ]
