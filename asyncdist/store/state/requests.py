"""Open requests of all clients, and the replies that are due.

Every part of `machine` keeps its blocked requests and streams here, so that neither a cancelled request nor a client that
has left leaves an entry behind. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from asyncdist.store.protocol.operations import Client, OperationKind, Reason, Reply
from asyncdist.store.state.model import Place, RequestRefused

Withdraw = Callable[[Place, Any], None]
"""Removes a cancelled request from its queue, barrier or channel. The second argument is the request's subject."""


class OpenRequests:
    """The requests that have no reply yet, or further replies to come."""

    def __init__(self) -> None:
        self.due: list[Reply] = []
        self._open: dict[Client, dict[int, tuple[Withdraw, Any]]] = {}

    @property
    def num_open(self) -> int:
        """How many requests are open, over all clients."""
        return sum(map(len, self._open.values()))

    def places_of(self, client: Client) -> list[Place]:
        """Return the open requests of a client, oldest first."""
        return [(client, request) for request in self._open.get(client, ())]

    def open(self, place: Place, withdraw: Withdraw, subject: Any) -> None:
        """Add a request. Raises RequestRefused if the client has an open request with that id."""
        requests = self._open.setdefault(place[0], {})
        if place[1] in requests:
            raise RequestRefused(Reason.INVALID, f"request id {place[1]} is in use")
        requests[place[1]] = withdraw, subject

    def close(self, place: Place) -> tuple[Withdraw, Any]:
        """Remove a request that is complete."""
        client, request = place
        requests = self._open[client]
        entry = requests.pop(request)
        if not requests:
            del self._open[client]
        return entry

    def withdraw(self, place: Place) -> None:
        """Remove a request that its client has cancelled, if it is open."""
        if place[1] in self._open.get(place[0], ()):
            withdraw, subject = self.close(place)
            withdraw(place, subject)

    def resolve(self, place: Place, result: Any) -> None:
        """Remove a request and reply with its result."""
        self.close(place)
        self.reply(place, result)

    def reply(self, place: Place, result: Any) -> None:
        """Reply with a result."""
        self.due.append(Reply(*place, OperationKind.RESULT, result))

    def publish(self, places: Iterable[Place], message: bytes) -> None:
        """Send one message to all of ``places``, which share its bytes."""
        self.due.extend(Reply(client, request, OperationKind.PUBLISHED, message) for client, request in places)

    def collect(self) -> list[Reply]:
        """Return the replies that are due, once."""
        due, self.due = self.due, []
        return due
