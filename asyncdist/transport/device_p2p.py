"""What a way between devices offers for messages: the contract, and how two ranks speak on the host about each.

A message begins with a letter on the host, under the tag that its user gave: so it meets its receive there, by the rules of
the host, whatever its way. The letter offers a way; what it says goes no further than who may read it. More letters go to
and fro under the message's own number: the answer, and what a way needs besides. The last way, through the host, needs no
answer: the data follow. A message is over on both sides with its last letter: who says that one waits until it has left,
and there is none that nobody waits for, so either may leave when its own half is over.

Sending and receiving are *conversations*: generators that yield a `Work` and are resumed when it is over. So nobody is held
up by a message whose peer has not come yet. To write a `DeviceP2P`, derive from it, and have the ensemble's
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
Conversation = Generator[HostWork, None, T]
"""Yields what it waits for, is resumed when that is over well, and returns what came of it."""

LETTER_NBYTES = 512
REFUSED = "refused"
_LETTER = struct.Struct("<16sQQH")
CONTENT_NBYTES = LETTER_NBYTES - _LETTER.size
NUMBERS = 1 << 31
"""How many messages there may be between two ranks at a time: each has two tags among the letters."""


class TransferRefused(Exception):
    """A way cannot be gone with this peer; says why, in words."""


class ControlMessage(NamedTuple):
    """What one rank tells another of a message: a ``word`` (the way that is offered, or `REFUSED`), and what goes with it.

    ``number`` is the sender's for this message, ``nbytes`` how large it is.
    """

    word: str
    number: int
    nbytes: int
    content: bytes = b""

    def packed(self) -> torch.Tensor:
        head = _LETTER.pack(self.word.encode(), self.number, self.nbytes, len(self.content))
        return torch.frombuffer(bytearray((head + self.content).ljust(LETTER_NBYTES, b"\0")), dtype=torch.uint8)

    @classmethod
    def unpacked(cls, room: torch.Tensor) -> ControlMessage:
        raw = bytes(room.numpy())
        word, number, nbytes, length = _LETTER.unpack_from(raw)
        return cls(word.rstrip(b"\0").decode(errors="replace"), number, nbytes, raw[_LETTER.size :][:length])


class ControlChannel:
    """What two ranks say about one message, on the host; ``peer`` is the other one's rank in the group.

    ``first`` sends what the sender says first: under the message's tag. All else goes among the ``letters``.
    """

    def __init__(
        self,
        letters: HostGroup,
        peer: int,
        number: int,
        nbytes: int,
        deadline: float,
        first: Callable[[torch.Tensor], HostWork] | None = None,
        *,
        sends: bool,
    ) -> None:
        self.peer, self.number, self.nbytes = peer, number, nbytes
        self._letters, self._deadline, self._first = letters, deadline, first
        self._our_tag, self._their_tag = (2 * number, 2 * number + 1) if sends else (2 * number + 1, 2 * number)

    def say(self, word: str = "", content: bytes = b"") -> HostWork:
        """Send a letter; the work is over when it has left. That it could not is heard of as the group's failure, too."""
        assert len(content) <= CONTENT_NBYTES
        letter = ControlMessage(word, self.number, self.nbytes, content).packed()
        first, self._first = self._first, None
        sent = self.put(letter) if first is None else first(letter)
        sent.add_done_callback(lambda work: work.exception())
        return sent

    def hear(self) -> Conversation[ControlMessage]:
        """Return the peer's next letter. Raises `TransferRefused` if it says so."""
        room = torch.empty(LETTER_NBYTES, dtype=torch.uint8, device="cpu")
        yield self.take(room)
        letter = ControlMessage.unpacked(room)
        if letter.word == REFUSED:
            raise TransferRefused(letter.content.decode(errors="replace"))
        return letter

    def put(self, data: torch.Tensor) -> HostWork:
        """Send some of the message itself, in memory of the host."""
        return self._letters.send(data, self.peer, self._our_tag, timeout=self._left)

    def take(self, room: torch.Tensor) -> HostWork:
        """Receive what the peer puts."""
        return self._letters.recv(room, self.peer, self._their_tag, timeout=self._left)

    @property
    def _left(self) -> float:
        return max(0.0, self._deadline - monotonic())


class DeviceP2P(ABC):
    """One rank's part in a way that carries large messages straight from device to device.

    Made for a `Site` of its own when the first one is sent or received; no ranks meet for it, so each message finds out
    whether its two go together. Everything is called on one line of the messages', within ``site.streams.ours()``, in
    no order that two ranks could agree on; and nothing may block for a peer. ``data`` are bytes of the device in a row.
    """

    name: ClassVar[str]
    least_nbytes: ClassVar[int] = 64 << 10
    """What is not larger than this goes through the host."""

    @abstractmethod
    def send(self, data: torch.Tensor, talk: ControlChannel, before: DeviceEvent) -> Conversation[DeviceEvent]:
        """Offer what stands behind a mark, and send it; return where on the device that is over. Raises `TransferRefused`."""

    @abstractmethod
    def receive(
        self, data: torch.Tensor, talk: ControlChannel, offer: bytes, before: DeviceEvent
    ) -> Conversation[DeviceEvent]:
        """Receive what was offered, behind a mark; return where on the device that is over.

        Raises `TransferRefused`, before anything is said.
        """

    def trouble(self) -> Exception | None:
        """Return what has gone wrong beside any message, None if nothing has. Called now and then, from any thread."""
        return None

    @abstractmethod
    def abort(self) -> None:
        """End what the device still waits for, as the group has failed; never blocks. Any thread."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""
