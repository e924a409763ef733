"""Leases: keys and prefixes that are deleted when no client keeps them any more. Part of `machine`. No I/O.

The model is that of etcd. Each client keeps a lease of its own, to which its ephemeral keys are attached. Clients that
share keys, as the ranks of a job do, keep a lease on the prefix of these keys together: it ends when the last of them
stops keeping it. There is no clock here: the server calls `Leases.expired` when a disconnected client has expired.
"""

from __future__ import annotations

from asyncdist.base.callables import Callback, Supplier
from asyncdist.store.protocol.operations import Client, Reason
from asyncdist.store.state.change_log import Change, ChangeLog
from asyncdist.store.state.model import NO_REPLY, Place, RequestRefused, drop_from, named
from asyncdist.store.state.requests import OpenRequests


class Lease:
    """The clients that keep it, and what is deleted at its end."""

    __slots__ = ("at_end", "keepers", "keys", "prefix")

    def __init__(self, prefix: str | None = None) -> None:
        self.keepers: dict[Client, None] = {}
        self.keys: dict[str, None] = {}
        self.prefix = prefix
        self.at_end: list[Callback] = []


class Leases:
    """All leases. A client that may reconnect is named by its identity."""

    def __init__(self, log: ChangeLog, requests: OpenRequests) -> None:
        self._log = log
        self._requests = requests
        self._kept_by: dict[Client, dict[Lease, None]] = {}
        self._own: dict[Client, Lease] = {}
        self.of_key: dict[str, Lease] = {}
        """The lease by ephemeral key."""
        self._of_prefix: dict[str, Lease] = {}
        self._disconnected: dict[Client, None] = {}
        self._acquiring: dict[str, dict[tuple[Place, Client], None]] = {}

    # -- ephemeral keys ---------------------------------------------------------------------------

    def attach(self, key: str, client: Client) -> None:
        """Attach a key, which has no lease, to the client's own lease."""
        self._log.record(Change.ATTACHED, key, client)
        self._attach(key, client)

    def _attach(self, key: str, client: Client) -> None:
        lease = self._own.get(client)
        if lease is None:
            lease = self._own[client] = Lease()
            self._keep(lease, client)
        lease.keys[key] = None
        self.of_key[key] = lease

    def detach(self, key: str) -> None:
        lease = self.of_key.pop(key)
        del lease.keys[key]

    # -- leases on prefixes -----------------------------------------------------------------------

    def acquire(self, place: Place, client: Client, prefix: str) -> object:
        """Make the client a keeper of the lease on ``prefix``, and create the lease if it does not exist.

        The request blocks while the lease has keepers that are all disconnected: either one reconnects, and the client
        keeps the lease with it, or the lease ends, and the client begins with an empty prefix.
        """
        if not prefix:
            raise RequestRefused(
                Reason.INVALID, "a lease on an empty prefix: name the prefix of the keys to be deleted"
            )
        lease = self._of_prefix.get(prefix)
        if lease is None or client in lease.keepers or self._is_connected(lease):
            self._share(prefix, client)
            return None
        self._requests.open(place, self._withdraw, (prefix, client))
        self._acquiring.setdefault(prefix, {})[place, client] = None
        return NO_REPLY

    def _share(self, prefix: str, client: Client) -> None:
        self._log.record(Change.SHARED, prefix, client)
        lease = self._of_prefix.setdefault(prefix, Lease(prefix))
        self._keep(lease, client)

    def _keep(self, lease: Lease, client: Client) -> None:
        lease.keepers[client] = None
        self._kept_by.setdefault(client, {})[lease] = None

    def _is_connected(self, lease: Lease) -> bool:
        return any(keeper not in self._disconnected for keeper in lease.keepers)

    def _withdraw(self, place: Place, subject: tuple[str, Client]) -> None:
        prefix, client = subject
        drop_from(self._acquiring, prefix, (place, client))

    def admit(self, prefix: str) -> None:
        """Grant the blocked requests for the lease on ``prefix``."""
        for place, client in self._acquiring.pop(prefix, ()):
            self._share(prefix, client)
            self._requests.resolve(place, None)

    def at_end(self, client: Client, prefix: str, callback: Callback) -> None:
        """Call ``callback`` at the end of the lease on ``prefix``. Raises RequestRefused if the client does not keep it."""
        lease = self._of_prefix.get(prefix)
        if lease is None or client not in lease.keepers:
            raise RequestRefused(Reason.INVALID, f"no lease on {named(prefix)}: acquire it first")
        lease.at_end.append(callback)

    # -- clients ----------------------------------------------------------------------------------

    def connected(self, client: Client) -> None:
        """Note that the client has connected, for the first time or again."""
        self._disconnected.pop(client, None)
        for lease in self._kept_by.get(client, ()):
            if lease.prefix is not None:
                self.admit(lease.prefix)

    def disconnected(self, client: Client) -> None:
        if client in self._kept_by:
            self._disconnected[client] = None

    def expired(self, client: Client) -> list[Lease]:
        """Remove a client that does not reconnect any more; return the leases that end with it."""
        leases = list(self._kept_by.get(client, ()))
        ended = [lease for lease in leases if self._release(lease, client)]
        self._disconnected.pop(client, None)
        self._own.pop(client, None)
        return ended

    def release(self, client: Client, prefix: str) -> Lease | None:
        """Remove a client from the keepers of the lease on ``prefix``; return the lease if it ends."""
        lease = self._of_prefix.get(prefix)
        if lease is None or client not in lease.keepers:
            return None
        self._log.record(Change.RELEASED, prefix, client)
        return lease if self._release(lease, client) else None

    def _release(self, lease: Lease, client: Client) -> bool:
        """Remove a keeper; return whether the lease ends."""
        del lease.keepers[client]
        kept = self._kept_by[client]
        del kept[lease]
        if not kept:
            del self._kept_by[client]
        if lease.keepers:
            return False
        if lease.prefix is not None:
            del self._of_prefix[lease.prefix]
        return True

    # -- ends of a server -------------------------------------------------------------------------

    def attached(self) -> Supplier[dict[str, bytes]]:
        """Return a function that makes, in any thread, a table of the clients' identities by present ephemeral key.

        A client without an identity ends with the server.
        """
        keys = {client: lease.keys.copy() for client, lease in self._own.items() if isinstance(client, bytes)}
        return lambda: {key: client for client, own in keys.items() for key in own}

    def shared(self) -> dict[str, set[bytes]]:
        return {
            prefix: {client for client in lease.keepers if isinstance(client, bytes)}
            for prefix, lease in self._of_prefix.items()
        }

    def restore(self, attached: dict[str, bytes], shared: dict[str, set[bytes]]) -> None:
        """Take over the leases that an earlier server knew. Their keepers are disconnected."""
        for key, client in attached.items():
            self._attach(key, client)
        for prefix, clients in shared.items():
            lease = self._of_prefix[prefix] = Lease(prefix)
            for client in clients:
                self._keep(lease, client)
        self._disconnected.update(dict.fromkeys(self._kept_by))
