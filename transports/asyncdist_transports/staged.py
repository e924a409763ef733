"""The device backend that is always available: it stages tensors in pinned host memory and uses the CPU group's transports.

Large tensors are split into pieces and pipelined: while one piece is with the other ranks, the next is copied from the
device and the last is copied back. The CPU group applies the same collective to each piece.

    device    ── copy ──>  pinned buffer  ── CPU group's collective ──>  pinned buffer  ── copy ──>  device
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from asyncdist.memory.buffers import Memory
from asyncdist.memory.reduce_kernels import Arithmetic
from asyncdist.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.transport.device_streams import DeviceEvent, cuda_missing
from asyncdist.transport.host_group import HostWork

# Pieces in flight: copied to the host, with the peers, copied back.
_PIPELINE_DEPTH = 3
_MAX_POOL_NBYTES = 64 << 20


class PinnedPool:
    """A pool of pinned buffers. A released buffer may still be in use by queued copies, up to an event."""

    def __init__(self, context: DeviceContext) -> None:
        self._streams = context.streams
        self._free: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, DeviceEvent]]] = defaultdict(deque)
        self._nbytes = 0

    def acquire(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of ``count`` elements; blocks until the copies that used it before have completed."""
        free = self._free[count, dtype]
        if not free:
            return self._streams.pinned(count, dtype)
        tensor, event = free.popleft()
        self._nbytes -= tensor.nbytes
        event.synchronize()
        return tensor

    def release(self, tensor: torch.Tensor, event: DeviceEvent) -> None:
        """Return a buffer to the pool; it may be reused after ``event`` has passed."""
        if self._nbytes + tensor.nbytes > _MAX_POOL_NBYTES:
            event.synchronize()
            self._free.clear()
            self._nbytes = 0
        self._nbytes += tensor.nbytes
        self._free[tensor.numel(), tensor.dtype].append((tensor, event))


