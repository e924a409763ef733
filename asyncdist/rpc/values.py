"""Values on their way: plain data as msgpack, tensors as buffers of the message, the rest as object collectives carry it.

No pickle is read or written unless ASYNCDIST_ALLOW_PICKLE is set. A tensor of another device is lent to its receiver
(see `asyncdist.rpc.loans`) or passes through host memory, and arrives on a device of the same kind, where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from math import inf
from typing import Any, NamedTuple, Protocol

import msgpack
import numpy as np
import torch

from asyncdist.base.callables import Callback, Supplier
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.errors import ProtocolError
from asyncdist.kernel import DTYPE_NUMBERS, DTYPES, input_memory, torch_private
from asyncdist.kernel.memory.serialization import (
    EXTENDED,
    LONG_BYTES_MARK,
    LONG_NBYTES,
    Beside,
    Extension,
    TakesLong,
    carries_array,
    carries_tensor,
    flags_of,
    pack,
    unpack,
    with_flags,
)
from asyncdist.net import SHORT_NBYTES, PeerChannel
from asyncdist.rpc.loans import Buffer, DevicePart, TensorLender, mark_ready
from asyncdist.rpc.wire import HasExtensions, refuse_extension

HEAD_NBYTES = SHORT_NBYTES - 2048
"""The most bytes of a value inside the head of its message."""
_INLINE_ARRAY_NBYTES = 1024
"""The most bytes of an array of numpy that travels inside the head."""
_TENSOR, _ARRAY, _OTHER = range(3)
_MOST_COPIED_NBYTES = 4 << 20
"""The most bytes that an event loop copies to unpack a value."""
_MOST_PACKED = 2048
"""The most tuples, or parts that take as long, that an event loop packs of arguments. It takes 2 ms."""
_CONTAINERS = frozenset((list, tuple, dict))
_MOST_SEARCHED = 16
"""The most items of a list, tuple or dict among which `_holds_long_bytes` looks."""

Placing = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns a copy of a tensor of host memory on the current device of a kind."""


class SentReference(Protocol):
    """A `RemoteReference` in a value that is sent."""

    def grant_to(self, channel: PeerChannel) -> None: ...


class PackedValue(NamedTuple):
    """A value as msgpack, the buffers of its tensors, and the references in it."""

    data: bytes
    buffers: Sequence[memoryview | DevicePart]
    references: Sequence[SentReference]

    def for_head(self) -> tuple[bytes, Sequence[memoryview | DevicePart]]:
        """Return what stands in the head of the message, and its buffers: a long value is the first of them."""
        if len(self.data) <= HEAD_NBYTES:
            return self.data, self.buffers
        return b"\xc0", [memoryview(self.data), *self.buffers]


class _FastPacker(threading.local):
    """Packs plain data and dense CPU tensors with a packer that is reused; raises TypeError for anything else.

    The result is the same as that of `pack` with a `_Writing`, in a fifth of the time. Each thread has its own, because
    another thread may run while a tensor is packed.
    """

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._outer = msgpack.Packer(strict_types=True, unicode_errors="surrogatepass", default=self._encode)
        self._inner = msgpack.Packer()

    def pack(self, value: Any) -> PackedValue:
        if _holds_long_bytes((value,)):
            raise TypeError
        buffers: list[memoryview] = []
        self.buffers = buffers
        return PackedValue(self._outer.pack(value), buffers, ())

    def _encode(self, part: Any) -> msgpack.ExtType:
        if type(part) is not torch.Tensor or not part.is_cpu or part.layout is not torch.strided:
            raise TypeError
        number, nbytes = DTYPE_NUMBERS.get(part.dtype), part.nbytes
        if number is None or nbytes > SHORT_NBYTES or not part.is_contiguous() or part.is_neg() or part.is_conj():
            raise TypeError
        # A short message is copied in any case.
        self.buffers.append(memoryview(ctypes.string_at(part.data_ptr(), nbytes) if nbytes else b""))
        head = [_TENSOR, len(self.buffers) - 1, number, list(part.shape), part.requires_grad, "cpu"]
        return msgpack.ExtType(EXTENDED, self._inner.pack(head))


