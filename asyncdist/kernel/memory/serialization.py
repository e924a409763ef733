"""Serialization of objects: plain data, tensors and arrays as bytes, without pickle.

It carries None, bool, int, float, complex, str, bytes (bytearrays arrive as bytes), list, tuple, dict (with any of these as
keys), OrderedDict, set, dense CPU tensors and parameters of any dtype, and numpy arrays (a memmap arrives as an array) and
scalars of plain dtypes. Tuples, sets and ordered dictionaries may be nested 32 levels deep, lists and dicts 500. With
``weights_only=True`` it also carries what ``torch.load(weights_only=True)`` reads: sparse tensors, and classes added with
``torch.serialization.add_safe_globals``. Other objects, which include those of other subclasses of these types, need
pickle, which executes code of the sender. They require ``ASYNCDIST_ALLOW_PICKLE=1`` and exclude ``weights_only=True``.

The content of long tensors, arrays and bytes travels next to the packed bytes if the caller collects it (`Beside`). It is
not copied then: copying gigabytes would hold the interpreter for seconds. An `Extension` carries further objects, or
carries these otherwise.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import is_
from typing import Any, Protocol

import msgpack
import numpy as np
import torch

from asyncdist.errors import AsyncdistError, ProtocolError, UsageError
from asyncdist.kernel.memory.buffers import DTYPE_NUMBERS, DTYPES, input_memory, tensor_of

# Greatest depth of nested tuples and sets. Each level takes 40 KB of the reader's stack.
_MAX_DEPTH = 32
_TENSOR, _ARRAY, _TUPLE, _SET, _COMPLEX, _INTEGER, _PICKLE, _SAVED, EXTENDED, _ORDERED, _BYTES = range(1, 12)
_REQUIRES_GRAD, _PARAMETER = 1, 2

LONG_NBYTES = 64 << 10
"""The least bytes of a tensor, an array or bytes that travel next to the packed bytes: it takes less time to copy fewer."""
_MOST_SEARCHED = 1024
"""The most objects among which `set_apart` looks for long bytes."""
_PIECE_NBYTES = 1 << 20
_COST_OF_OTHERS = 8
"""The time to pack a tensor, an array, a number or a foreign object, in units of the time for a tuple: about 1 µs."""
LONG_BYTES_MARK = bytes((0xD6, _BYTES))
"""Where `LongBytes` are packed, this is among the packed bytes: the head of an extension of msgpack with four bytes."""


class Extension(Protocol):
    """Carries objects that plain data does not have, or that shall travel otherwise."""

    def encode(self, part: Any) -> Any:
        """Return plain data that stands for an object; None for an object that it does not carry."""

    def decode(self, stand_in: Any) -> Any:
        """Return the object for which plain data stands. Any error means that the bytes are damaged."""


class Beside:
    """Collects the buffers that travel next to the packed bytes.

    Args:
        snapshot: Copy memory that the program may change before it is sent.
    """

    def __init__(self, *, snapshot: bool = False) -> None:
        self.buffers: list[Any] = []
        self.snapshot = snapshot

    def add(self, buffer: Any) -> int:
        """Add a buffer, and return its number."""
        self.buffers.append(buffer)
        return len(self.buffers) - 1


class TakesLong(Exception):
    """Packing an object takes longer than its caller allows."""


class LongBytes:
    """Stands for bytes that travel next to the packed bytes: msgpack would copy them."""

    __slots__ = ("content",)

    def __init__(self, content: bytes) -> None:
        self.content = content


def set_apart(value: Any, most: int = _MOST_SEARCHED) -> Any:
    """Return an object with `LongBytes` in place of the long bytes in it; the same object if it has none.

    It looks at most at ``most`` objects in lists, tuples and dicts. Other long bytes are copied.
    """
    left = most

    def search(part: Any) -> Any:
        nonlocal left
        kind = type(part)
        if kind is bytes:
            return LongBytes(part) if len(part) >= LONG_NBYTES else part
        if kind not in (list, tuple, dict) or len(part) > left:
            return part
        left -= len(part)
        inner = part.values() if kind is dict else part
        items = [search(each) for each in inner]
        if all(map(is_, items, inner)):
            return part
        return dict(zip(part, items, strict=True)) if kind is dict else kind(items)

    return search(value)


# -- what is carried as it is ---------------------------------------------------------------------


PLAIN_TENSORS: set[type[torch.Tensor]] = {torch.Tensor, torch.nn.Parameter}
"""The types of tensors that are carried. Those of other types may be more than their elements."""


def carries_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than its dtype, shape and elements."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPE_NUMBERS
        and not tensor.is_nested
        and not tensor.is_meta
    )


def carries_array(part: Any) -> bool:
    """Return whether an object is an array or scalar of numpy that is no more than its dtype, shape and elements."""
    # A masked array also has a mask, and a matrix has another product.
    if type(part) not in (np.ndarray, np.memmap) and not (
        isinstance(part, np.generic) and type(part) is part.dtype.type
    ):
        return False
    return part.dtype.kind in "biufcSUmM"


def flags_of(tensor: torch.Tensor) -> int:
    """Return what `with_flags` restores."""
    return _REQUIRES_GRAD * tensor.requires_grad + _PARAMETER * (type(tensor) is torch.nn.Parameter)


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Return a tensor that has arrived as what it was: a parameter, or a tensor that may require a gradient."""
    requires_grad = bool(flags & _REQUIRES_GRAD)
    return torch.nn.Parameter(tensor, requires_grad) if flags & _PARAMETER else tensor.requires_grad_(requires_grad)


