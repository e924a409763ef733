"""The contract of device point-to-point backends, and the control protocol of one message.

A message of at most `SMALL_NBYTES` goes through the host at once, without any of this.

A larger message begins with a control message on the host, under the user's tag. The host therefore matches it with its
receive by the same rules for every backend. The first control message offers a backend; the receiver accepts or refuses
it, and the sender then offers the next one. Further control messages use tags derived from the message's number. The last
backend, through the host, needs no answer: the data follow. The transfer ends on both sides with the last control message.
Its sender waits until it has been sent, so either rank may leave when its own half is complete.

`DeviceP2P.send` and `DeviceP2P.receive` are generators: they yield a work and are resumed when it is complete, so a
message whose peer is late does not block other messages. To write a backend, implement `DeviceP2P`, and return it from
`DeviceCollectives.make_p2p`.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from time import monotonic
from typing import ClassVar, NamedTuple, TypeVar

import torch

from asyncdist.kernel.transport.device_streams import DeviceEvent
from asyncdist.kernel.transport.host_group import HostGroup, HostWork

T = TypeVar("T")
Transfer = Generator[HostWork, None, T]
"""A generator that yields each work that it waits for, is resumed when the work has succeeded, and returns its result."""

SMALL_NBYTES = 64 << 10
"""The largest message that goes through the host without a control message. No backend gets it."""
CONTROL_MESSAGE_NBYTES = 512
REFUSED = "refused"
_HEAD_OF_MESSAGE = struct.Struct("<16sQQH")
MAX_PAYLOAD_NBYTES = CONTROL_MESSAGE_NBYTES - _HEAD_OF_MESSAGE.size
MAX_CONCURRENT_MESSAGES = 1 << 31
"""The most messages between two ranks at a time: each uses two tags of the control group."""


class TransferRefused(Exception):
    """The backend cannot carry tensors between these two processes. The text says why."""


class ControlMessage(NamedTuple):
    """A control message of one transfer.

    Attributes:
        kind: Name of the backend that the sender offers, or `REFUSED`, or empty.
        number: The sender's number for this transfer.
        nbytes: Size of the user's message.
        payload: Data of the backend, at most `MAX_PAYLOAD_NBYTES` bytes.
    """

    kind: str
    number: int
    nbytes: int
    payload: bytes = b""

    def packed(self) -> torch.Tensor:
        head = _HEAD_OF_MESSAGE.pack(self.kind.encode(), self.number, self.nbytes, len(self.payload))
        message = bytearray((head + self.payload).ljust(CONTROL_MESSAGE_NBYTES, b"\0"))
        return torch.frombuffer(message, dtype=torch.uint8)

    @classmethod
    def unpacked(cls, buffer: torch.Tensor) -> ControlMessage:
        raw = bytes(buffer.numpy())
        kind, number, nbytes, length = _HEAD_OF_MESSAGE.unpack_from(raw)
        return cls(kind.rstrip(b"\0").decode(errors="replace"), number, nbytes, raw[_HEAD_OF_MESSAGE.size :][:length])


class ControlChannel:
    """The control traffic of one transfer, on the host.

    Args:
        control_group: CPU group for all control messages but the first.
        number: The sender's number for the transfer.
        deadline: Monotonic time at which the transfer times out.
        first: Sends the sender's first control message, under the user's tag; None on the receiving side.
        sends: Whether this rank is the sender.
    """

    def __init__(
        self,
        control_group: HostGroup,
        peer: int,
        number: int,
        nbytes: int,
        deadline: float,
        first: Callable[[torch.Tensor], HostWork] | None = None,
        *,
        sends: bool,
    ) -> None:
        self.peer, self.number, self.nbytes = peer, number, nbytes
        self._control_group, self._deadline, self._first = control_group, deadline, first
        self._our_tag, self._their_tag = (2 * number, 2 * number + 1) if sends else (2 * number + 1, 2 * number)

    def send(self, kind: str = "", payload: bytes = b"") -> HostWork:
        """Send a control message; the work completes when it has been sent. A failure also fails the group."""
        assert len(payload) <= MAX_PAYLOAD_NBYTES
        message = ControlMessage(kind, self.number, self.nbytes, payload).packed()
        first, self._first = self._first, None
        return self.send_data(message) if first is None else first(message)

    def recv(self) -> Transfer[ControlMessage]:
        """Return the peer's next control message. Raises `TransferRefused` if the peer refuses."""
        buffer = torch.empty(CONTROL_MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
        yield self.recv_data(buffer)
        message = ControlMessage.unpacked(buffer)
        if message.kind == REFUSED:
            raise TransferRefused(message.payload.decode(errors="replace"))
        return message

    def send_data(self, data: torch.Tensor) -> HostWork:
        """Send part of the user's message from host memory."""
        return unlogged(self._control_group.send(data, self.peer, self._our_tag, timeout=self._left))

    def recv_data(self, buffer: torch.Tensor) -> HostWork:
        """Receive into host memory what the peer passes to `send_data`."""
        return unlogged(self._control_group.recv(buffer, self.peer, self._their_tag, timeout=self._left))

    @property
    def _left(self) -> float:
        return max(0.0, self._deadline - monotonic())


def unlogged(work: HostWork) -> HostWork:
    """Return a work whose error is not logged if no transfer retrieves it: the device group reports the error."""
    work.add_done_callback(lambda work: work.exception())
    return work


class DeviceP2P(ABC):
    """One rank's part of a backend that carries large messages directly between devices.

    It is created for a `DeviceContext` of its own when the rank first sends or receives. Its creation does not
    communicate, so each message checks whether its two ranks fit together. All methods but `abort` are called on one
    executor, within ``context.streams.on_comm_stream()``, in an order that may differ between ranks. No method may
    block for a peer. ``data`` is a contiguous uint8 tensor on the device.
    """

    name: ClassVar[str]

    @abstractmethod
    def send(self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent | None) -> Transfer[DeviceEvent]:
        """Offer and send ``data``, which is ready after the event ``before`` (None: now).

        Returns an event that the device passes when the data has been sent. Raises `TransferRefused`.
        """

    @abstractmethod
    def receive(
        self, data: torch.Tensor, channel: ControlChannel, offer: bytes, before: DeviceEvent | None
    ) -> Transfer[DeviceEvent]:
        """Receive the offered message into ``data``, after the event ``before`` (None: at once).

        Returns an event that the device passes when the data has arrived.
        Raises `TransferRefused`, before it sends anything.
        """

    def async_error(self) -> Exception | None:
        """Return a failure that no message has reported yet, else None. Called periodically, from any thread."""
        return None

    def abort(self) -> None:  # noqa: B027 - a backend whose streams wait for no peer has nothing to do
        """End the device's waits for peers, because the group has failed. Never blocks. Thread-safe."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""
