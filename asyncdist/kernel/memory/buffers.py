"""Tensors as flat, contiguous memory, which can be addressed as bytes and as elements without a copy.

A schedule works on `Memory`: a range of a tensor's elements, as a `memoryview` for the wire and as a tensor for
arithmetic; both are created on first use. `TensorBlocks` splits a memory into numbered blocks.
`input_memory` and `OutputTensor` turn a user's tensor of any layout into a memory, and write the result back.
`copy_overlapping_inputs` copies inputs that overlap outputs. `Scratch` keeps buffers for reuse.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.kernel.memory.user_modes import why_not_communicated
from asyncdist.kernel.torch_private import increment_version

# The number of a dtype on the wire is its position in this list, so new dtypes are appended.
_DTYPE_NAMES = """uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16
float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64 float4_e2m1fn_x2
bcomplex32""".split()
DTYPE_NUMBERS: dict[torch.dtype, int] = {
    getattr(torch, name): number for number, name in enumerate(_DTYPE_NAMES, start=1) if hasattr(torch, name)
}
DTYPES: dict[int, torch.dtype] = {number: dtype for dtype, number in DTYPE_NUMBERS.items()}

_EMPTY = memoryview(bytearray())
# Bytes that a `Scratch` keeps for reuse.
_SCRATCH_NBYTES = 8 << 20


class Memory:
    """A range of elements of one flat tensor.

    ``wire`` is the dtype in which peers send contributions to this memory; None means the dtype of the memory.
    """

    __slots__ = ("_base", "count", "dtype", "frame", "itemsize", "nbytes", "start", "stop", "tensor", "view", "wire")

    # Slots that are empty until their first use: a property would enter a function in each use.
    tensor: torch.Tensor
    """The memory as a tensor, which is one-dimensional and contiguous."""
    view: memoryview
    """The memory as writable bytes."""

    def __init__(self, tensor: torch.Tensor, *, wire: torch.dtype | None = None) -> None:
        if tensor.is_inference():
            tensor = outside_inference_mode(tensor)
        self._base: Memory | None = None
        self.tensor = tensor
        self.dtype = dtype = tensor.dtype
        self.itemsize = dtype.itemsize
        self.start, self.stop = 0, tensor.numel()
        self.count = self.stop
        self.nbytes = self.count * self.itemsize
        self.wire = wire
        self.frame: bytearray | None = None
        """The memory with room for a header before it, if there is any."""

    @classmethod
    def framed(cls, room: int, count: int, dtype: torch.dtype) -> Memory:
        """Return new memory behind ``room`` bytes, unless it is empty or they would leave it unaligned."""
        if not count or room % dtype.itemsize:
            return cls(torch.empty(count, dtype=dtype, device="cpu"))
        frame = bytearray(room + count * dtype.itemsize)
        memory = cls(torch.frombuffer(frame, dtype=torch.uint8)[room:].view(dtype))
        memory.view, memory.frame = memoryview(frame)[room:], frame
        return memory

    @classmethod
    def unbound(cls, count: int, dtype: torch.dtype) -> Memory:
        """Return memory of ``count`` elements for the tensors of several calls in turn.

        The caller sets ``view``, for this memory and each range of it, to what `view_at` returns, and ``tensor``.
        """
        memory = cls.__new__(cls)
        memory._base = memory.wire = memory.frame = None
        memory.dtype, memory.itemsize = dtype, dtype.itemsize
        memory.start, memory.stop, memory.count = 0, count, count
        memory.nbytes = count * memory.itemsize
        return memory

    def located(self) -> tuple[Memory, int]:
        """Return the memory of the whole tensor of which this is a range, and the offset in it in bytes."""
        memory, offset = self, 0
        while memory._base is not None:
            offset += memory.start * memory.itemsize
            memory = memory._base
        return memory, offset

    def slice(self, start: int, stop: int) -> Memory:
        """Return the elements ``start`` to ``stop`` of this memory."""
        part = Memory.__new__(Memory)
        part._base = self
        part.dtype, part.itemsize, part.wire, part.frame = self.dtype, self.itemsize, self.wire, None
        part.start, part.stop, part.count = start, stop, stop - start
        part.nbytes = part.count * part.itemsize
        return part

    def __getattr__(self, name: str) -> Any:
        """Make ``tensor`` or ``view``, whose slot is empty."""
        if name == "tensor" and self._base is not None:
            self.tensor = made = self._base.tensor[self.start : self.stop]
            return made
        if name != "view":
            raise AttributeError(name)
        base, itemsize = self._base, self.itemsize
        view = _bytes_of(self.tensor) if base is None else base.view[self.start * itemsize : self.stop * itemsize]
        self.view = view
        return view

    @property
    def raw(self) -> torch.Tensor:
        """The elements as uint8, for copies: torch has no copy kernel for some dtypes."""
        return self.tensor.view(torch.uint8)

    @property
    def address(self) -> int:
        base = self._base
        return self.tensor.data_ptr() if base is None else base.address + self.start * self.itemsize

    def __repr__(self) -> str:
        return f"<Memory {self.count} x {self.dtype}>"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory as bytes, which keep the tensor alive.

    This does not use numpy: FSDP resizes tensors, and a tensor that shares its memory with numpy cannot be resized.
    """
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return _EMPTY
    if not tensor.is_cpu:
        raise UsageError(
            f"this operation needs a tensor in host memory, and got one on {tensor.device}: move it with .cpu()"
        )
    address = tensor.data_ptr()
    if not address:
        raise UnsupportedError(why_not_communicated(tensor) or "this tensor has no memory")
    shown: Any = (ctypes.c_char * nbytes).from_address(address)
    shown.tensor = tensor
    return memoryview(shown).cast("B")