# -- packing --------------------------------------------------------------------------------------


def pack(
    value: Any,
    *,
    allow_pickle: bool,
    weights_only: bool = False,
    extension: Extension | None = None,
    beside: Beside | None = None,
    most: float = inf,
) -> bytes:
    """Return an object as bytes. Raises UsageError, which names the type, for an object that needs pickle.

    Args:
        allow_pickle: Whether objects may be pickled.
        weights_only: Whether objects may be saved as for ``torch.load(weights_only=True)``, and none is pickled.
        extension: Carries further objects.
        beside: Collects the content of long tensors, arrays and bytes; None packs it too.
        most: The most tuples, or other parts that take as long together, after which it raises `TakesLong`. Parts that
            msgpack has, and an object with a pickle, have no limit.
    """
    try:
        packing = _Packing(allow_pickle, weights_only, extension, beside, most)
        return packing.encode(value if beside is None else set_apart(value))
    except UsageError:
        raise
    except (ValueError, RecursionError) as cause:
        what = "an object that is nested too deeply, or contains itself, cannot be sent"
        if "too large" in str(cause):
            what = (
                "an object cannot be sent: a str, a tuple, a set, and bytes deep inside others have less than 4 GiB, "
                "lists and dicts less than 2**32 items; send it in parts"
            )
        raise UsageError(f"{what}: {cause}") from cause


@dataclass(slots=True)
class _Packing:
    """Packs one object."""

    _allow_pickle: bool
    _weights_only: bool
    _extension: Extension | None
    _beside: Beside | None
    _left: float
    _depth: int = 0
    _packers: list[msgpack.Packer] = field(default_factory=list)
    """One for each depth, because a packer packs one object at a time. Making one takes longer than packing a tuple."""

    def encode(self, part: Any) -> bytes:
        depth = self._depth
        if depth == len(self._packers):
            if depth == _MAX_DEPTH:
                raise RecursionError
            packer = msgpack.Packer(default=self._extend, strict_types=True, unicode_errors="surrogatepass")
            self._packers.append(packer)
        packer = self._packers[depth]
        self._depth = depth + 1
        try:
            packed: bytes = packer.pack(part)
        # msgpack has no integers of more than 64 bits.
        except OverflowError:
            packer.reset()
            packed = packer.pack(_with_large_integers(part))
        self._depth = depth
        return packed

    def _extend(self, part: Any) -> msgpack.ExtType:
        kind = type(part)
        self._left -= 1 if kind is tuple else _COST_OF_OTHERS
        if self._left < 0:
            raise TakesLong
        if kind is tuple:
            return msgpack.ExtType(_TUPLE, self.encode(list(part)))
        extension = self._extension
        if extension is not None and (stand_in := extension.encode(part)) is not None:
            return msgpack.ExtType(EXTENDED, self.encode(stand_in))
        if isinstance(part, torch.Tensor) and carries_tensor(part) and (part.is_cpu or not self._weights_only):
            content = self._content(input_memory(part).view)
            return msgpack.ExtType(
                _TENSOR, msgpack.packb((DTYPE_NUMBERS[part.dtype], tuple(part.shape), flags_of(part), content))
            )
        if carries_array(part):
            flat = np.ascontiguousarray(part)
            content = self._content(flat.reshape(-1).view(np.uint8).data if flat.nbytes else memoryview(b""))
            is_array = not isinstance(part, np.generic)
            return msgpack.ExtType(_ARRAY, msgpack.packb((flat.dtype.str, part.shape, is_array, content)))
        if kind is set:
            return msgpack.ExtType(_SET, self.encode(list(part)))
        if kind is OrderedDict:
            # The state dict of a module has an attribute.
            return msgpack.ExtType(_ORDERED, self.encode([[*part], [*part.values()], vars(part)]))
        if kind is complex:
            return msgpack.ExtType(_COMPLEX, msgpack.packb((part.real, part.imag)))
        if kind is int:
            return _integer(part)
        if kind is LongBytes and self._beside is not None:
            return msgpack.ExtType(_BYTES, self._beside.add(memoryview(part.content)).to_bytes(4, "little"))
        return self._foreign(part)

    def _content(self, memory: memoryview) -> memoryview | int:
        """Return the bytes of a tensor or an array, or the number of the buffer in which they travel."""
        if self._beside is None or memory.nbytes < LONG_NBYTES:
            return memory
        return self._beside.add(copy_of(memory) if self._beside.snapshot else memory)

    def _foreign(self, part: Any) -> msgpack.ExtType:
        """Pack an object that is no plain data, where the user allows that."""
        if self._weights_only:
            return msgpack.ExtType(_SAVED, _save(part))
        if isinstance(part, torch.Tensor):
            _check_tensor(part)
        if self._allow_pickle:
            self._left = inf
            return msgpack.ExtType(_PICKLE, msgpack.packb(self._pickled(part)))
        # The callers with an extension have no such argument.
        restricted = "pass weights_only=True on every rank if torch.load reads it with that, or "
        raise UsageError(
            f"an object of type {_type_of(part)} cannot be sent as plain data; send its fields, or "
            f"{restricted if self._extension is None else ''}"
            "set ASYNCDIST_ALLOW_PICKLE=1 on every rank if you trust them all"
        )

    def _pickled(self, part: Any) -> tuple[bytes, Sequence[int]]:
        """Return the pickle of an object, and the numbers of the buffers in which its long content travels."""
        numbers: list[int] = []

        def is_inside(buffer: pickle.PickleBuffer) -> bool:
            content = self._content(buffer.raw())
            if isinstance(content, int):
                numbers.append(content)
            return not isinstance(content, int)

        file = io.BytesIO()
        try:
            _Pickler(file, protocol=5, buffer_callback=is_inside).dump(part)
        except AsyncdistError:
            raise
        # The object's own pickle methods may raise any error.
        except Exception as cause:
            raise UsageError(f"an object of type {_type_of(part)} cannot be pickled: {cause}") from cause
        return file.getvalue(), numbers


