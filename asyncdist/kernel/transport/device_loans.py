"""The contract of device loans: a process reads device tensors of another process of its host where they lie.

The owner *lends* tensors: it tells the borrower their locations, and keeps them as they are until the borrower returns the
loan, or has ended. The borrower copies them into memory of its own device. The contract does not say how locations and
returns travel; `asyncdist.rpc.loans` sends them over a channel.

No stream waits for another process. The borrower polls the event after which the tensors are ready, and then enqueues its
copy; the owner is told when the copy is complete. So a process that is killed leaves no stream of another one waiting.

A borrower verifies once that what it maps is the owner's memory, by the owner's ``probe``. To write a back end, implement
`DeviceLoans`, and return it from `DeviceCollectives.make_loans`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from asyncdist.kernel.transport.device_streams import DeviceEvent, Streams


class DeviceLoan(NamedTuple):
    """Tensors that are lent together.

    Attributes:
        locations: For the borrower: one for each tensor.
        held: The objects that the back end keeps until the end of the loan.
    """

    locations: Sequence[bytes]
    held: Any


class DeviceLoans(ABC):
    """The loans of one device of this process. The methods that may block are called on one executor.

    Args:
        streams: The device, and a stream for copies.
    """

    name: ClassVar[str]
    min_nbytes: ClassVar[int] = 64 << 10
    """Tensors of at most this size go through host memory."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    # -- the owner ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def probe(self) -> bytes:
        """The location of some bytes of this process, and the bytes: a borrower compares what it maps."""

    @abstractmethod
    def can_lend(self, tensor: torch.Tensor) -> bool:
        """Return whether other processes can map the memory of a tensor. Must not block. Thread-safe."""

    @abstractmethod
    def lend(self, tensors: Sequence[torch.Tensor], ready: DeviceEvent) -> DeviceLoan:
        """Lend tensors for which `can_lend` holds. Must not block.

        Args:
            tensors: Contiguous, flat tensors, which the caller keeps alive until `end`.
            ready: The event after which they are ready.

        Raises:
            TransferRefused: The memory of one cannot be mapped after all.
        """

    @abstractmethod
    def end(self, loan: DeviceLoan) -> None:
        """Note that the borrower has returned a loan, or has ended. Must not block."""

    # -- the borrower ------------------------------------------------------------------------------

    @abstractmethod
    def verify(self, owner: str, probe: bytes) -> None:
        """Check that this process maps the memory of an owner. May block. Raises TransferRefused."""

    @abstractmethod
    def ready(self, owner: str, location: bytes) -> DeviceEvent:
        """Return the event after which a lent tensor is ready. May block. Raises TransferRefused."""

    @abstractmethod
    def read(
        self, owner: str, locations: Sequence[bytes], targets: Sequence[torch.Tensor], before: DeviceEvent | None
    ) -> DeviceEvent:
        """Enqueue copies of tensors that are ready; return the event after which they are complete. May block.

        Args:
            owner: The process that lends them.
            locations: Their locations.
            targets: Flat uint8 tensors of this device, as large as they.
            before: The event after which the targets may be written; None if that is now.

        Raises:
            TransferRefused: Memory cannot be mapped. No queued work uses the targets then.
        """

    @abstractmethod
    def forget(self, owner: str) -> None:
        """Unmap the memory of an owner that has ended. May block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May block."""
