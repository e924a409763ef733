"""Messages between ranks of one process: the reference transport. Read this one first.

The engine calls it through `asyncdist.kernel.transport.base`, and it imports only the contract. Every rank of the process
publishes a *mailbox*, a number in a table of this module. The sender posts an action to the receiver's host. Under the
receiver's lock the action matches the message with the receiver's inbox, and copies the bytes from the sender's memory
straight into the receiver's. Without a posted receive the bytes stay in the sender's memory, which is back-pressure
without any buffer. After the copy, an action posted to the sender's host completes the sender's message.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable
from typing import Any, ClassVar

from asyncdist.kernel.transport.base import Address, Host, Link, Outgoing, Receive, Transport, Wait, copy_into
from asyncdist.kernel.transport.wire_format import DATA, GOODBYE, KEY_NBYTES, pack_key, unpack_tail

_mailboxes: dict[int, InprocTransport] = {}
_numbers = itertools.count(1)


class InprocTransport(Transport):
    """A transport for ranks that share a process, in one event loop or in threads."""

    name: ClassVar[str] = "inproc"
    preference: ClassVar[int] = 100
    is_local: ClassVar[bool] = True
    same_thread: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._number = next(_numbers)
        # The peers that have sent messages, and have not left.
        self._senders: set[int] = set()

    def listen(self, where: str) -> dict[str, Any]:
        _mailboxes[self._number] = self
        return {"process": os.getpid(), "mailbox": self._number, "world": self.host.world_id}

    def reaches(self, address: Address) -> bool:
        return bool(address["process"] == os.getpid() and address["world"] == self.host.world_id)

    def link(self, peer: int, address: Address) -> InprocLink:
        return InprocLink(peer, self, address["mailbox"])

    def advance(self, ready: Iterable[int] | None) -> bool:
        # The posted actions move everything.
        return False

    def waits(self) -> list[Wait]:
        return []

    def may_receive_from(self, peer: int) -> bool:
        return peer in self._senders

    def close(self) -> None:
        """Send a goodbye to all ranks of the world, also to those that have received nothing from this rank yet."""
        if _mailboxes.pop(self._number, None) is None:
            return
        for receiver in list(_mailboxes.values()):
            if receiver.host.world_id == self.host.world_id:
                goodbye = Outgoing(receiver.host.rank, pack_key(0, 0, 0), 0, memoryview(b""), None, GOODBYE)
                receiver.receive(Delivery(goodbye, self.host, receiver.host))

    def receive(self, delivery: Delivery) -> None:
        """Handle a message from a peer, which calls this under its own lock: post an action to this host."""
        self.host.post(functools.partial(self._deliver, delivery))

    def _deliver(self, delivery: Delivery) -> None:
        """Receive a message, or leave it with its sender until a receive is posted for it."""
        peer = delivery.peer
        if self._number not in _mailboxes:
            delivery.refuse()
        elif delivery.kind == DATA:
            self._senders.add(peer)
            inbox = self.host.inbox(peer)
            receive = inbox.arrive(delivery.key, delivery.fingerprint, delivery.nbytes)
            if receive is not None:
                delivery.resume(receive)
            else:
                inbox.block(delivery)
        else:
            self._senders.add(peer)
            self.host.control(peer, delivery.kind, delivery.key, bytes(delivery.message.body))
            if delivery.kind == GOODBYE:
                self._senders.discard(peer)
                self.host.lost(peer, "it has left")


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
        receiver.receive(Delivery(message, self._transport.host, receiver.host))
        return False

    def _post_lost(self) -> None:
        host, peer = self._transport.host, self.peer
        host.post(lambda: host.lost(peer, "it has closed its world"))


class Delivery:
    """A message on its way between two hosts of this process; without a posted receive it is a `StalledMessage`."""

    __slots__ = ("_receiver", "_sender", "fingerprint", "key", "kind", "message", "nbytes", "peer")

    def __init__(self, message: Outgoing, sender: Host, receiver: Host) -> None:
        self.message = message
        self.peer = sender.rank
        self.key = bytes(message.header[:KEY_NBYTES])
        self.fingerprint, self.nbytes, self.kind = unpack_tail(message.header)
        self._sender, self._receiver = sender, receiver

    def resume(self, receive: Receive) -> None:
        """Copy the bytes, unless the sender has withdrawn the message."""
        if not self.message.done:
            copy_into(self.message.body, receive)
            if not receive.done:
                receive.finish()
            self._sender.post(self._finish)

    def _finish(self) -> None:
        if not self.message.done:
            self.message.finish()

    def refuse(self) -> None:
        """Report to the sender that the receiver has closed its mailbox."""
        sender, peer = self._sender, self._receiver.rank
        sender.post(lambda: sender.lost(peer, "it has closed its world"))
