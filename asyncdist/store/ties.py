"""What is tied to a key: an owner, with whom an ephemeral one goes, and those who watch it; the laws stand in `state`."""

from __future__ import annotations

from asyncdist.store.entries import Observing, Place
from asyncdist.store.operations import CHANGED, GONE, Client, Kind, Reply
from asyncdist.store.queues import Queues


class Ties(Queues):
    """The part of the state machine that has to do with whose a key is, and whom its changes concern."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._owners: dict[str, Client] = {}  # ephemeral key -> whose it is
        self._owned: dict[Client, dict[str, None]] = {}
        self._observing: dict[str, dict[Place, None]] = {}  # key -> `watch`

    # -- owners -----------------------------------------------------------------------------------

    def own(self, owner: Client, key: str) -> None:
        """Have an ephemeral key go with ``owner``, whoever has set it."""
        if key in self._owners:
            self._disown(key)
        self._owners[key] = owner
        self._owned.setdefault(owner, {})[key] = None

    def owned(self) -> dict[str, tuple[Client, bytes]]:
        """Return the ephemeral keys, each with its owner and its value."""
        return {key: (owner, self._values[key]) for key, owner in self._owners.items()}

    def _disown(self, key: str) -> None:
        if self.ledger is not None:
            self.ledger.disowned(key)
        owner = self._owners.pop(key)
        mine = self._owned[owner]
        del mine[key]
        if not mine:
            del self._owned[owner]

    def bereave(self, owner: Client) -> None:
        """Delete the ephemeral keys of an owner that is gone; those who watch them are told (`collect`)."""
        for key in self._owned.pop(owner, ()):
            if self.ledger is not None:
                self.ledger.disowned(key)
            del self._owners[key]
            del self._values[key]
            if key in self._observing:
                self._tell(key)

    # -- watchers ---------------------------------------------------------------------------------

    def _watch(self, place: Place, key: str) -> bytes | None:
        self._keep(place, Observing(key))
        self._observing.setdefault(key, {})[place] = None
        return self._values.get(key)

    def _tell(self, key: str) -> None:
        """Tell those who watch a key what it holds now."""
        value = self._values.get(key)
        message = GONE if value is None else CHANGED + value
        self.due.extend(Reply(client, request, Kind.PUBLISHED, message) for client, request in self._observing[key])