class _Pickler(pickle.Pickler):
    """Pickles tensors as buffers: torch copies their content several times."""

    def reducer_override(self, part: Any) -> Any:
        if type(part) is not torch.Tensor or not carries_tensor(part) or not part.is_cpu or part.nbytes < LONG_NBYTES:
            return NotImplemented
        # torch pickles what else a tensor has.
        if part.requires_grad or vars(part):
            return NotImplemented
        content = pickle.PickleBuffer(input_memory(part).view)
        return _tensor, (content, DTYPE_NUMBERS[part.dtype], tuple(part.shape))


# -- unpacking ------------------------------------------------------------------------------------


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    allow_pickle: bool,
    weights_only: bool = False,
    extension: Extension | None = None,
    beside: Sequence[Any] | None = (),
) -> Any:
    """Return the object that `pack` wrote. Raises ProtocolError for other bytes, and for a pickle that is not allowed.

    Args:
        data: What `pack` returned.
        allow_pickle: Whether pickles are read.
        weights_only: The argument of `pack`.
        extension: Carries further objects.
        beside: The buffers that travelled next to it, whose memory the tensors and arrays share; None if they are not
            wanted, and the objects that are made of them are missing.
    """
    try:
        return _Unpacking(allow_pickle, weights_only, extension, beside).decode(data)
    except ProtocolError:
        raise
    # torch, numpy and msgpack raise many types of errors for foreign bytes.
    except Exception as cause:
        raise ProtocolError(f"an object that cannot be read: {type(cause).__name__}: {cause}") from cause