_fast = _FastPacker()
# torch raises RuntimeError for properties that a tensor does not have.
_NOT_FAST = (TypeError, ValueError, OverflowError, RuntimeError)


class _Writing(Beside):
    """Collects the tensors, arrays and long bytes of one message as buffers."""

    def __init__(self, references: Extension | None, lender: TensorLender | None, *, snapshot: bool) -> None:
        super().__init__(snapshot=snapshot)
        self.references: list[Any] = []
        self._references, self._lender = references, lender

    def encode(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return self._encode_tensor(part)
        if isinstance(part, np.ndarray):
            if not carries_array(part) or part.dtype.kind not in "biufc" or part.nbytes <= _INLINE_ARRAY_NBYTES:
                return None
            flat = np.ascontiguousarray(part)
            if self.snapshot and part.nbytes > SHORT_NBYTES and np.may_share_memory(flat, part):
                flat = part.copy()
            return [_ARRAY, self.add(flat.data.cast("B")), part.dtype.str, list(part.shape)]
        if self._references is not None and (stand_in := self._references.encode(part)) is not None:
            self.references.append(part)
            return [_OTHER, stand_in]
        return None

    def decode(self, stand_in: Any) -> Any:
        raise ProtocolError("nothing is decoded while a value is packed")

    def _encode_tensor(self, part: torch.Tensor) -> Any:
        if not carries_tensor(part):
            return None
        device = part.device.type
        head = [DTYPE_NUMBERS[part.dtype], list(part.shape), flags_of(part), device]
        tensor = part.detach()
        if device != "cpu":
            lent = None if self._lender is None else self._lender.part(tensor, snapshot=self.snapshot)
            if lent is not None:
                return [_TENSOR, self.add(lent), *head]
            tensor = tensor.cpu()
        elif self.snapshot and part.nbytes > SHORT_NBYTES:
            # The method may keep the tensor and change it while it is sent.
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return [_TENSOR, self.add(input_memory(tensor).view), *head]


class _Reading:
    """Makes the tensors and arrays of one message from its buffers."""

    def __init__(self, buffers: Sequence[Buffer], references: Extension | None, place: Placing) -> None:
        self._buffers, self._references, self._place = buffers, references, place

    def encode(self, part: Any) -> Any:
        return None

    def restore_fast(self, code: int, body: bytes) -> Any:
        """Restore a value of `_FastPacker`. Raises any error for other values."""
        kind, index, number, shape, flags, device = msgpack.unpackb(body)
        # If another part of the value fails here, it is restored again: that must not copy to a device twice.
        if code != EXTENDED or kind != _TENSOR or device != "cpu":
            raise HasExtensions
        tensor = self._tensor(self._buffers[index], DTYPES[number], shape, device)
        return with_flags(tensor, flags) if flags else tensor

    def decode(self, stand_in: Any) -> Any:
        kind, index, *rest = stand_in
        if kind == _OTHER and self._references is not None:
            return self._references.decode(index)
        if kind == _ARRAY:
            name, shape = rest
            dtype = np.dtype(str(name))
            if dtype.hasobject:
                raise ValueError("an array of objects")
            buffer = self._buffers[index]
            if isinstance(buffer, torch.Tensor):
                raise ValueError("an array on a device")
            return np.frombuffer(_writable(buffer), dtype).reshape(shape)
        number, shape, flags, device = rest
        return with_flags(self._tensor(self._buffers[index], DTYPES[number], shape, device), flags)

    def _tensor(self, buffer: Buffer, dtype: torch.dtype, shape: Sequence[int], device: str) -> torch.Tensor:
        # Looking for the class of a tensor takes longer.
        if not isinstance(buffer, memoryview):
            return buffer.view(dtype).view(tuple(shape))
        if not buffer.nbytes:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if tensor.numel():
                raise ValueError("a tensor without its bytes")
        else:
            tensor = torch.frombuffer(_writable(buffer), dtype=dtype).view(tuple(shape))
        return tensor if device == "cpu" else self._place(tensor, str(device))


class _OnlyLoopPacks(Exception):
    """A value has a part that the thread of the loop must pack."""


class _RefusingLender:
    """Refuses device tensors in other threads than that of the loop, which has the stream that computes them."""

    def part(self, tensor: torch.Tensor, *, snapshot: bool) -> DevicePart | None:
        raise _OnlyLoopPacks


class _Discarding(_Reading):
    """Takes the references out of a message whose tensors are not wanted."""

    def decode(self, stand_in: Any) -> Any:
        return super().decode(stand_in) if stand_in[0] == _OTHER and self._references is not None else ...


def _refuse_to_place(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    raise ValueError(f"only the thread of the loop chooses a {kind} device")


def _holds_long_bytes(parts: Iterable[Any], depth: int = 3) -> bool:
    """Return whether there are long bytes near the surface of a value; msgpack would copy them."""
    for part in parts:
        kind = type(part)
        if kind is bytes:
            found = len(part) >= LONG_NBYTES
        elif kind in _CONTAINERS and part and depth and len(part) <= _MOST_SEARCHED:
            found = _holds_long_bytes(part.values() if kind is dict else part, depth - 1)
        else:
            continue
        if found:
            return True
    return False


def _writable(buffer: memoryview) -> memoryview | bytearray:
    return bytearray(buffer) if buffer.readonly else buffer


def run_aside(threads: DaemonThreadPool, work: Supplier[Callback]) -> bool:
    """Run work in a thread, and on the running loop what it returns; return False if there are no threads any more."""
    loop = asyncio.get_running_loop()

    def run() -> None:
        outcome = work()
        # The loop has ended with the process.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(outcome)

    try:
        threads.submit(run)
    except RuntimeError:
        return False
    return True


class Carrier:
    """Packs and unpacks the values of one session."""

    def __init__(self, *, allow_pickle: bool, references: Extension | None, place: Placing) -> None:
        self._allow_pickle, self._references, self._place = allow_pickle, references, place

    def pack(self, value: Any, *, snapshot: bool = False, lender: TensorLender | None = None) -> PackedValue:
        """Pack a value. Each time that it is sent, its references are given to the receiver.

        Args:
            snapshot: Copy tensors that are sent in parts, because their memory may change before they are sent.
            lender: Decides which device tensors may be lent; None copies all to host memory.

        Raises:
            UsageError: It cannot be carried.
        """
        try:
            return _fast.pack(value)
        except _NOT_FAST:
            return self._pack_any(value, lender, snapshot=snapshot)

    def pack_arguments(
        self, value: Any, lender: TensorLender, threads: DaemonThreadPool
    ) -> PackedValue | asyncio.Future[PackedValue]:
        """Pack a value that does not change in that time; return a future if that takes long, and a thread does it.

        Raises:
            UsageError: It cannot be carried. If that turns out late, the future has the error.
        """
        try:
            return _fast.pack(value)
        except _NOT_FAST:
            pass
        with contextlib.suppress(TakesLong):
            return self._pack_any(value, lender, most=_MOST_PACKED)
        packed: asyncio.Future[PackedValue] = asyncio.get_running_loop().create_future()
        # The calls that wait for it may end before.
        packed.add_done_callback(lambda done: done.cancelled() or done.exception())

        def pack_on_loop() -> None:
            try:
                packed.set_result(self._pack_any(value, lender))
            except Exception as error:
                packed.set_exception(error)

        def pack_in_thread() -> Callback:
            try:
                return functools.partial(packed.set_result, self.pack_aside(value))
            except Exception as error:
                is_for_loop = self._allow_pickle or isinstance(error, _OnlyLoopPacks)
                return pack_on_loop if is_for_loop else functools.partial(packed.set_exception, error)

        if not run_aside(threads, pack_in_thread):
            pack_on_loop()
        return packed

    def pack_aside(self, value: Any) -> PackedValue:
        """Pack a value, in any thread. Raises an error also for values that only the loop may pack."""
        # A pickle executes code of the user.
        return self._pack_any(value, _RefusingLender(), allow_pickle=False)

    def _pack_any(
        self,
        value: Any,
        lender: TensorLender | None,
        *,
        snapshot: bool = False,
        allow_pickle: bool = True,
        most: float = inf,
    ) -> PackedValue:
        writing = _Writing(self._references, lender, snapshot=snapshot)
        allow_pickle = allow_pickle and self._allow_pickle
        data = pack(value, allow_pickle=allow_pickle, extension=writing, beside=writing, most=most)
        mark_ready(each for each in writing.buffers if isinstance(each, DevicePart))
        return PackedValue(data, writing.buffers, writing.references)

    def unpack(self, data: bytes | memoryview, buffers: Sequence[Buffer]) -> Any:
        """Return a value. Raises ProtocolError if it is damaged, or a pickle that is not allowed."""
        try:
            return self.unpack_fast(data, buffers)
        # Damaged bytes fail again.
        except Exception:
            reading = _Reading(buffers, self._references, self._place)
            return unpack(data, allow_pickle=self._allow_pickle, extension=reading, beside=buffers)

    def takes_long(self, data: bytes | memoryview, buffers: Sequence[Buffer]) -> bool:
        """Return whether it takes more than a few milliseconds to unpack a value, so that no loop should do it."""
        if len(data) > LONG_NBYTES:
            return True
        # Tensors and arrays share the memory of the buffers, and bytes are copied.
        nbytes = sum(each.nbytes for each in buffers if isinstance(each, memoryview))
        return nbytes > _MOST_COPIED_NBYTES and LONG_BYTES_MARK in bytes(data)

    def unpack_aside(self, data: bytes | memoryview, buffers: Sequence[Buffer]) -> Any:
        """Return a value, in any thread. Raises ProtocolError also for values that only the loop may unpack."""
        reading = _Reading(buffers, None, _refuse_to_place)
        # A pickle may contain anything, and executes code of the user.
        return unpack(data, allow_pickle=False, extension=reading, beside=buffers)

    def unpack_references(self, data: bytes | memoryview) -> Any:
        """Return a value without its tensors, for its references. Raises ProtocolError if it is damaged."""
        discarding = _Discarding((), self._references, _refuse_to_place)
        return unpack(data, allow_pickle=self._allow_pickle, extension=discarding, beside=None)

    def unpack_fast(self, data: bytes | memoryview, buffers: Sequence[Buffer]) -> Any:
        """Return a value that needs nothing but plain data and tensors. Raises any error for others."""
        restore = _Reading(buffers, None, self._place).restore_fast if buffers else refuse_extension
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=restore)


# -- results that nothing can change any more ---------------------------------------------------------

_CONSTANT = frozenset((bool, int, float, complex, str, bytes, type(None)))
_MANY = 512
"""Items of a list or tuple from which on `cannot_change` looks at them, in a tenth of the time of packing."""
_DEPTH = 4


def _count_of_one() -> int:
    value: list[Any] = []
    return sys.getrefcount(value)


ALONE = _count_of_one()
"""What `sys.getrefcount` returns for an object that only one local variable refers to."""


def cannot_change(references: int, value: Any) -> bool:
    """Return whether a value is long and nothing can change it; False if that is not known.

    ``references`` is `sys.getrefcount` of the value where one variable refers to it.
    """
    kind = type(value)
    if kind is tuple or (kind is list and references <= ALONE):
        return len(value) >= _MANY and _are_constant(value)
    return kind is torch.Tensor and references <= ALONE and _owns_its_memory(value)


def _are_constant(level: Any) -> bool:
    """Return whether all items are constants, or tuples of these."""
    for _ in range(_DEPTH):
        kinds = set(map(type, level)) - _CONSTANT
        if not kinds:
            return True
        if kinds != {tuple}:
            return False
        level = list(chain.from_iterable(each for each in level if type(each) is tuple))
    return False


def _holders(tensor: Any) -> tuple[int, ...]:
    """Return how often a tensor and its memory are referred to, from Python and from C++."""
    storage = tensor.untyped_storage()
    counts = torch_private.storage_use_count(storage._cdata), tensor._use_count()
    return sys.getrefcount(storage), weakref.getweakrefcount(tensor), *counts


_ONE_HOLDER = _holders(torch.empty(1))


def _owns_its_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on the CPU is long, and no other tensor, array, storage or graph refers to its memory."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.nbytes <= SHORT_NBYTES:
        return False
    if tensor.requires_grad or tensor._base is not None or _holders(tensor) != _ONE_HOLDER:
        return False
    storage = tensor.untyped_storage()
    # The memory of an array or a buffer has one holder, and cannot be resized.
    return storage.resizable() and not storage.is_shared()
