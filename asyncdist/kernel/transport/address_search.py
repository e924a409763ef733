"""Finds the addresses of peers that a rank of a large world does not know: in the world's store, else at other ranks.

A rank that the store does not answer asks the rank nearest to the peer of those that it knows, which answers with the page
of addresses nearest to the peer of those that it holds. Each rank holds the pages of ranks at distances 1, 2, 4, …, so each
answer halves the distance at least, as in Chord (Stoica et al., SIGCOMM 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Protocol

import msgpack

from asyncdist.kernel.transport.base import Host
from asyncdist.kernel.transport.wire_format import PAGE

_PATIENCE = 1.0
"""Seconds after which a rank that has not answered is no longer waited for: its program may compute, or it is lost."""
_MOST_ASKED = 24
"""The number of ranks that are asked for one address."""
_STORE_LOST = "its address cannot be read, because rank 0 is lost, and its store with it"


class AddressBook(Protocol):
    """The pages of addresses that a rank holds. Any thread may call it."""

    def request(self, rank: int, found: Callable[[str], None]) -> None:
        """Read the page of a rank from the store; then call ``found`` on any thread, with an empty text or a reason."""

    def holds(self, rank: int) -> bool: ...

    def page_near(self, rank: int) -> bytes:
        """Return the page that is nearest to a rank."""

    def add(self, page: bytes) -> None:
        """Hold a page that another rank has returned. Raises ValueError for other bytes."""

    def ranks_near(self, rank: int) -> Iterable[int]:
        """Return ranks whose pages are held, of those nearest to a rank first."""


class SearchHost(Host, Protocol):
    """The part of the endpoint that a search uses."""

    def send_unordered(self, peer: int, kind: int, key: bytes, body: bytes) -> None: ...


class _Sought:
    """A peer whose address other ranks are asked for, why the store could not say it, and which ranks were asked."""

    def __init__(self, failure: str) -> None:
        self.failure, self.asked = failure, set[int]()


class AddressSearch:
    """The searches of one rank. Called under the lock of the world's `Progress`.

    Args:
        host: The rank's endpoint.
        book: The pages that the rank holds.
        end: Is called when an address is known, with the peer and an empty text, or why it was not found.
    """

    def __init__(self, host: SearchHost, book: AddressBook, end: Callable[[int, str], None]) -> None:
        self._host, self._book, self._end = host, book, end
        self._read: set[int] = set()
        """The peers whose addresses the store is asked for."""
        self._sought: dict[int, _Sought] = {}
        """Those for which other ranks are asked."""
        self._closed = False

    def begin(self, peer: int) -> None:
        """Look for the address of a peer."""
        self._read.add(peer)
        if self._host.gone(0) is None:
            self._book.request(peer, lambda failure: self._host.post(partial(self._on_store, peer, failure)))
        else:
            self.without_store()

    def without_store(self) -> None:
        """Ask other ranks for what the store is asked for, because rank 0 is lost, and its store with it."""
        for peer in self._read:
            self._host.post(partial(self._on_store, peer, _STORE_LOST))

    def forget(self, peer: int) -> None:
        """Give up a search."""
        self._read.discard(peer)
        if (sought := self._sought.pop(peer, None)) is not None:
            self._host.timers.cancel(sought)

    def close(self) -> None:
        """Give up all searches, and answer no other rank."""
        self._closed = True
        for peer in [*self._read, *self._sought]:
            self.forget(peer)

    def _on_store(self, peer: int, failure: str) -> None:
        if peer not in self._read:
            return
        self._read.remove(peer)
        if failure and not self._book.holds(peer):
            self._sought[peer] = _Sought(failure)
            self._ask_next(peer)
        else:
            self._end(peer, "")

    def _ask_next(self, peer: int) -> None:
        """Ask the next rank; end the search after the last one."""
        sought, host = self._sought[peer], self._host
        for other in self._book.ranks_near(peer) if len(sought.asked) < _MOST_ASKED else ():
            if other not in sought.asked and other != host.rank and host.gone(other) is None:
                sought.asked.add(other)
                # The other rank may need the address of this one to answer.
                self._send(other, peer, self._book.page_near(host.rank))
                host.timers.schedule(sought, monotonic() + _PATIENCE, partial(self._ask_next, peer))
                return
        del self._sought[peer]
        self._end(peer, f"{sought.failure}, and no rank that was asked knows it; read rank 0's log first")

    def _send(self, other: int, wanted: int | None, page: bytes) -> None:
        self._host.send_unordered(other, PAGE, bytes(12), msgpack.packb([wanted, page]))

    def on_page(self, sender: int, body: bytes) -> None:
        """Handle a page from another rank, soon: its message is being read from a connection."""
        self._host.post(partial(self._take, sender, body))

    def _take(self, sender: int, body: bytes) -> None:
        """Hold a page of another rank, and answer if that wants one."""
        if self._closed:
            return
        try:
            wanted, page = msgpack.unpackb(body)
            self._book.add(page)
        except (ValueError, TypeError, msgpack.UnpackException):
            return
        if isinstance(wanted, int):
            self._send(sender, None, self._book.page_near(wanted))
        for peer, sought in list(self._sought.items()):
            if self._sought.get(peer) is not sought:
                continue
            if self._book.holds(peer):
                self.forget(peer)
                self._end(peer, "")
            elif sender in sought.asked:
                self._host.timers.cancel(sought)
                self._ask_next(peer)
