"""The way that is always there: through pinned memory of the host, and on by the host's transports.

Large tensors go in pieces, some of which are under way at once: while one is with the other ranks, the next comes from the
device and the last goes back. The host group then does to each piece what was asked to be done to the whole.

    device    ── copy ──>  pinned slot  ── host group's collective ──>  pinned slot  ── copy ──>  device
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from asyncdist.algorithms.schedule import Schedule
from asyncdist.memory.buffers import Memory
from asyncdist.memory.reduce_kernels import Arithmetic
from asyncdist.transport.device_collectives import DeviceCollectives, DeviceContext, nothing
from asyncdist.transport.device_streams import DeviceEvent, cuda_missing
from asyncdist.transport.host_group import HostWork
from asyncdist.transport.native import MemoryBlocks

_UNDER_WAY = 3  # pieces at once: coming, with the others, going
_KEPT_NBYTES = 64 << 20


class Pinned:
    """Pinned memory for reuse. What is given back may still be read by copies in the queue, up to a mark."""

    def __init__(self, site: DeviceContext) -> None:
        self._streams = site.streams
        self._free: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, DeviceEvent]]] = defaultdict(deque)
        self._nbytes = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        free = self._free[count, dtype]
        if not free:
            return self._streams.pinned(count, dtype)
        tensor, mark = free.popleft()
        self._nbytes -= tensor.nbytes
        mark.synchronize()
        return tensor

    def give(self, tensor: torch.Tensor, mark: DeviceEvent) -> None:
        """Take back memory that is free when ``mark`` has been passed."""
        if self._nbytes + tensor.nbytes > _KEPT_NBYTES:
            mark.synchronize()
            self._free.clear()
            self._nbytes = 0
        self._nbytes += tensor.nbytes
        self._free[tensor.numel(), tensor.dtype].append((tensor, mark))


class Staged(DeviceCollectives):
    """Collectives by way of the host."""

    name: ClassVar[str] = "staged"
    preference: ClassVar[int] = -1

    def __init__(self, site: DeviceContext) -> None:
        super().__init__(site)
        self._pinned = Pinned(site)
        self._piece_nbytes = site.host.mesh.config.device_piece_nbytes

    @classmethod
    def probe(cls) -> str | None:
        return cuda_missing()

    def card(self) -> Mapping[str, Any]:
        return {}

    def refusal(self, cards: Sequence[Mapping[str, Any]]) -> str | None:
        return None

    def start(self, cards: Sequence[Mapping[str, Any]]) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    # -- between device and host ---------------------------------------------------------------

    def _down(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeviceEvent]:
        """Copy a flat tensor into pinned memory; it is there when the mark has been passed."""
        pinned = self._pinned.take(tensor.numel(), tensor.dtype)
        pinned.copy_(tensor, non_blocking=True)
        return pinned, self.site.streams.mark()

    def _up(self, pinned: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy pinned memory into a flat tensor, and give it back."""
        tensor.copy_(pinned, non_blocking=True)
        self._pinned.give(pinned, self.site.streams.mark())

    def _all_down(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy flat tensors into pinned memory, and wait until they are there."""
        copies = [self._down(tensor) for tensor in tensors]
        for _, mark in copies:
            mark.synchronize()
        return [pinned for pinned, _ in copies]

    def _give(self, tensors: Sequence[torch.Tensor]) -> None:
        mark = self.site.streams.mark()
        for tensor in tensors:
            self._pinned.give(tensor, mark)

    def _rooms(self, memories: Sequence[Memory]) -> list[torch.Tensor]:
        return [self._pinned.take(memory.count, memory.dtype) for memory in memories]

    def _run(self, start: Callable[..., HostWork], *args: Any) -> None:
        """Do a collective of the host group, here and now."""
        start(*args, background=False, timeout=self.site.left).result()

    def _in_pieces(
        self, memory: Memory, start: Callable[..., HostWork], *args: Any, down: bool = True, up: bool = True
    ) -> None:
        """Do a collective that may be done to any part of a tensor, piece by piece, several under way at once.

        ``down`` says whether ours goes into it, ``up`` whether something comes out of it for us.
        """
        pieces = memory.tensor.split(max(1, self._piece_nbytes // memory.itemsize))
        coming: deque[tuple[torch.Tensor, DeviceEvent | None]] = deque()
        with_others: deque[tuple[torch.Tensor, torch.Tensor, HostWork]] = deque()
        for k in range(len(pieces) + _UNDER_WAY - 1):
            if k < len(pieces):
                piece = pieces[k]
                room = self._pinned.take(piece.numel(), piece.dtype) if not down else None
                coming.append((room, None) if room is not None else self._down(piece))
            if k >= 1 and coming:
                pinned, there = coming.popleft()
                if there is not None:
                    there.synchronize()
                with_others.append((pinned, pieces[k - 1], start(pinned, *args, timeout=self.site.left)))
            if k >= 2:
                pinned, piece, work = with_others.popleft()
                work.wait()
                if up:
                    self._up(pinned, piece)
                else:
                    self._give([pinned])

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, number: int, fingerprint: int, memories: Sequence[Memory], how: Arithmetic) -> Schedule:
        for memory in memories:
            self._in_pieces(memory, self.site.host.all_reduce, how.op)
        return nothing()

    def reduce(self, number: int, fingerprint: int, memory: Memory, root: int, how: Arithmetic) -> Schedule:
        self._in_pieces(memory, self.site.host.reduce, root, how.op, up=self.site.rank == root)
        return nothing()

    def broadcast(self, number: int, fingerprint: int, memory: Memory, root: int) -> Schedule:
        ours = self.site.rank == root
        self._in_pieces(memory, self.site.host.broadcast, root, down=ours, up=not ours)
        return nothing()

    def reduce_scatter(
        self, number: int, fingerprint: int, inputs: MemoryBlocks, own: Memory, how: Arithmetic
    ) -> Schedule:
        read = self._all_down([inputs[rank].tensor for rank in range(self.site.size)])
        [written] = self._rooms([own])
        self._run(self.site.host.reduce_scatter, written, read, how.op)
        self._give(read)
        self._up(written, own.tensor)
        return nothing()

    def all_gather(self, number: int, fingerprint: int, rows: Sequence[tuple[MemoryBlocks, Memory]]) -> Schedule:
        for blocks, own in rows:
            [read] = self._all_down([own.tensor])
            into = [blocks[rank] for rank in range(self.site.size)]
            written = self._rooms(into)
            self._run(self.site.host.all_gather, written, read)
            self._give([read])
            for pinned, block in zip(written, into, strict=True):
                self._up(pinned, block.tensor)
        return nothing()

    def gather(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        [read] = self._all_down([own.tensor])
        into = [blocks[rank] for rank in range(self.site.size)] if self.site.rank == root else []
        written = self._rooms(into)
        self._run(self.site.host.gather, read, written or None, root)
        self._give([read])
        for rank, (pinned, block) in enumerate(zip(written, into, strict=True)):
            if rank != root:
                self._up(pinned, block.tensor)
        return nothing()

    def scatter(self, number: int, fingerprint: int, own: Memory, blocks: MemoryBlocks, root: int) -> Schedule:
        ours = self.site.rank == root
        read = self._all_down([blocks[rank].tensor for rank in range(self.site.size)] if ours else [])
        [written] = self._rooms([own])
        self._run(self.site.host.scatter, written, read or None, root)
        self._give(read)
        if not ours:
            self._up(written, own.tensor)
        return nothing()

    def all_to_all(
        self, number: int, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]
    ) -> Schedule:
        read = self._all_down([memory.tensor for memory in outgoing])
        written = self._rooms(incoming)
        self._run(self.site.host.all_to_all, written, read)
        self._give(read)
        for pinned, memory in zip(written, incoming, strict=True):
            self._up(pinned, memory.tensor)
        return nothing()

    def barrier(self, number: int, fingerprint: int) -> Schedule:
        """End when every member has come, and so has the device: what it had to do before is done."""
        self.site.streams.mark().synchronize()
        self.site.meet()
        return nothing()
