"""Python objects as bytes, for the object collectives: plain data, tensors and arrays, without pickle.

Carried as they are: None, bool, int, float, complex, str, bytes (as which bytearrays arrive), list, tuple, dict (any of
these as keys), set, dense CPU tensors of any dtype, numpy arrays and scalars of plain dtypes; tuples and sets up to 32
inside one another, lists and dicts up to 500. Anything else needs a pickle, which executes what a peer sent: only where
``ASYNCDIST_ALLOW_PICKLE=1`` says that every rank is trusted.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import torch

from asyncdist.buffers import DTYPE_NUMBERS, DTYPES, to_read
from asyncdist.errors import ProtocolError, UsageError

_DEPTH = 32  # of tuples and sets inside one another: each takes 40 KB of the stack to read
_TENSOR, _ARRAY, _TUPLE, _SET, _COMPLEX, _INTEGER, _PICKLE = range(1, 8)


def pack(value: Any, *, allow_pickle: bool) -> bytes:
    """Return an object as bytes; UsageError names the type of what only a pickle could carry."""
    depth = 0

    def extend(part: Any) -> msgpack.ExtType:
        if isinstance(part, torch.Tensor):
            memory = to_read(part)
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
        if not allow_pickle:
            raise UsageError(
                f"an object of type {type(part).__module__}.{type(part).__qualname__} cannot be sent as plain data; "
                "send its fields, or set ASYNCDIST_ALLOW_PICKLE=1 on every rank if you trust them all"
            )
        return msgpack.ExtType(_PICKLE, pickle.dumps(part))

    def encode(part: Any) -> bytes:
        nonlocal depth
        depth += 1
        if depth > _DEPTH:
            raise RecursionError
        try:
            packed: bytes = _packb(part, extend)
        except OverflowError:  # an int beyond 64 bits somewhere inside
            packed = _packb(_spell_integers(part), extend)
        depth -= 1
        return packed

    try:
        return encode(value)
    except UsageError:
        raise
    except (ValueError, RecursionError) as cause:
        raise UsageError(f"an object that is nested too deep, or in a circle, cannot be sent: {cause}") from cause


def _packb(part: Any, extend: Callable[[Any], Any]) -> bytes:
    packed: bytes = msgpack.packb(part, default=extend, strict_types=True, unicode_errors="surrogatepass")
    return packed


def unpack(data: bytes | bytearray | memoryview, *, allow_pickle: bool) -> Any:
    """Return the object that `pack` wrote; ProtocolError for bytes it did not write, or a pickle that is not allowed."""
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
        if code == _PICKLE and allow_pickle:
            return pickle.loads(body)
        if code == _PICKLE:
            raise ProtocolError("a peer sent a pickle, and ASYNCDIST_ALLOW_PICKLE is not set here")
        raise ProtocolError(f"an object of unknown kind {code}")

    def decode(body: bytes | bytearray | memoryview) -> Any:
        nonlocal depth
        depth += 1
        if depth > _DEPTH:
            raise ProtocolError(f"an object with more than {_DEPTH} tuples or sets inside one another")
        value = msgpack.unpackb(body, ext_hook=restore, strict_map_key=False, unicode_errors="surrogatepass")
        depth -= 1
        return value

    try:
        return decode(data)
    except ProtocolError:
        raise
    except Exception as cause:  # whatever torch, numpy and msgpack make of bytes that they did not write
        raise ProtocolError(f"an object that cannot be read: {type(cause).__name__}: {cause}") from cause


def _integer(value: int) -> msgpack.ExtType:
    return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _spell_integers(part: Any) -> Any:
    """Return the same data with integers beyond 64 bits as extension values."""
    if type(part) is int and not -(1 << 63) <= part < 1 << 64:
        return _integer(part)
    if type(part) is list:
        return [_spell_integers(item) for item in part]
    if type(part) is dict:
        return {_spell_integers(key): _spell_integers(item) for key, item in part.items()}
    return part
