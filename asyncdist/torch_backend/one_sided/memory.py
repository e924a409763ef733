"""Registered memory as torch's transports see it: a tensor, views of it, and its descriptor."""

from __future__ import annotations

import operator
from typing import Literal, Protocol

from asyncdist.errors import UsageError
from asyncdist.kernel import Registration
from asyncdist.kernel import RemoteMemory as RemoteMemory


class Registrar(Protocol):
    @property
    def port_id(self) -> str: ...


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
        return self.registration.bytes[self.offset : self.offset + self.nbytes]


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
        return RemoteMemory(self.owner.port_id, self.registration.number, self.registration.nbytes)

    def _range(self, offset: int | None, length: int | None) -> tuple[int, int]:
        self.registration.check_use()
        nbytes = self.registration.nbytes
        first = 0 if offset is None else operator.index(offset)
        count = nbytes - first if length is None else operator.index(length)
        if first < 0 or count < 0 or first + count > nbytes:
            raise UsageError(f"{count} bytes from byte {first} on, of registered memory of {nbytes} bytes")
        return first, count
