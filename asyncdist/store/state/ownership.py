"""What is tied to a key: an owner, with whom an ephemeral one goes, and those who watch it; the laws stand in `state`.

What belongs to several, as the keys of a job do to its ranks, goes with the last of them: each of them stays under the
prefix of these keys (`lodging`).
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable

from asyncdist.store.protocol.operations import CHANGED, GONE, Client, OperationKind, Reason, Reply
from asyncdist.store.state.model import KeyWatch, Place, PrefixWatch, RequestRefused, named
from asyncdist.store.state.queues import Queues

_LODGING = "\0here/"


def lodging(prefix: str, name: str) -> str:
    """Return an ephemeral key by which its owner stays under ``prefix``, which is not empty.

    When the last of them has gone with its owner, everything goes whose key begins with ``prefix``. ``name`` is the owner's
    among those who stay there.
    """
    return f"{_LODGING}{prefix}\0{name}"


def lodged_under(key: str) -> str:
    """Return the prefix under which a key has its owner stay; empty for one that says nothing of the kind."""
    return key.removeprefix(_LODGING).rpartition("\0")[0] if key.startswith(_LODGING) else ""


class KeyOwnership(Queues):
    """The part of the state machine that has to do with whose a key is, and whom its changes concern."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._owners: dict[str, Client] = {}  # ephemeral key -> whose it is
        self._owned: dict[Client, dict[str, None]] = {}
        self._lodgers: Counter[str] = Counter()  # prefix -> how many stay there
        self._observing: dict[str, dict[Place, None]] = {}  # key -> `watch`
        self._surveying: dict[str, dict[Place, None]] = {}  # prefix -> `watch_keys`
        self.max_value_nbytes = 1 << 62

    # -- owners -----------------------------------------------------------------------------------

    def own(self, owner: Client, key: str) -> None:
        """Have an ephemeral key go with ``owner``, whoever has set it."""
        if key in self._owners:
            self._detach(key)
        if self.ledger is not None:
            self.ledger.tied(key, self._values[key])
        self._owners[key] = owner
        self._owned.setdefault(owner, {})[key] = None
        self._lodge(key, 1)

    def owned(self) -> dict[str, tuple[Client, bytes]]:
        """Return the ephemeral keys, each with its owner and its value."""
        return {key: (owner, self._values[key]) for key, owner in self._owners.items()}

    def _detach(self, key: str) -> None:
        """Have a key be nobody's; it still holds what it held as somebody's."""
        if self.ledger is not None:
            self.ledger.disowned(key, self._values[key])
        owner = self._owners.pop(key)
        self._lodge(key, -1)
        mine = self._owned[owner]
        del mine[key]
        if not mine:
            del self._owned[owner]

    def expire_owner(self, owner: Client) -> None:
        """Delete the ephemeral keys of an owner that is gone; those who watch them are told (`collect`)."""
        left: list[str] = []
        for key in self._owned.pop(owner, ()):
            if self.ledger is not None:
                self.ledger.disowned(key, self._values[key])
            del self._owners[key]
            del self._values[key]
            if (prefix := self._lodge(key, -1)) is not None:
                left.append(prefix)
            if key in self._observing or self._surveying:
                self._tell(key)
        for prefix in left:
            if prefix not in self._lodgers:
                self._clear(prefix)

    def _lodge(self, key: str, more: int) -> str | None:
        """Count who stays under a prefix; return that, None for a key that says nothing of the kind."""
        prefix = lodged_under(key)
        if not prefix:
            return None
        self._lodgers[prefix] += more
        if not self._lodgers[prefix]:
            del self._lodgers[prefix]
        return prefix

    def _clear(self, prefix: str) -> None:
        """Delete everything under a prefix; who holds an item of a queue keeps it."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._delete_key((None, 0), key)
        for key in [key for key in self._queues if key.startswith(prefix)]:
            while key in self._queues:
                self.take(None, key)

    @abstractmethod
    def _delete_key(self, place: Place, key: str) -> bool:
        """Delete a value, and tell those who watch it."""

    # -- watchers ---------------------------------------------------------------------------------

    def _watch(self, place: Place, key: str) -> bytes | None:
        self._keep(place, KeyWatch(key))
        self._observing.setdefault(key, {})[place] = None
        return self._values.get(key)

    def _watch_keys(self, place: Place, prefix: str) -> list[str | bytes]:
        found = {key: value for key, value in self._values.items() if key.startswith(prefix)}
        if sum(map(len, found.values())) > self.max_value_nbytes:
            text = (
                f"the values of all keys under {named(prefix)} are too much for one reply: watch a longer prefix, or raise "
                "ASYNCDIST_STORE_MAX_VALUE_NBYTES where the store runs"
            )
            raise RequestRefused(Reason.TOO_LARGE, text)
        self._keep(place, PrefixWatch(prefix))
        self._surveying.setdefault(prefix, {})[place] = None
        return list(itertools.chain.from_iterable(found.items()))

    def _tell(self, key: str) -> None:
        """Tell those who watch a key what it holds now."""
        value = self._values.get(key)
        kind, content = (GONE, b"") if value is None else (CHANGED, value)
        if observing := self._observing.get(key):
            self._tell_all(observing, kind + content)
        surveying = [place for prefix, places in self._surveying.items() if key.startswith(prefix) for place in places]
        if surveying:
            name = key.encode()
            self._tell_all(surveying, b"".join((kind, len(name).to_bytes(4, "little"), name, content)))

    def _tell_all(self, places: Iterable[Place], message: bytes) -> None:
        """Publish one message, which is as long as a value, and is not to be there once for each."""
        self.due.extend(Reply(client, request, OperationKind.PUBLISHED, message) for client, request in places)
