"""Tensors that other processes may read and write, and the bytes by which they find and name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.kernel.memory.buffers import flat_memory, tensor_of

_DESCRIPTOR, _ENDPOINT = "asyncdist memory 1", "asyncdist endpoint 2"
"""The first bytes of a descriptor and of an endpoint: kind and version."""


def pack_endpoint(address: Sequence[Any], token: str) -> bytes:
    """Return where a port listens, and the secret that a peer proves, as bytes."""
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

    It has no address and no content. A peer needs the endpoint, too, to reach the memory.

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
    """A contiguous tensor that peers may use until it is unregistered. It keeps the tensor's memory.

    Attributes:
        number: Its number in descriptors.
        bytes: The tensor's memory.
        is_active: Whether it may be used.

    Raises:
        UsageError: It is no tensor, or one that is empty or not contiguous.
        UnsupportedError: It is not on the CPU, or has no memory of its own, as fake tensors have none.
    """

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a tensor is registered, not {type(tensor).__name__}")
        if not tensor.is_cpu:
            raise UnsupportedError(f"host memory is registered, not that of {tensor.device}: register tensor.cpu()")
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            raise UsageError("a contiguous tensor is registered: register tensor.contiguous(), and copy it back")
        if tensor.numel() == 0:
            raise UsageError("an empty tensor cannot be registered: it has no memory")
        self.number, self.tensor = number, tensor
        self.bytes = flat_memory(tensor_of(tensor)).view
        self.address, self.nbytes = tensor.data_ptr(), self.bytes.nbytes
        self.is_active = True

    def check_use(self) -> None:
        """Raise UsageError if the memory is not registered any more, or is not the tensor's any more."""
        if not self.is_active:
            raise UsageError("this memory is not registered any more: register the tensor again")
        if (self.tensor.data_ptr(), self.tensor.nbytes) != (self.address, self.nbytes):
            raise UsageError("the registered tensor was resized, or has other memory: register it again")