@lru_cache(maxsize=1024)
def view_at(address: int, nbytes: int) -> memoryview:
    """Return memory as bytes, which do not keep it alive: the caller does, while anything uses them."""
    if nbytes == 0:
        return _EMPTY
    shown: Any = (ctypes.c_char * nbytes).from_address(address)
    return memoryview(shown).cast("B")


def outside_inference_mode(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of an inference tensor as a tensor that can be written outside of inference mode."""
    with torch.inference_mode(False):
        if tensor.numel() == 0:
            return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        # Unlike numpy's arrays, these also share the memory of devices.
        return torch.utils.dlpack.from_dlpack(tensor.view(torch.uint8)).view(tensor.dtype)


NOTHING = Memory(torch.empty(0, dtype=torch.uint8, device="cpu"))


class TensorBlocks:
    """One memory in numbered blocks: ``blocks[i]`` is one block, ``blocks[low:high]`` a range of blocks as one memory."""

    __slots__ = ("_bounds", "_memory", "_single")

    def __init__(self, memory: Memory, bounds: Sequence[int]) -> None:
        self._memory = memory
        self._bounds = bounds
        self._single: list[Memory | None] = [None] * (len(bounds) - 1)

    @classmethod
    def split(cls, memory: Memory, parts: int) -> TensorBlocks:
        """Split a memory into ``parts`` blocks whose sizes differ by at most one element."""
        return cls(memory, [memory.count * part // parts for part in range(parts + 1)])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, which: int | slice) -> Memory:
        if isinstance(which, slice):
            low, high, _ = which.indices(len(self))
            return self._memory.slice(self._bounds[low], self._bounds[high])
        block = self._single[which]
        if block is None:
            block = self._single[which] = self._memory.slice(self._bounds[which], self._bounds[which + 1])
        return block


Places = TypeVar("Places", bound=Sequence[Memory] | TensorBlocks)


def copy_overlapping_inputs(
    read: Places, written: Sequence[Memory] | TensorBlocks, own: Mapping[int, int]
) -> Places | list[Memory]:
    """Return the inputs of an operation, with a copy of each that overlaps an output; see `overlapping_inputs`."""
    inputs = [read[number] for number in range(len(read))]
    outputs = [written[number] for number in range(len(written))]
    overlapping = overlapping_inputs([_range_of(each) for each in inputs], [_range_of(each) for each in outputs], own)
    if not overlapping:
        return read
    for number in overlapping:
        inputs[number] = Memory(inputs[number].tensor.clone(), wire=inputs[number].wire)
    return inputs


def _range_of(memory: Memory) -> tuple[int, int]:
    start = memory.address
    return start, start + memory.nbytes


def overlapping_inputs(
    read: Sequence[tuple[int, int]], written: Sequence[tuple[int, int]], own: Mapping[int, int]
) -> list[int]:
    """Return the numbers of the inputs that overlap outputs, from the addresses at which each begins and ends.

    Transports read and write blocks in different orders, and peers may read inputs in place. Every transport supports one
    overlap, a rank's own block: if ``own[i] = j``, ``read[i]`` may be ``written[j]``, but not a part of it.
    """
    outputs = sorted((start, stop, number) for number, (start, stop) in enumerate(written) if start < stop)
    starts, stops = [output[0] for output in outputs], [output[1] for output in outputs]
    overlapping = []
    for number, (start, stop) in enumerate(read):
        hit = outputs[bisect_right(stops, start) : bisect_left(starts, stop)]
        if hit and start < stop and hit != [(start, stop, own.get(number))]:
            overlapping.append(number)
    return overlapping


def copy_overlapping_rows(rows: Sequence[tuple[Places, Memory]], size: int, rank: int) -> list[tuple[Places, Memory]]:
    """Return the rows of an all-gather, (blocks, own input) each, with a copy of each input that a row also writes."""
    places = [blocks[each] for blocks, _ in rows for each in range(size)]
    own = {row: row * size + rank for row in range(len(rows))}
    inputs = copy_overlapping_inputs([memory for _, memory in rows], places, own)
    return [(blocks, memory) for (blocks, _), memory in zip(rows, inputs, strict=True)]


# -- contiguous tensors ---------------------------------------------------------------------------


def flat_memory(tensor: torch.Tensor) -> Memory:
    """Return the memory of a contiguous tensor.

    torch calls a tensor of one element contiguous with any stride, but views it as bytes only with stride 1.
    """
    return Memory(tensor if tensor.dim() == 1 and tensor.stride(0) == 1 else tensor.as_strided((tensor.numel(),), (1,)))


def block_memories(blocks: torch.Tensor | Sequence[torch.Tensor] | None, size: int) -> list[Memory]:
    """Return the memory of ``size`` blocks: of contiguous tensors, or of equal parts of one; an empty list for None."""
    if isinstance(blocks, torch.Tensor):
        parts = TensorBlocks.split(flat_memory(blocks), size)
        return [parts[index] for index in range(size)]
    return [flat_memory(tensor) for tensor in blocks or ()]


# -- a user's tensor ------------------------------------------------------------------------------


def tensor_of(value: Any, *, written: bool = False) -> torch.Tensor:
    """Return a tensor or numpy array as a dense tensor that shares its memory and requires no gradient.

    Raises:
        UsageError: ``value`` is neither, or it is a read-only array that would be ``written``.
        UnsupportedError: No transport carries its device, layout or dtype.
    """
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            if written:
                raise UsageError("this numpy array is read-only, and the operation writes into it: pass a copy")
            value = value.copy()
        try:
            value = torch.from_numpy(value)
        except (TypeError, ValueError) as cause:
            raise UnsupportedError(f"this numpy array cannot be communicated: {cause}") from cause
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"a tensor or numpy array is needed here, not {type(value).__name__}")
    if not (value.is_cpu or value.is_cuda):
        advice = "it has no values, so make one that has some" if value.is_meta else "move it with .cpu() first"
        raise UnsupportedError(f"no transport here carries tensors on {value.device}: {advice}")
    if value.layout is not torch.strided:
        raise UnsupportedError(f"a {value.layout} tensor cannot be communicated: call .to_dense() first")
    if value.dtype not in DTYPE_NUMBERS:
        raise _unsupported(value.dtype)
    if value.is_nested:
        raise UnsupportedError("a nested tensor cannot be communicated: pass its unbind()")
    reason = why_not_communicated(value)
    if reason is not None:
        raise UnsupportedError(reason)
    return value.detach() if value.requires_grad else value


def dtype_number(dtype: torch.dtype) -> int:
    """Return the number of a dtype on the wire. Raises UnsupportedError if it has none."""
    try:
        return DTYPE_NUMBERS[dtype]
    except KeyError:
        raise _unsupported(dtype) from None


def _unsupported(dtype: torch.dtype) -> UnsupportedError:
    return UnsupportedError(f"tensors of {dtype} cannot be communicated")


def input_memory(value: Any) -> Memory:
    """Return the memory of a tensor or numpy array; of a copy if it is not contiguous, conjugated or negated."""
    return flat_memory(_contiguous(tensor_of(value)))


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the memory holds the negatives or conjugates of the tensor's elements."""
    return tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj())


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.resolve_conj().resolve_neg() if _is_lazy(tensor) else tensor).contiguous()


