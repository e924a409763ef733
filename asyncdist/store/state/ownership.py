"""Owners of ephemeral keys: the keys of an owner are deleted when it expires. No I/O.

Keys that several clients share, as the ranks of a job do, are deleted with the last of them: each client holds a prefix
lease (`prefix_lease`), an ephemeral key that names the prefix.
"""

from __future__ import annotations

from collections import Counter

from asyncdist.store.protocol.operations import Client
from asyncdist.store.state.change_log import Change, ChangeLog

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


class Ownership:
    """The owners by ephemeral key. An owner is a client, or the identity of a client that may reconnect."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._owners: dict[str, Client] = {}
        self._owned: dict[Client, dict[str, None]] = {}
        self._prefix_leases: Counter[str] = Counter()

    def __contains__(self, key: str) -> bool:
        return key in self._owners

    def attach(self, key: str, owner: Client) -> None:
        """Give a key, which has no owner, to ``owner``."""
        self._log.record(Change.OWNED, key, owner)
        self._attach(key, owner)

    def _attach(self, key: str, owner: Client) -> None:
        self._owners[key] = owner
        self._owned.setdefault(owner, {})[key] = None
        if prefix := leased_prefix(key):
            self._prefix_leases[prefix] += 1

    def detach(self, key: str) -> bool:
        """Detach a key from its owner; return whether it had one."""
        if key not in self._owners:
            return False
        owner = self._owners.pop(key)
        keys = self._owned[owner]
        del keys[key]
        if not keys:
            del self._owned[owner]
        if prefix := leased_prefix(key):
            self._prefix_leases[prefix] -= 1
        return True

    def keys_of(self, owner: Client) -> list[str]:
        """Return the keys of an owner."""
        return list(self._owned.get(owner, ()))

    def is_leased(self, prefix: str) -> bool:
        """Whether an owner holds a lease on ``prefix``."""
        return self._prefix_leases[prefix] > 0

    def contents(self) -> dict[str, bytes]:
        """Return the owners by key that an identity names; another owner ends with the server."""
        return {key: owner for key, owner in self._owners.items() if isinstance(owner, bytes)}

    def restore(self, owners: dict[str, bytes]) -> None:
        """Take over the owners that an earlier server knew."""
        for key, owner in owners.items():
            self._attach(key, owner)
