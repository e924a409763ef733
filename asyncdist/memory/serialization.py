"""Serialization for the object collectives: plain data, tensors and arrays as bytes, without pickle.

It carries None, bool, int, float, complex, str, bytes (bytearrays arrive as bytes), list, tuple, dict (with any of these as
keys), set, dense CPU tensors of any dtype, and numpy arrays and scalars of plain dtypes. Tuples and sets may be nested 32
levels deep, lists and dicts 500. With ``weights_only=True`` it also carries what ``torch.load(weights_only=True)`` reads:
ordered dictionaries, parameters, sparse tensors, and classes added with ``torch.serialization.add_safe_globals``. Other
objects need pickle, which executes code of the sender. They require ``ASYNCDIST_ALLOW_PICKLE=1`` and exclude
``weights_only=True``.

An `Extension` carries further objects, and tensors outside of the bytes.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, Protocol

import msgpack
import numpy as np
import torch

from asyncdist.errors import AsyncdistError, ProtocolError, UsageError
from asyncdist.memory.buffers import DTYPE_NUMBERS, DTYPES, input_memory

# Greatest depth of nested tuples and sets. Each level takes 40 KB of the reader's stack.
_MAX_DEPTH = 32
_TENSOR, _ARRAY, _TUPLE, _SET, _COMPLEX, _INTEGER, _PICKLE, _SAVED, EXTENDED = range(1, 10)


class Extension(Protocol):
    """Carries objects that plain data does not have, or that shall travel otherwise."""

    def encode(self, part: Any) -> Any:
        """Return plain data that stands for an object; None for an object that it does not carry."""

    def decode(self, stand_in: Any) -> Any:
        """Return the object for which plain data stands. Any error means that the bytes are damaged."""


def pack(value: Any, *, allow_pickle: bool, weights_only: bool = False, extension: Extension | None = None) -> bytes:
    """Return an object as bytes. Raises UsageError, which names the type, for an object that needs pickle."""
    depth = 0

    def extend(part: Any) -> msgpack.ExtType:
        if extension is not None and (stand_in := extension.encode(part)) is not None:
            return msgpack.ExtType(EXTENDED, encode(stand_in))
        if isinstance(part, torch.Tensor) and (not weights_only or _is_plain(part)):
            memory = input_memory(part)
            head = (DTYPE_NUMBERS[part.dtype], tuple(part.shape), part.requires_grad, memory.view)
            return msgpack.ExtType(_TENSOR, msgpack.packb(head))
        if isinstance(part, (np.ndarray, np.generic)) and part.dtype.kind in "biufcSUmM":
            flat = np.ascontiguousarray(part)
            return msgpack.ExtType(_ARRAY, msgpack.packb((flat.dtype.str, part.shape, flat.tobytes())))
        if type(part) is tuple:
            return msgpack.ExtType(_TUPLE, encode(list(part)))
        if type(part) is set:
            return msgpack.ExtType(_SET, encode(list(part)))
        if type(part) is complex:
            return msgpack.ExtType(_COMPLEX, msgpack.packb((part.real, part.imag)))
        if type(part) is int:
            return _integer(part)
        if weights_only:
            return msgpack.ExtType(_SAVED, _save(part))
        if not allow_pickle:
            # The callers with an extension have no such argument.
            restricted = "pass weights_only=True on every rank if torch.load reads it with that, or "
            raise UsageError(
                f"an object of type {_type_of(part)} cannot be sent as plain data; send its fields, or "
                f"{restricted if extension is None else ''}"
                "set ASYNCDIST_ALLOW_PICKLE=1 on every rank if you trust them all"
            )
        return msgpack.ExtType(_PICKLE, _pickled(part))

    def encode(part: Any) -> bytes:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise RecursionError
        try:
            packed: bytes = _packb(part, extend)
        # msgpack has no integers of more than 64 bits.
        except OverflowError:
            packed = _packb(_with_large_integers(part), extend)
        depth -= 1
        return packed

    try:
        return encode(value)
    except UsageError:
        raise
    except (ValueError, RecursionError) as cause:
        raise UsageError(f"an object that is nested too deeply, or contains itself, cannot be sent: {cause}") from cause


def _packb(part: Any, extend: Callable[[Any], Any]) -> bytes:
    packed: bytes = msgpack.packb(part, default=extend, strict_types=True, unicode_errors="surrogatepass")
    return packed


def unpack(
    data: bytes | bytearray | memoryview,
    *,
    allow_pickle: bool,
    weights_only: bool = False,
    extension: Extension | None = None,
) -> Any:
    """Return the object that `pack` wrote. Raises ProtocolError for other bytes, and for a pickle that is not allowed."""
    depth = 0

    def restore(code: int, body: bytes) -> Any:
        if code == _TENSOR:
            number, shape, requires_grad, raw = msgpack.unpackb(body)
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else nothing
            return flat.view(DTYPES[number]).view(shape).requires_grad_(requires_grad)
        if code == _ARRAY:
            name, shape, raw = msgpack.unpackb(body)
            dtype = np.dtype(str(name))
            array = (np.frombuffer(bytearray(raw), dtype) if raw else np.empty(0, dtype)).reshape(shape)
            return array if shape else array[()]
        if code == _TUPLE:
            return tuple(decode(body))
        if code == _SET:
            return set(decode(body))
        if code == _COMPLEX:
            return complex(*msgpack.unpackb(body))
        if code == _INTEGER:
            return int.from_bytes(body, "little", signed=True)
        if code == EXTENDED and extension is not None:
            return extension.decode(decode(body))
        if code == _SAVED and weights_only:
            return _load(body)
        if code == _SAVED:
            raise ProtocolError("a peer sent this with weights_only=True: pass that on every rank")
        if code == _PICKLE and allow_pickle and not weights_only:
            return pickle.loads(body)
        if code == _PICKLE:
            why = "weights_only=True was given" if weights_only else "ASYNCDIST_ALLOW_PICKLE is not set"
            raise ProtocolError(f"a peer sent a pickle, and {why} here")
        raise ProtocolError(f"an object of unknown kind {code}")

    def decode(body: bytes | bytearray | memoryview) -> Any:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise ProtocolError(f"an object with more than {_MAX_DEPTH} tuples or sets inside one another")
        value = msgpack.unpackb(body, ext_hook=restore, strict_map_key=False, unicode_errors="surrogatepass")
        depth -= 1
        return value

    try:
        return decode(data)
    except ProtocolError:
        raise
    # torch, numpy and msgpack raise many types of errors for foreign bytes.
    except Exception as cause:
        raise ProtocolError(f"an object that cannot be read: {type(cause).__name__}: {cause}") from cause


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no state besides its shape, dtype and elements."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPE_NUMBERS
    )


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


def _pickled(part: Any) -> bytes:
    try:
        return pickle.dumps(part)
    except AsyncdistError:
        raise
    # The object's own pickle methods may raise any error.
    except Exception as cause:
        raise UsageError(f"an object of type {_type_of(part)} cannot be pickled: {cause}") from cause


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
