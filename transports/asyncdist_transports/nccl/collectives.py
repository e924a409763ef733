"""Collectives of ranks with a device each, as NCCL calls in a stream of the group's own.

Data movement uses byte counts. Reductions that NCCL does not support are gathered, and reduced by torch: bitwise
operations, bool, 16-bit integers, float8, and products of complex numbers.

All ranks of a collective must make the same NCCL calls. So all decisions here depend on properties that are equal on all
ranks, such as the number of elements of each rank, and never on addresses.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, ClassVar

import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.errors import GroupAbortedError, TransportUnavailableError
from asyncdist.kernel.memory.buffers import Memory
from asyncdist.kernel.memory.reduce_kernels import Arithmetic, divide
from asyncdist.kernel.transport.device_collectives import DeviceCollectives, DeviceContext
from asyncdist.kernel.transport.device_p2p import DeviceP2P
from asyncdist.kernel.transport.device_streams import becomes_idle
from asyncdist.kernel.transport.native import CallSignature
from asyncdist_transports.nccl.bindings import BYTES, SUM, UNIQUE_ID_NBYTES, Bindings, load, numbers_of, version_text
from asyncdist_transports.nccl.communicator import Call, Communicator
from asyncdist_transports.nccl.p2p import NcclP2P

_SCRATCH_NBYTES = 64 << 20
# Limit for the creation of a communicator, in seconds; the ranks then choose another backend.
_INIT_TIMEOUT = 120.0
_POLL_INTERVAL = 1e-3


class Nccl(DeviceCollectives):
    """Collectives of ranks with a device each. The calls only enqueue work.

    The first call of a kind between two ranks is an exception: NCCL may block until the peer has made it too.
    NCCL does not compare calls: mismatched calls hang, see `asyncdist.kernel.devices.desync_detector`.
    """

    name: ClassVar[str] = "nccl"
    preference: ClassVar[int] = 20
    blocks: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    load: ClassVar[Callable[[], Bindings]] = staticmethod(load)

    def __init__(self, context: DeviceContext) -> None:
        super().__init__(context)
        self._bindings = type(self).load()
        self._made: Communicator | None = None
        self._splits = False
        with context.streams.on_comm_stream():
            self._token = torch.zeros(1, dtype=torch.uint8, device=context.streams.device)

    @classmethod
    def probe(cls) -> str | None:
        try:
            cls.load()
        except TransportUnavailableError as cause:
            return cause.summary
        except Exception as cause:
            return f"{type(cause).__name__}: {cause}"
        return None

    @classmethod
    def make_p2p(cls, context: DeviceContext) -> DeviceP2P:
        return NcclP2P(context, cls.load())

    # -- negotiation ---------------------------------------------------------------------------

    def capabilities(self) -> Mapping[str, Any]:
        return {
            "machine": self.context.machine,
            "device": self.context.streams.uuid,
            "version": self._bindings.version,
            "splits": self._bindings.splits,
        }

    def refusal(self, all_capabilities: Sequence[Mapping[str, Any]]) -> str | None:
        places: dict[tuple[str, str], int] = {}
        for rank, capabilities in enumerate(all_capabilities):
            first, other = version_text(all_capabilities[0]["version"]), version_text(capabilities["version"])
            if first != other:
                return f"NCCL is {first} on rank 0, but {other} on rank {rank}: install the same version for every rank"
            lowest = places.setdefault((capabilities["machine"], capabilities["device"]), rank)
            if lowest != rank:
                return f"ranks {lowest} and {rank} share one device, and NCCL needs a device per rank"
        return None

    def start(self, all_capabilities: Sequence[Mapping[str, Any]]) -> None:
        self._splits = all(capabilities["splits"] for capabilities in all_capabilities)
        inherited: Communicator | None = self.context.inherited.pop(self.name, None)
        if all(self.context.all_gather_object(inherited is not None)):
            self._made = inherited
            return
        if inherited is not None:
            inherited.close()
        unique_id = self.context.all_gather_object(self._unique_id() if self.context.rank == 0 else None)[0]
        if not isinstance(unique_id, bytes) or len(unique_id) != UNIQUE_ID_NBYTES:
            raise TransportUnavailableError(f"rank 0 could not create an NCCL unique id: {unique_id}")
        make = functools.partial(self._bindings.communicator, self.context.size, unique_id, self.context.rank)
        self._made = self._create(make, self.context)

    def _unique_id(self) -> bytes | str:
        """Return a new unique id, or the error text. The other ranks wait for one of the two."""
        try:
            return self._bindings.unique_id()
        except Exception as cause:
            return str(cause)

    def split(self, context: DeviceContext | None, number: int) -> None:
        """Split the communicator (``ncclCommSplit``), which is faster than creating one. Does nothing with cupy 13."""
        if not self._splits:
            return
        made = self._made
        assert made is not None
        if not becomes_idle(self.context.streams, self.context.remaining):
            raise TransportUnavailableError(
                "the device has not completed the work enqueued before the split of the group"
            )
        make = functools.partial(made.split, number, 0 if context is None else context.rank)
        part = self._create(make, context or self.context)
        if context is not None:
            context.inherited[self.name] = part

    def _create(self, make: AnyFunction, context: DeviceContext) -> Communicator:
        """Create a communicator for the stream of ``context``; raise if that takes too long or the group fails."""
        rank = self.context.host.member_ids[self.context.rank]
        made = Communicator(self._bindings, context.streams, make, [self._barrier_call], rank)
        timeout = min(_INIT_TIMEOUT, self.context.remaining)
        until = monotonic() + timeout
        try:
            while not made.ready.is_completed():
                if self.context.host.error is not None:
                    raise self.context.host.error
                if monotonic() > until:
                    raise TransportUnavailableError(f"NCCL did not connect the ranks within {timeout:.0f} s")
                time.sleep(_POLL_INTERVAL)
            made.ready.result()
        except BaseException:
            made.abort()
            raise
        return made

    @property
    def _barrier_call(self) -> Call:
        """A call that completes on the device when every rank has made it."""
        place = self._token.data_ptr()
        return "allReduce", place, place, 1, BYTES, SUM

    # -- while it is used ----------------------------------------------------------------------

    def async_error(self) -> Exception | None:
        return None if self._made is None else self._made.async_error()

    def abort(self) -> None:
        if self._made is not None:
            self._made.abort()

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _enqueue(self, *calls: Call) -> None:
        if self._made is None:
            raise GroupAbortedError("the NCCL communicator was not created")
        self._made.enqueue(*calls)

    def run(self, signature: CallSignature, *tensors: Any) -> None:
        # The allocator must know that the communication stream uses them.
        for tensor in _tensors_in(tensors):
            self.context.streams.record_stream(tensor)
        super().run(signature, *tensors)

    def _bytes(self, nbytes: int) -> torch.Tensor:
        """Return memory allocated on the communication stream; it may be dropped while queued calls use it."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.context.streams.device)

    # -- reductions ----------------------------------------------------------------------------

    def all_reduce(self, fingerprint: int, memories: Sequence[Memory], kernels: Arithmetic) -> None:
        numbers = numbers_of(kernels.op, memories[0].dtype, self.context.size)
        if numbers is None:
            for memory in memories:
                self._all_reduce_gathered(memory, kernels)
            return
        kind, parts, operation, divides = numbers
        places = [(memory.tensor.data_ptr(), memory.count * parts) for memory in memories if memory.count]
        self._enqueue(*[("allReduce", place, place, count, kind, operation) for place, count in places])
        if divides:
            for memory in memories:
                divide(memory.tensor, self.context.size)

    def reduce(self, fingerprint: int, memory: Memory, root: int, kernels: Arithmetic) -> None:
        is_root = self.context.rank == root
        numbers = numbers_of(kernels.op, memory.dtype, self.context.size)
        if numbers is None:
            empty = memory.slice(0, 0)
            blocks = [memory if rank == root else empty for rank in range(self.context.size)]
            self._reduce_scatter_gathered(blocks, memory if is_root else empty, kernels)
        elif memory.count:
            kind, parts, operation, divides = numbers
            place = memory.tensor.data_ptr()
            self._enqueue(("reduce", place, place if is_root else 0, memory.count * parts, kind, operation, root))
            if divides and is_root:
                divide(memory.tensor, self.context.size)

    def reduce_scatter(self, fingerprint: int, inputs: Sequence[Memory], own: Memory, kernels: Arithmetic) -> None:
        numbers = numbers_of(kernels.op, own.dtype, self.context.size)
        if numbers is None:
            self._reduce_scatter_gathered(inputs, own, kernels)
            return
        kind, parts, operation, divides = numbers
        place = own.tensor.data_ptr()
        if _equal_counts(inputs):
            if own.count:
                whole = self._contiguous(inputs)
                self._enqueue(("reduceScatter", whole.data_ptr(), place, own.count * parts, kind, operation))
        else:
            outputs = [place if rank == self.context.rank else 0 for rank in range(self.context.size)]
            self._enqueue(
                *[
                    ("reduce", block.tensor.data_ptr(), outputs[rank], block.count * parts, kind, operation, rank)
                    for rank, block in enumerate(inputs)
                    if block.count
                ]
            )
        if divides:
            divide(own.tensor, self.context.size)

    # -- reductions without NCCL ---------------------------------------------------------------

    def _rows(self, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return one contiguous buffer of ``count`` elements for each rank."""
        return list(self._bytes(self.context.size * count * dtype.itemsize).view(dtype).split(count))

    def _steps(self, count: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Split elements into ranges that fit the scratch memory; the same ranges on every rank."""
        step = max(1, _SCRATCH_NBYTES // (self.context.size * dtype.itemsize))
        for start in range(0, count, step):
            yield start, start + step

    def _all_reduce_gathered(self, memory: Memory, kernels: Arithmetic) -> None:
        for start, stop in self._steps(memory.count, memory.dtype):
            piece = memory.tensor[start:stop]
            rows = self._rows(piece.numel(), piece.dtype)
            self._enqueue(("allGather", piece.data_ptr(), rows[0].data_ptr(), piece.nbytes, BYTES))
            kernels.reduce(rows, piece)

    def _reduce_scatter_gathered(self, blocks: Sequence[Memory], own: Memory, kernels: Arithmetic) -> None:
        """Reduce the ``blocks[rank]`` of all ranks into ``own``, which may be the same memory."""
        for start, stop in self._steps(max(block.count for block in blocks), own.dtype):
            pieces = [block.tensor[start:stop] for block in blocks]
            out = own.tensor[start:stop]
            rows = self._rows(out.numel(), out.dtype) if out.numel() else []
            self._exchange(
                {rank: pieces[rank] for rank in self.context.others},
                {rank: rows[rank] for rank in self.context.others if rows},
            )
            if rows:
                rows[self.context.rank].copy_(pieces[self.context.rank])
                kernels.reduce(rows, out)

    # -- data movement -------------------------------------------------------------------------

    def broadcast(self, fingerprint: int, memory: Memory, root: int) -> None:
        if memory.count:
            place = memory.tensor.data_ptr()
            self._enqueue(("broadcast", place, place, memory.nbytes, BYTES, root))

    def all_gather(self, fingerprint: int, rows: Sequence[tuple[Sequence[Memory], Memory]]) -> None:
        calls: list[Call] = []
        gathered: list[tuple[torch.Tensor, Sequence[Memory]]] = []
        for blocks, own in rows:
            place = own.tensor.data_ptr()
            if not _equal_counts(blocks):
                inputs = [place if rank == self.context.rank else 0 for rank in range(self.context.size)]
                calls += [
                    ("broadcast", inputs[rank], block.tensor.data_ptr(), block.nbytes, BYTES, rank)
                    for rank, block in enumerate(blocks)
                    if block.count
                ]
            elif own.count:
                whole = _contiguous_span(blocks)
                if whole is None:
                    whole = self._bytes(own.nbytes * self.context.size)
                    gathered.append((whole, blocks))
                calls.append(("allGather", place, whole.data_ptr(), own.nbytes, BYTES))
        self._enqueue(*calls)
        for whole, blocks in gathered:
            for block, part in zip(blocks, whole.split(blocks[0].nbytes), strict=True):
                block.raw.copy_(part)

    def gather(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        if self.context.rank == root:
            self._exchange({}, {rank: blocks[rank].tensor for rank in self.context.others})
        else:
            self._exchange({root: own.tensor}, {})

    def scatter(self, fingerprint: int, own: Memory, blocks: Sequence[Memory], root: int) -> None:
        if self.context.rank == root:
            self._exchange({rank: blocks[rank].tensor for rank in self.context.others}, {})
        else:
            self._exchange({}, {root: own.tensor})

    def all_to_all(self, fingerprint: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> None:
        others = self.context.others
        self._exchange(
            {rank: outgoing[rank].tensor for rank in others}, {rank: incoming[rank].tensor for rank in others}
        )
        incoming[self.context.rank].raw.copy_(outgoing[self.context.rank].raw)

    def _exchange(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send flat tensors to other ranks, and receive from others, as one NCCL group; skip empty tensors."""
        calls = [("send", tensor, rank) for rank, tensor in sends.items()]
        calls += [("recv", tensor, rank) for rank, tensor in receives.items()]
        self._enqueue(
            *[(name, tensor.data_ptr(), tensor.nbytes, BYTES, rank) for name, tensor, rank in calls if tensor.numel()]
        )

    def barrier(self, fingerprint: int) -> None:
        """Complete, on the device, when every device has completed its earlier work in this stream."""
        self._enqueue(self._barrier_call)

    def _contiguous(self, blocks: Sequence[Memory]) -> torch.Tensor:
        """Return blocks of equal size as one contiguous tensor, copied if they are not contiguous."""
        whole = _contiguous_span(blocks)
        if whole is None:
            whole = self._bytes(blocks[0].nbytes * len(blocks))
            for block, part in zip(blocks, whole.split(blocks[0].nbytes), strict=True):
                part.copy_(block.raw)
        return whole


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a call, in lists or not; None has none."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value or ():
            yield from _tensors_in(each)


def _equal_counts(blocks: Sequence[Memory]) -> bool:
    """Return whether all blocks have the same number of elements."""
    return all(block.count == blocks[0].count for block in blocks)


def _contiguous_span(blocks: Sequence[Memory]) -> torch.Tensor | None:
    """Return the first of equal blocks if the others follow it in memory in rank order, else None."""
    first = blocks[0].tensor
    place, nbytes = first.data_ptr(), blocks[0].nbytes
    in_order = all(block.tensor.data_ptr() == place + rank * nbytes for rank, block in enumerate(blocks))
    return first if in_order else None
