"""What a way between devices offers for messages: the contract, and how two ranks speak on the host about each.

A message begins with a message on the host, under the tag that its user gave: so it meets its receive there, by the rules of
the host, whatever its way. The message offers a way; what it says goes no further than who may read it. More control_group go to
and fro under the message's own number: the answer, and what a way needs besides. The last way, through the host, needs no
answer: the data follow. A message is over on both sides with its last message: who says that one waits until it has left,
and there is none that nobody waits for, so either may leave when its own half is over.

Sending and receiving are *conversations*: generators that yield a `Work` and are resumed when it is over. So nobody is held
up by a message whose peer has not come yet. To write a `DeviceP2P`, derive from it, and have the backend's
``courier`` make one.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from time import monotonic
from typing import ClassVar, NamedTuple, TypeVar

import torch

from asyncdist.transport.device_streams import DeviceEvent
from asyncdist.transport.host_group import HostGroup, HostWork

T = TypeVar("T")
Transfer = Generator[HostWork, None, T]
"""Yields what it waits for, is resumed when that is over well, and returns what came of it."""

CONTROL_MESSAGE_NBYTES = 512
REFUSED = "refused"
_HEAD_OF_MESSAGE = struct.Struct("<16sQQH")
MAX_PAYLOAD_NBYTES = CONTROL_MESSAGE_NBYTES - _HEAD_OF_MESSAGE.size
MAX_CONCURRENT_MESSAGES = 1 << 31
"""How many messages there may be between two ranks at a time: each has two tags among the control_group."""


class TransferRefused(Exception):
    """A way cannot be gone with this peer; says why, in words."""


class ControlMessage(NamedTuple):
    """What one rank tells another of a message: a ``kind`` (the way that is offered, or `REFUSED`), and what goes with it.

    ``number`` is the sender's for this message, ``nbytes`` how large it is.
    """

    kind: str
    number: int
    nbytes: int
    payload: bytes = b""

    def packed(self) -> torch.Tensor:
        head = _HEAD_OF_MESSAGE.pack(self.kind.encode(), self.number, self.nbytes, len(self.payload))
        return torch.frombuffer(
            bytearray((head + self.payload).ljust(CONTROL_MESSAGE_NBYTES, b"\0")), dtype=torch.uint8
        )

    @classmethod
    def unpacked(cls, buffer: torch.Tensor) -> ControlMessage:
        raw = bytes(buffer.numpy())
        kind, number, nbytes, length = _HEAD_OF_MESSAGE.unpack_from(raw)
        return cls(kind.rstrip(b"\0").decode(errors="replace"), number, nbytes, raw[_HEAD_OF_MESSAGE.size :][:length])


class ControlChannel:
    """What two ranks say about one message, on the host; ``peer`` is the other one's rank in the group.

    ``first`` sends what the sender says first: under the message's tag. All else goes among the ``control_group``.
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
        """Send a message; the work is over when it has left. That it could not is heard of as the group's failure, too."""
        assert len(payload) <= MAX_PAYLOAD_NBYTES
        message = ControlMessage(kind, self.number, self.nbytes, payload).packed()
        first, self._first = self._first, None
        sent = self.send_data(message) if first is None else first(message)
        sent.add_done_callback(lambda work: work.exception())
        return sent

    def recv(self) -> Transfer[ControlMessage]:
        """Return the peer's next message. Raises `TransferRefused` if it says so."""
        buffer = torch.empty(CONTROL_MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
        yield self.recv_data(buffer)
        message = ControlMessage.unpacked(buffer)
        if message.kind == REFUSED:
            raise TransferRefused(message.payload.decode(errors="replace"))
        return message

    def send_data(self, data: torch.Tensor) -> HostWork:
        """Send some of the message itself, in memory of the host."""
        return self._control_group.send(data, self.peer, self._our_tag, timeout=self._left)

    def recv_data(self, buffer: torch.Tensor) -> HostWork:
        """Receive what the peer puts."""
        return self._control_group.recv(buffer, self.peer, self._their_tag, timeout=self._left)

    @property
    def _left(self) -> float:
        return max(0.0, self._deadline - monotonic())


class DeviceP2P(ABC):
    """One rank's part in a way that carries large messages straight from device to device.

    Made for a `Site` of its own when the first one is sent or received; no ranks meet for it, so each message finds out
    whether its two go together. Everything is called on one line of the messages', within ``context.streams.on_comm_stream()``, in
    no order that two ranks could agree on; and nothing may block for a peer. ``data`` are bytes of the device in a row.
    """

    name: ClassVar[str]
    min_nbytes: ClassVar[int] = 64 << 10
    """What is not larger than this goes through the host."""

    @abstractmethod
    def send(self, data: torch.Tensor, channel: ControlChannel, before: DeviceEvent) -> Transfer[DeviceEvent]:
        """Offer what stands behind a event, and send it; return where on the device that is over. Raises `TransferRefused`."""

    @abstractmethod
    def receive(
        self, data: torch.Tensor, channel: ControlChannel, offer: bytes, before: DeviceEvent
    ) -> Transfer[DeviceEvent]:
        """Receive what was offered, behind a event; return where on the device that is over.

        Raises `TransferRefused`, before anything is said.
        """

    def async_error(self) -> Exception | None:
        """Return what has gone wrong beside any message, None if nothing has. Called now and then, from any thread."""
        return None

    @abstractmethod
    def abort(self) -> None:
        """End what the device still waits for, as the group has failed; never blocks. Any thread."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""
