"""The device backend that is always available: it stages tensors in pinned host memory and uses the CPU group's transports.

Large tensors are split into pieces and pipelined: while one piece is with the other ranks, the next is copied from the
device and the last is copied back. The CPU group applies the same collective to each piece.

    device    ── copy ──>  pinned buffer  ── CPU group's collective ──>  pinned buffer  ── copy ──>  device
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from asyncdist.kernel.memory.buffers import Memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic
from asyncdist.kernel.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.kernel.transport.device_streams import DeviceEvent, completes_soon, cuda_missing
from asyncdist.kernel.transport.host_group import HostWork

# Pieces in flight: one is copied to the host, one is with the peers, one is copied back.
_PIPELINE_DEPTH = 3
# Size up to which the host waits for the copy to the device.
_SMALL_NBYTES = 64 << 10


class Staged(DeviceCollectives):
    """Collectives by way of the host."""

    name: ClassVar[str] = "staged"
    preference: ClassVar[int] = -1

    def __init__(self, context: DeviceContext) -> None:
        super().__init__(context)
        self._piece_nbytes = context.host.endpoint.config.device_piece_nbytes

    @classmethod
    def probe(cls) -> str | None:
        return cuda_missing()

    # -- between device and host ---------------------------------------------------------------
    # torch caches pinned memory, and does not reuse a buffer before the queued copies from and to it have completed.

    def _copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """Enqueue a copy of a flat tensor into a pinned buffer; return the buffer and the event after the copy."""
        pinned = self.context.streams.pinned(tensor.numel(), tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        return pinned, self.context.streams.record_event()

    def _run_on_host(
        self,
        start: Callable[[list[torch.Tensor], list[torch.Tensor]], HostWork],
        inputs: Sequence[Memory],
        outputs: Sequence[Memory],
    ) -> None:
        """Run ``start(host_inputs, host_outputs)``, a collective of the CPU group, on pinned copies of the memories."""
        copies = [self._copy_to_host(memory.tensor) for memory in inputs]
        for _, event in copies:
            event.synchronize()
        host_outputs = [self.context.streams.pinned(memory.count, memory.dtype) for memory in outputs]
        start([pinned for pinned, _ in copies], host_outputs).result()
        for pinned, memory in zip(host_outputs, outputs, strict=True):
            self.context.streams.copy_to_device(memory.tensor, pinned)

    @property
    def _options(self) -> dict[str, Any]:
        """Options of the CPU group's calls, which run in this thread."""
        return {"background": False, "timeout": self.context.remaining}

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
        streams = self.context.streams
        pieces = memory.tensor.split(max(1, self._piece_nbytes // memory.itemsize))
        copied: deque[tuple[torch.Tensor, DeviceEvent | None]] = deque()
        with_peers: deque[tuple[torch.Tensor, HostWork]] = deque()
        for step in range(len(pieces) + _PIPELINE_DEPTH - 1):
            if step < len(pieces):
                piece = pieces[step]
                empty = None if to_host else streams.pinned(piece.numel(), piece.dtype)
                copied.append(self._copy_to_host(piece) if empty is None else (empty, None))
            if 1 <= step <= len(pieces):
                pinned, event = copied.popleft()
                if event is not None:
                    event.synchronize()
                # This thread runs the call of a single piece.
                options = self._options | {"background": len(pieces) > 1}
                with_peers.append((pinned, start(pinned, *args, **options)))
            if step >= 2:
                pinned, work = with_peers.popleft()
                work.wait()
                if to_device:
                    event = streams.copy_to_device(pieces[step - 2], pinned)
                    if memory.nbytes <= _SMALL_NBYTES:
                        # The caller's stream then need not wait for the copy. Where processes share the device, that
                        # would make the device change between them.
                        completes_soon(event)

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], kernels: Arithmetic) -> None:
        for memory in memories:
            self._pipelined(memory, self.context.host.all_reduce, kernels.op)

    def reduce(self, fingerprint: int, memory: Memory, root: int, kernels: Arithmetic) -> None:
        self._pipelined(memory, self.context.host.reduce, root, kernels.op, to_device=self.context.rank == root)

    def broadcast(self, fingerprint: int, memory: Memory, root: int) -> None:
        is_root = self.context.rank == root
        self._pipelined(memory, self.context.host.broadcast, root, to_host=is_root, to_device=not is_root)

    def reduce_scatter(self, fingerprint: int, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic) -> None:
        def start(read: list[torch.Tensor], written: list[torch.Tensor]) -> HostWork:
            return self.context.host.reduce_scatter(written[0], read, kernels.op, **self._options)

        self._run_on_host(start, inputs, [own])

    def all_gather(self, fingerprint: int, rows: Sequence[tuple[Sequence[Memory], Memory]]) -> None:
        def start(read: list[torch.Tensor], written: list[torch.Tensor]) -> HostWork:
            return self.context.host.all_gather(written, read[0], **self._options)

        for blocks, own in rows:
            self._run_on_host(start, [own], blocks)

    def gather(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        # The root's own block is on the device already.
        others = [blocks[rank] for rank in self.context.others] if self.context.rank == root else []

        def start(read: list[torch.Tensor], written: list[torch.Tensor]) -> HostWork:
            output = [*written[:root], read[0], *written[root:]] if self.context.rank == root else None
            return self.context.host.gather(read[0], output, root, **self._options)

        self._run_on_host(start, [own], others)

    def scatter(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        # The root's own block is on the device already.
        is_root = self.context.rank == root

        def start(read: list[torch.Tensor], written: list[torch.Tensor]) -> HostWork:
            output, source = (read[root], read) if is_root else (written[0], None)
            return self.context.host.scatter(output, source, root, **self._options)

        self._run_on_host(start, blocks if is_root else [], [] if is_root else [own])

    def all_to_all(self, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> None:
        def start(read: list[torch.Tensor], written: list[torch.Tensor]) -> HostWork:
            return self.context.host.all_to_all(written, read, **self._options)

        self._run_on_host(start, outgoing, incoming)

    def barrier(self, fingerprint: int) -> None:
        """Return when every rank has called this, and the device has completed all earlier work of the stream."""
        self.context.streams.record_event().synchronize()
        self.context.barrier()
