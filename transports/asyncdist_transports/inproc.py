"""Messages between ranks of one process: the reference transport. Read this one first.

The engine calls it through `asyncdist.transport.base`, and it imports only the contract. Every rank of the process
publishes a *mailbox*, a number in a table of this module. Sending posts an action to the peer's host. Under the peer's
own lock the action matches the message with the peer's inbox and copies the bytes from the sender's memory straight
into the receiver's. A message without a posted receive waits, with its bytes in the sender's memory, so there is
back-pressure without any buffer. After the copy, an action posted back completes the sender's message.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any, ClassVar

from asyncdist.transport.base import Address, Host, Link, Outgoing, Receive, Transport, Wait, copy_into
from asyncdist.transport.wire_format import DATA, GOODBYE, KEY_NBYTES, pack_key, unpack_tail

_mailboxes: dict[int, InprocTransport] = {}
_numbers = itertools.count(1)


class InprocTransport(Transport):
    """A transport for ranks that share a process, in one event loop or in threads."""

    name: ClassVar[str] = "inproc"
    preference: ClassVar[int] = 100
    same_thread: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._number = next(_numbers)
        self._heard: set[int] = set()

    @classmethod
    def probe(cls) -> str | None:
        return None

    def listen(self, where: str) -> dict[str, Any]:
        _mailboxes[self._number] = self
        return {"process": os.getpid(), "mailbox": self._number, "world": self.host.world_id}

    def reaches(self, address: Address) -> bool:
        return bool(address["process"] == os.getpid() and address["world"] == self.host.world_id)

    def link(self, peer: int, address: Address) -> InprocLink:
        return InprocLink(peer, self, address["mailbox"])

    def advance(self, ready: Iterable[int] | None) -> bool:
        # Everything moves in posted actions.
        return False

    def waits(self) -> list[Wait]:
        return []

    def busy(self) -> bool:
        return False

    def may_receive_from(self, peer: int) -> bool:
        return peer in self._heard

    def disconnect(self, peer: int) -> None:
        """Do nothing: a lost rank of the same process has closed its mailbox."""

    def close(self) -> None:
        """Send a goodbye to all ranks of the world, also to those that have received nothing from this rank yet."""
        if _mailboxes.pop(self._number, None) is None:
            return
        for receiver in list(_mailboxes.values()):
            if receiver.host.world_id == self.host.world_id:
                goodbye = Outgoing(receiver.host.rank, pack_key(0, 0, 0), 0, memoryview(b""), None, GOODBYE)
                receiver.host.post(Delivery(goodbye, self.host, receiver).arrive)

    # -- posted by peers, run under this host's lock -------------------------------------------

    def deliver(self, delivery: Delivery) -> None:
        """Receive a message, or leave it with its sender until a receive is posted for it."""
        if self._number not in _mailboxes:
            delivery.refuse()
            return
        self._heard.add(delivery.peer)
        header = delivery.message.header
        fingerprint, nbytes, kind = unpack_tail(header)
        key = bytes(header[:KEY_NBYTES])
        if kind == DATA:
            inbox = self.host.inbox(delivery.peer)
            receive = inbox.arrive(key, fingerprint, nbytes)
            if receive is not None:
                delivery.resume(receive)
            else:
                inbox.block(delivery)
        else:
            self.host.control(delivery.peer, kind, key, bytes(delivery.message.body))
            if kind == GOODBYE:
                self._heard.discard(delivery.peer)
                self.host.lost(delivery.peer, "it has left")


class InprocLink(Link):
    """The link to a rank of the same process."""

    def __init__(self, peer: int, transport: InprocTransport, mailbox: int) -> None:
        super().__init__(peer)
        self._transport = transport
        self._mailbox = mailbox

    def open(self) -> None:
        if self._mailbox not in _mailboxes:
            self._post_lost()

    def send(self, message: Outgoing) -> bool:
        receiver = _mailboxes.get(self._mailbox)
        if receiver is None:
            self._post_lost()
            return False
        delivery = Delivery(message, self._transport.host, receiver)
        receiver.host.post(delivery.arrive)
        return False

    def close(self) -> None:
        """Do nothing: `InprocTransport.close` sends all goodbyes."""

    def _post_lost(self) -> None:
        host, peer = self._transport.host, self.peer
        host.post(lambda: host.lost(peer, "it has closed its world"))


class Delivery:
    """A message on its way between two hosts of this process; without a posted receive it is a `StalledMessage`."""

    __slots__ = ("_receiver", "_sender", "fingerprint", "key", "message", "nbytes", "peer")

    def __init__(self, message: Outgoing, sender: Host, receiver: InprocTransport) -> None:
        self.message = message
        self.peer = sender.rank
        self.key = bytes(message.header[:KEY_NBYTES])
        self.fingerprint, self.nbytes, _ = unpack_tail(message.header)
        self._sender = sender
        self._receiver = receiver

    def arrive(self) -> None:
        self._receiver.deliver(self)

    def resume(self, receive: Receive) -> None:
        """Copy the bytes, unless the sender has withdrawn the message."""
        if not self.message.done:
            copy_into(self.message.body, receive)
            if not receive.done:
                receive.finish()
            self._sender.post(self._taken)

    def _taken(self) -> None:
        if not self.message.done:
            self.message.finish()

    def refuse(self) -> None:
        sender, peer = self._sender, self._receiver.host.rank
        sender.post(lambda: sender.lost(peer, "it has closed its world"))
