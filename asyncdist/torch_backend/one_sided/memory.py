"""Tensors that peers may read and write, views of them, and the descriptors by which peers name them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgpack
import torch

from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.kernel import flat_memory, tensor_of

_DESCRIPTOR, _ENDPOINT = "asyncdist memory 1", "asyncdist endpoint 1"
"""The first bytes of a descriptor and of an endpoint: kind and version."""


def pack_endpoint(address: Sequence[Any], token: str) -> bytes:
    """Return where an endpoint listens, and the secret that a peer proves, as bytes."""
    packed: bytes = msgpack.packb([_ENDPOINT, address, token])
    return packed


def unpack_endpoint(data: bytes) -> tuple[Any, str]:
    """Return the address and the secret of an endpoint. Raises UsageError for other bytes."""
    address, token = _unpack(data, _ENDPOINT, 2, "what bind() of an asyncdist transport has returned")
    if not isinstance(token, str):
        raise UsageError("an endpoint without its secret: pass what bind() has returned, unchanged")
    return address, token


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Names registered memory for peers: send them ``serialize()``, and they call ``deserialize``.

    It has no address and no content. A peer needs the bytes of `OneSidedTransport.bind`, too, to reach the memory.

    Attributes:
        port: The endpoint that has registered the memory.
        number: The registration. The endpoint uses no number twice.
        nbytes: The bytes that a peer may read and write.
    """

    port: str
    number: int
    nbytes: int

    def serialize(self) -> bytes:
        """Return the descriptor as msgpack, which decodes without running code."""
        packed: bytes = msgpack.packb([_DESCRIPTOR, self.port, self.number, self.nbytes])
        return packed

    @classmethod
    def deserialize(cls, data: bytes) -> RemoteMemory:
        """Return a descriptor. Raises UsageError if the bytes are not of this version."""
        port, number, nbytes = _unpack(data, _DESCRIPTOR, 3, "serialize() of a descriptor of an asyncdist transport")
        if type(port) is not str or type(number) is not int or type(nbytes) is not int or number < 0 or nbytes < 0:
            raise UsageError("a descriptor whose fields are damaged: pass on what serialize() has returned, unchanged")
        return cls(port, number, nbytes)


def _unpack(data: bytes, kind: str, count: int, expected: str) -> list[Any]:
    if type(data) is not bytes:
        raise UsageError(f"{expected} are bytes, not {type(data).__name__}")
    fields: list[Any]
    try:
        found, *fields = msgpack.unpackb(data)
    except (TypeError, ValueError, msgpack.UnpackException) as cause:
        raise UsageError(f"these {len(data)} bytes are not {expected}: {cause}") from cause
    if found != kind or len(fields) != count:
        raise UsageError(
            f"these {len(data)} bytes are not {expected}: both processes need the same version of asyncdist"
        )
    return fields


class Registration:
    """A tensor that peers may read and write until it is unregistered. It keeps the tensor's memory.

    Attributes:
        number: Its number in descriptors.
        view: The tensor's memory.
        is_active: Whether it may be used.
    """

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number, self.tensor = number, tensor
        self.view = flat_memory(tensor_of(tensor)).view
        self.address, self.nbytes = tensor.data_ptr(), self.view.nbytes
        self.is_active = True

    @staticmethod
    def check(tensor: object) -> torch.Tensor:
        """Return a tensor that can be registered. Raises UsageError and UnsupportedError."""
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a tensor is registered, not {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise UnsupportedError(
                f"this transport moves host memory, not that of {tensor.device}: register tensor.cpu(), or use "
                "torch's transport 'nixl'"
            )
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            raise UsageError("a contiguous tensor is registered: register tensor.contiguous(), and copy it back")
        if tensor.numel() == 0:
            raise UsageError("an empty tensor cannot be registered: it has no memory")
        # Refuses tensors without memory of their own, such as fake ones.
        tensor_of(tensor)
        return tensor

    def check_use(self) -> None:
        """Raise UsageError if the memory is not registered any more, or is not the tensor's any more."""
        if not self.is_active:
            raise UsageError("this memory is not registered any more: register the tensor again")
        if (self.tensor.data_ptr(), self.tensor.nbytes) != (self.address, self.nbytes):
            raise UsageError("the registered tensor was resized, or has other memory: register it again")


class Registrar(Protocol):
    def describe(self, registration: Registration) -> RemoteMemory: ...


class LocalView:
    """A range of bytes of registered memory: the source of a write."""

    __slots__ = ("nbytes", "offset", "owner", "registration")

    def __init__(self, owner: Registrar, registration: Registration, offset: int, nbytes: int) -> None:
        self.owner, self.registration = owner, registration
        self.offset, self.nbytes = offset, nbytes

    def size(self) -> int:
        """Return the number of bytes."""
        return self.nbytes

    @property
    def address(self) -> int:
        return self.registration.address + self.offset

    @property
    def bytes(self) -> memoryview:
        return self.registration.view[self.offset : self.offset + self.nbytes]


class MutableLocalView(LocalView):
    """A range of bytes of registered memory that a read may write."""

    __slots__ = ()
    writable: Literal[True] = True


class LocalMemory:
    """A registered tensor, as `OneSidedTransport.register_memory` returns it."""

    def __init__(self, owner: Registrar, registration: Registration) -> None:
        self.owner, self.registration = owner, registration

    def to_view(self, offset: int | None = None, length: int | None = None) -> LocalView:
        """Return ``length`` bytes from the byte ``offset`` on; by default all. Raises UsageError beyond the tensor."""
        return LocalView(self.owner, self.registration, *self._range(offset, length))

    def to_mutable_view(self, offset: int | None = None, length: int | None = None) -> MutableLocalView:
        """Return a range as in `to_view`, which may be written."""
        return MutableLocalView(self.owner, self.registration, *self._range(offset, length))

    def to_remote_buffer(self, *, timeout: float | None = None) -> RemoteMemory:
        """Return the descriptor that peers need."""
        self.registration.check_use()
        return self.owner.describe(self.registration)

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.registration.check_use()
        nbytes = self.registration.nbytes
        first = 0 if offset is None else operator.index(offset)
        count = nbytes - first if length is None else operator.index(length)
        if first < 0 or count < 0 or first + count > nbytes:
            raise UsageError(f"{count} bytes from byte {first} on, of registered memory of {nbytes} bytes")
        return first, count
