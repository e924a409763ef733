"""The link to a peer that cannot be dialled yet. The selector makes it in large worlds, and a transport may."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from asyncdist.kernel.transport.base import Link, Outgoing


class AwaitedLink(Link):
    """Keeps the messages to a peer until there is a link to it, for example when its address is known.

    Args:
        peer: The peer.
        rank: This rank.
        ask: Begins to make the link. It is called once, when a message is sent or the link is opened.
        lacks: The words with which `connectivity_problem` names the missing part.
    """

    def __init__(
        self,
        peer: int,
        rank: int,
        ask: Callable[[AwaitedLink], None],
        lacks: str = "does not know the address",
    ) -> None:
        super().__init__(peer)
        self._rank, self._ask, self._lacks = rank, ask, lacks
        self._asked_at: float | None = None
        self._kept: list[tuple[Outgoing, bool]] = []
        """The messages, and whether each need not wait for those before it."""
        self._link: Link | None = None

    def send(self, message: Outgoing) -> bool:
        return self._keep(message, False) if self._link is None else self._link.send(message)

    def send_unordered(self, message: Outgoing) -> bool:
        return self._keep(message, True) if self._link is None else self._link.send_unordered(message)

    def open(self) -> None:
        if self._link is not None:
            self._link.open()
        elif self._asked_at is None:
            self._asked_at = monotonic()
            self._ask(self)

    def connectivity_problem(self) -> str:
        if self._link is not None:
            return self._link.connectivity_problem()
        if self._asked_at is None:
            return ""
        waited = monotonic() - self._asked_at
        return f"rank {self._rank} {self._lacks} of rank {self.peer} yet, requested {waited:.0f} s ago"

    def _keep(self, message: Outgoing, is_unordered: bool) -> bool:
        self._kept.append((message, is_unordered))
        self.open()
        return False

    def continue_over(self, link: Link) -> None:
        """Send over the link to the peer what was kept, or open it."""
        self._link = link
        kept, self._kept = self._kept, []
        if not kept:
            link.open()
        for message, is_unordered in kept:
            # The operation of a message may have ended.
            if not message.done and (link.send_unordered if is_unordered else link.send)(message):
                message.finish()
