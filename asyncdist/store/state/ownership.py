"""Key ownership and watches: ephemeral keys are deleted with their owner, and watchers hear of every change.

Keys that several clients share, as the ranks of a job do, are deleted with the last of them: each client holds a prefix
lease (`prefix_lease`), an ephemeral key that names the prefix. Part of `asyncdist.store.state.machine`. No I/O.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable

from asyncdist.store.protocol.operations import CHANGED, GONE, Client, OperationKind, Reason, Reply
from asyncdist.store.state.model import KeyWatch, Place, PrefixWatch, RequestRefused, named
from asyncdist.store.state.queues import Queues

_PREFIX_LEASE = "\0here/"


def prefix_lease(prefix: str, name: str) -> str:
    """Return the ephemeral key that gives its owner a lease on ``prefix``, which must not be empty.

    When the last lease on ``prefix`` expires, every key that begins with ``prefix`` is deleted. ``name`` tells the owner
    from the other holders of leases on this prefix.
    """
    return f"{_PREFIX_LEASE}{prefix}\0{name}"


def leased_prefix(key: str) -> str:
    """Return the prefix that a key is a lease on; empty for a key that is not a prefix lease."""
    return key.removeprefix(_PREFIX_LEASE).rpartition("\0")[0] if key.startswith(_PREFIX_LEASE) else ""


class KeyOwnership(Queues):
    """The part of the state machine that has to do with whose a key is, and whom its changes concern."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._owners: dict[str, Client] = {}  # ephemeral key -> whose it is
        self._owned: dict[Client, dict[str, None]] = {}
        self._prefix_leases: Counter[str] = Counter()  # prefix -> how many stay there
        self._key_watches: dict[str, dict[Place, None]] = {}  # key -> `watch`
        self._prefix_watches: dict[str, dict[Place, None]] = {}  # prefix -> `watch_keys`
        self.max_value_nbytes = 1 << 62

    # -- owners -----------------------------------------------------------------------------------

    def own(self, owner: Client, key: str) -> None:
        """Attach an ephemeral key to ``owner``."""
        if key in self._owners:
            self._detach(key)
        if self.ledger is not None:
            self.ledger.tied(key, self._values[key])
        self._owners[key] = owner
        self._owned.setdefault(owner, {})[key] = None
        self._count_lease(key, 1)

    def owned(self) -> dict[str, tuple[Client, bytes]]:
        """Return the ephemeral keys, each with its owner and its value."""
        return {key: (owner, self._values[key]) for key, owner in self._owners.items()}

    def _detach(self, key: str) -> None:
        """Detach a key from its owner; its value is kept."""
        if self.ledger is not None:
            self.ledger.disowned(key, self._values[key])
        owner = self._owners.pop(key)
        self._count_lease(key, -1)
        mine = self._owned[owner]
        del mine[key]
        if not mine:
            del self._owned[owner]

    def expire_owner(self, owner: Client) -> None:
        """Delete the ephemeral keys of an owner that is gone; `collect` returns the notices to watchers."""
        left: list[str] = []
        for key in self._owned.pop(owner, ()):
            if self.ledger is not None:
                self.ledger.disowned(key, self._values[key])
            del self._owners[key]
            del self._values[key]
            if (prefix := self._count_lease(key, -1)) is not None:
                left.append(prefix)
            if key in self._key_watches or self._prefix_watches:
                self._notify_watchers(key)
        for prefix in left:
            if prefix not in self._prefix_leases:
                self._clear(prefix)

    def _count_lease(self, key: str, more: int) -> str | None:
        """Count the leases on a key's prefix; return the prefix, None if the key is not a prefix lease."""
        prefix = leased_prefix(key)
        if not prefix:
            return None
        self._prefix_leases[prefix] += more
        if not self._prefix_leases[prefix]:
            del self._prefix_leases[prefix]
        return prefix

    def _clear(self, prefix: str) -> None:
        """Delete all keys under a prefix; an item that a client has popped stays with that client."""
        for key in [key for key in self._values if key.startswith(prefix)]:
            self._delete_key((None, 0), key)
        for key in [key for key in self._queues if key.startswith(prefix)]:
            while key in self._queues:
                self.take(None, key)

    @abstractmethod
    def _delete_key(self, place: Place, key: str) -> bool:
        """Delete a value and notify its watchers."""

    # -- watchers ---------------------------------------------------------------------------------

    def _watch(self, place: Place, key: str) -> bytes | None:
        self._keep(place, KeyWatch(key))
        self._key_watches.setdefault(key, {})[place] = None
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
        self._prefix_watches.setdefault(prefix, {})[place] = None
        return list(itertools.chain.from_iterable(found.items()))

    def _notify_watchers(self, key: str) -> None:
        """Send a key's current value to its watchers."""
        value = self._values.get(key)
        kind, content = (GONE, b"") if value is None else (CHANGED, value)
        if observing := self._key_watches.get(key):
            self._publish_to(observing, kind + content)
        surveying = [
            place for prefix, places in self._prefix_watches.items() if key.startswith(prefix) for place in places
        ]
        if surveying:
            name = key.encode()
            self._publish_to(surveying, b"".join((kind, len(name).to_bytes(4, "little"), name, content)))

    def _publish_to(self, places: Iterable[Place], message: bytes) -> None:
        """Send one message to all of ``places``, which share its bytes."""
        self.due.extend(Reply(client, request, OperationKind.PUBLISHED, message) for client, request in places)