class Staged(DeviceCollectives):
    """Collectives by way of the host."""

    name: ClassVar[str] = "staged"
    preference: ClassVar[int] = -1

    def __init__(self, context: DeviceContext) -> None:
        super().__init__(context)
        self._pinned = PinnedPool(context)
        self._piece_nbytes = context.host.mesh.config.device_piece_nbytes

    @classmethod
    def probe(cls) -> str | None:
        return cuda_missing()

    def capabilities(self) -> Mapping[str, Any]:
        return {}

    def refusal(self, all_capabilities: Sequence[Mapping[str, Any]]) -> str | None:
        return None

    def start(self, all_capabilities: Sequence[Mapping[str, Any]]) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    # -- between device and host ---------------------------------------------------------------

    def _copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """Enqueue a copy of a flat tensor into a pinned buffer; return the buffer and the event after the copy."""
        pinned = self._pinned.acquire(tensor.numel(), tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        return pinned, self.context.streams.record_event()

    def _copy_to_device(self, pinned: torch.Tensor, tensor: torch.Tensor) -> None:
        """Enqueue a copy of a pinned buffer into a flat tensor, and release the buffer."""
        tensor.copy_(pinned, non_blocking=True)
        self._pinned.release(pinned, self.context.streams.record_event())

    def _copy_all_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy flat tensors into pinned buffers, and wait for the copies."""
        copies = [self._copy_to_host(tensor) for tensor in tensors]
        for _, event in copies:
            event.synchronize()
        return [pinned for pinned, _ in copies]

    def _release(self, tensors: Sequence[torch.Tensor]) -> None:
        event = self.context.streams.record_event()
        for tensor in tensors:
            self._pinned.release(tensor, event)

    def _buffers(self, memories: Sequence[Memory]) -> list[torch.Tensor]:
        return [self._pinned.acquire(memory.count, memory.dtype) for memory in memories]

    def _run(self, start: Callable[..., HostWork], *args: Any) -> None:
        """Run a collective of the CPU group in this thread."""
        start(*args, background=False, timeout=self.context.remaining).result()

    def _pipelined(
        self, memory: Memory, start: Callable[..., HostWork], *args: Any, to_host: bool = True, to_device: bool = True
    ) -> None:
        """Run an elementwise collective piece by piece, with several pieces in flight.

        Args:
            memory: The tensor to split.
            start: The CPU group's method.
            args: Its arguments after the tensor.
            to_host: Whether this rank contributes data.
            to_device: Whether this rank receives a result.
        """
        pieces = memory.tensor.split(max(1, self._piece_nbytes // memory.itemsize))
        coming: deque[tuple[torch.Tensor, DeviceEvent | None]] = deque()
        with_others: deque[tuple[torch.Tensor, torch.Tensor, HostWork]] = deque()
        for k in range(len(pieces) + _PIPELINE_DEPTH - 1):
            if k < len(pieces):
                piece = pieces[k]
                buffer = self._pinned.acquire(piece.numel(), piece.dtype) if not to_host else None
                coming.append((buffer, None) if buffer is not None else self._copy_to_host(piece))
            if k >= 1 and coming:
                pinned, there = coming.popleft()
                if there is not None:
                    there.synchronize()
                with_others.append((pinned, pieces[k - 1], start(pinned, *args, timeout=self.context.remaining)))
            if k >= 2:
                pinned, piece, work = with_others.popleft()
                work.wait()
                if to_device:
                    self._copy_to_device(pinned, piece)
                else:
                    self._release([pinned])

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], kernels: Arithmetic) -> None:
        for memory in memories:
            self._pipelined(memory, self.context.host.all_reduce, kernels.op)

    def reduce(self, fingerprint: int, memory: Memory, root: int, kernels: Arithmetic) -> None:
        self._pipelined(memory, self.context.host.reduce, root, kernels.op, to_device=self.context.rank == root)

    def broadcast(self, fingerprint: int, memory: Memory, root: int) -> None:
        ours = self.context.rank == root
        self._pipelined(memory, self.context.host.broadcast, root, to_host=ours, to_device=not ours)

    def reduce_scatter(self, fingerprint: int, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic) -> None:
        read = self._copy_all_to_host([inputs[rank].tensor for rank in range(self.context.size)])
        [written] = self._buffers([own])
        self._run(self.context.host.reduce_scatter, written, read, kernels.op)
        self._release(read)
        self._copy_to_device(written, own.tensor)

    def all_gather(self, fingerprint: int, rows: Sequence[tuple[Sequence[Memory], Memory]]) -> None:
        for blocks, own in rows:
            [read] = self._copy_all_to_host([own.tensor])
            into = [blocks[rank] for rank in range(self.context.size)]
            written = self._buffers(into)
            self._run(self.context.host.all_gather, written, read)
            self._release([read])
            for pinned, block in zip(written, into, strict=True):
                self._copy_to_device(pinned, block.tensor)

    def gather(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        [read] = self._copy_all_to_host([own.tensor])
        into = [blocks[rank] for rank in range(self.context.size)] if self.context.rank == root else []
        written = self._buffers(into)
        self._run(self.context.host.gather, read, written or None, root)
        self._release([read])
        for rank, (pinned, block) in enumerate(zip(written, into, strict=True)):
            if rank != root:
                self._copy_to_device(pinned, block.tensor)

    def scatter(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        ours = self.context.rank == root
        read = self._copy_all_to_host([blocks[rank].tensor for rank in range(self.context.size)] if ours else [])
        [written] = self._buffers([own])
        self._run(self.context.host.scatter, written, read or None, root)
        self._release(read)
        if not ours:
            self._copy_to_device(written, own.tensor)

    def all_to_all(self, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> None:
        read = self._copy_all_to_host([memory.tensor for memory in outgoing])
        written = self._buffers(incoming)
        self._run(self.context.host.all_to_all, written, read)
        self._release(read)
        for pinned, memory in zip(written, incoming, strict=True):
            self._copy_to_device(pinned, memory.tensor)

    def barrier(self, fingerprint: int) -> None:
        """Return when every rank has called this, and the device has completed all earlier work of the stream."""
        self.context.streams.record_event().synchronize()
        self.context.barrier()