@dataclass(slots=True)
class _Unpacking:
    """Unpacks one object."""

    _allow_pickle: bool
    _weights_only: bool
    _extension: Extension | None
    _beside: Sequence[Any] | None
    _depth: int = 0

    def decode(self, body: bytes | bytearray | memoryview) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ProtocolError(f"an object with more than {_MAX_DEPTH} tuples or sets inside one another")
        value = msgpack.unpackb(body, ext_hook=self._restore, strict_map_key=False, unicode_errors="surrogatepass")
        self._depth -= 1
        return value

    def _restore(self, code: int, body: bytes) -> Any:
        if code == _TUPLE:
            return tuple(self.decode(body))
        if code == _TENSOR:
            number, shape, flags, content = msgpack.unpackb(body)
            content = self._found(content)
            return None if content is None else with_flags(_tensor(content, number, shape), flags)
        if code == _ARRAY:
            name, shape, is_array, content = msgpack.unpackb(body)
            content = self._found(content)
            return None if content is None else _array(content, np.dtype(str(name)), shape, is_array)
        if code == _SET:
            return set(self.decode(body))
        if code == _ORDERED:
            keys, values, attributes = self.decode(body)
            ordered = OrderedDict(zip(keys, values, strict=True))
            vars(ordered).update(attributes)
            return ordered
        if code == _COMPLEX:
            return complex(*msgpack.unpackb(body))
        if code == _INTEGER:
            return int.from_bytes(body, "little", signed=True)
        if code == _BYTES:
            content = self._found(int.from_bytes(body, "little"))
            return None if content is None else _as_bytes(content)
        if code == EXTENDED and self._extension is not None:
            return self._extension.decode(self.decode(body))
        return self._foreign(code, body)

    def _found(self, content: bytes | int) -> Any:
        """Return the content of a tensor, an array or bytes; None if it is not wanted."""
        if isinstance(content, bytes):
            return content
        return None if self._beside is None else memoryview(self._beside[content])

    def _foreign(self, code: int, body: bytes) -> Any:
        if code == _SAVED and self._weights_only:
            return _load(body)
        if code == _SAVED:
            raise ProtocolError("a peer sent this with weights_only=True: pass that on every rank")
        if code == _PICKLE and self._allow_pickle and not self._weights_only:
            pickled, numbers = msgpack.unpackb(body)
            if self._beside is None:
                return None
            return pickle.loads(pickled, buffers=[_writable(self._found(int(number))) for number in numbers])
        if code == _PICKLE:
            why = "weights_only=True was given" if self._weights_only else "ASYNCDIST_ALLOW_PICKLE is not set"
            raise ProtocolError(f"a peer sent a pickle, and {why} here")
        raise ProtocolError(f"an object of unknown kind {code}")


def _tensor(content: Any, number: int, shape: Sequence[int]) -> torch.Tensor:
    memory = _writable(memoryview(content))
    flat = (
        torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    return flat.view(DTYPES[number]).view(tuple(shape))


def _array(content: Any, dtype: np.dtype[Any], shape: Sequence[int], is_array: bool) -> Any:
    memory = _writable(memoryview(content))
    # The empty string has no bytes.
    if not dtype.itemsize and not shape:
        return dtype.type()
    flat = np.frombuffer(memory, dtype) if len(memory) else np.empty(0, dtype)
    array = flat.reshape(shape)
    return array if is_array else array[()]


def _writable(memory: memoryview) -> memoryview | bytearray:
    return bytearray(memory) if memory.readonly else memory


def copy_of(memory: memoryview) -> memoryview:
    """Return a copy. Unlike Python, torch lets other threads run while it copies."""
    copy = torch.empty(memory.nbytes, dtype=torch.uint8, device="cpu")
    np.copyto(copy.numpy(), np.frombuffer(memory, np.uint8))
    return input_memory(copy).view


def _as_bytes(memory: memoryview) -> bytes:
    """Return a copy as bytes. Other threads run between its pieces."""
    content = io.BytesIO()
    for start in range(0, memory.nbytes, _PIECE_NBYTES):
        content.write(memory[start : start + _PIECE_NBYTES])
    return content.getvalue()


def _save(part: Any) -> bytes:
    """Return the bytes that `_load` reads. Raises UsageError if it would refuse them."""
    file = io.BytesIO()
    try:
        torch.save(part, file)
        _load(file.getvalue())
    # The object's own pickle methods may raise any error.
    except Exception as cause:
        what = f"an object of type {_type_of(part)} cannot be sent with weights_only=True"
        raise UsageError(f"{what}; send its fields, or allow its type on every rank: {cause}") from cause
    return file.getvalue()


def _load(saved: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(saved), weights_only=True, mmap=False)
    except pickle.UnpicklingError as cause:
        # The rest of torch's message advises to read without weights_only.
        reason = re.search(r"WeightsUnpickler error:\s*(\S.*)", str(cause))
        raise ProtocolError(f"weights_only=True refuses it: {reason[1] if reason else cause}") from cause


def _check_tensor(tensor: torch.Tensor) -> None:
    """Raise UsageError, which names what to call, for a tensor that has no dense memory."""
    try:
        tensor_of(tensor)
    except UsageError:
        raise
    # Those of subclasses raise errors of any type.
    except Exception:
        return


def _type_of(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _integer(value: int) -> msgpack.ExtType:
    return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _with_large_integers(part: Any) -> Any:
    """Return the same data with integers of more than 64 bits as extension values."""
    if type(part) is int and not -(1 << 63) <= part < 1 << 64:
        return _integer(part)
    if type(part) is list:
        return [_with_large_integers(item) for item in part]
    if type(part) is dict:
        return {_with_large_integers(key): _with_large_integers(item) for key, item in part.items()}
    return part