class OutputTensor:
    """A user's tensor that an operation writes, and may read first.

    ``memory`` is the tensor's own if it is contiguous, else a copy (``copied``). After the operation the caller calls
    `store`, which writes a copy back and increments autograd's version of the tensor. Raises UsageError if several
    elements of the tensor share one memory location.
    """

    __slots__ = ("copied", "memory", "tensor")

    def __init__(self, value: Any) -> None:
        # Detached: autograd may adopt the caller's tensor as a result while the operation still adds to it.
        self.tensor = tensor = tensor_of(value, written=True).detach()
        self.copied = not tensor.is_contiguous() or _is_lazy(tensor)
        if self.copied:
            if _overlaps_itself(tensor):
                raise UsageError(
                    "several elements of this expanded or unfolded tensor share one memory location: pass .clone()"
                )
            tensor = _contiguous(tensor)
        self.memory = flat_memory(tensor)

    def store(self) -> None:
        increment_version((self.tensor,))
        if self.copied:
            with torch.inference_mode(self.tensor.is_inference()):
                self.tensor.copy_(self.memory.tensor.view(self.tensor.shape))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    dimensions = sorted(each for each in zip(tensor.stride(), tensor.shape, strict=True) if each[1] > 1)
    if not tensor.numel() or not dimensions:
        return False
    reach, nested = 0, True
    for stride, count in dimensions:
        # The stride steps over everything that the smaller strides reach.
        nested = nested and stride > reach
        reach += stride * (count - 1)
    if nested or dimensions[0][0] == 0:
        return not nested
    marks = torch.zeros(reach + 1, dtype=torch.bool, device="cpu")
    marks.as_strided(tensor.shape, tensor.stride()).fill_(True)
    return int(marks.count_nonzero()) < tensor.numel()


# -- scratch --------------------------------------------------------------------------------------


class Scratch:
    """Reusable buffers for partial results, by their exact size, because programs repeat the same operations.

    It keeps at most `_SCRATCH_NBYTES` and drops all buffers when the limit is exceeded.
    """

    def __init__(self) -> None:
        self._kept_nbytes = 0
        self._free: dict[tuple[int, torch.dtype], list[Memory]] = {}

    def take(self, count: int, dtype: torch.dtype) -> Memory:
        """Return memory of ``count`` elements with undefined content; return it with `give`."""
        try:
            memory = self._free[count, dtype].pop()
        except (KeyError, IndexError):
            return Memory(torch.empty(count, dtype=dtype, device="cpu"))
        self._kept_nbytes -= memory.nbytes
        return memory

    def give(self, memory: Memory) -> None:
        """Take back memory of `take`. The caller no longer uses it."""
        nbytes = memory.nbytes
        if self._kept_nbytes + nbytes > _SCRATCH_NBYTES:
            self._free.clear()
            self._kept_nbytes = 0
            if nbytes > _SCRATCH_NBYTES:
                return
        self._kept_nbytes += nbytes
        self._free.setdefault((memory.count, memory.dtype), []).append(memory)
