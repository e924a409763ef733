"""The store's state machine: executes requests on keys, queues, barriers, channels and watches, without I/O.

Called by `asyncdist.store.server` and by the file store, which replays its log. It imports only `store.protocol` and the
standard library: no asyncio, no sockets, no clock. A request is an operation of a *client* (any hashable; a server passes
the connection) under a *request id* that the client chooses. Each concept is a class of its own, in the module of its
name: `KeySpace`, `Waiters`, `Queues`, `Barriers`, `OpenStreams`, `Leases`. The invariants of them all:

* A blocked request is an entry of `OpenRequests` and of one concept. `cancel` and `leave` remove it from both, so that
  no wake-up is lost on a client that has left.
* `MemoryQuota` counts, and `ChangeLog` records, every change of a value or a queue.
* An ephemeral key is attached to its client's lease until another request sets or deletes it, and is deleted at the end
  of the lease.
* Nothing depends on time: a timeout is a `cancel` by the waiting client. The same requests in the same order give the
  same replies and the same state, on which the file store's log relies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from asyncdist.base.callables import AnyFunction, Supplier
from asyncdist.store.protocol.operations import Client, Op, OperationKind, Reply
from asyncdist.store.state.change_log import ChangeLog
from asyncdist.store.state.key_space import Barriers, KeySpace
from asyncdist.store.state.leases import Lease, Leases
from asyncdist.store.state.model import NO_REPLY, Contents, MemoryQuota, Place, RequestRefused, SizeLimits
from asyncdist.store.state.open_streams import OpenStreams
from asyncdist.store.state.queues import Queues
from asyncdist.store.state.requests import OpenRequests, Waiters


class StoreState:
    """The state machine.

    A caller that calls a concept directly, bypassing `execute`, sends the replies of ``requests.collect()``.
    """

    def __init__(
        self, limits: SizeLimits | None = None, quota: MemoryQuota | None = None, log: ChangeLog | None = None
    ) -> None:
        limits, quota, log = limits or SizeLimits(), quota or MemoryQuota(), log or ChangeLog()
        self.requests = OpenRequests()
        self.leases = Leases(log, self.requests)
        waiters, self._streams = Waiters(self.requests), OpenStreams(limits, self.requests)
        self.keys = KeySpace(limits, quota, log, waiters, self._streams, self.leases)
        self.queues = Queues(limits, quota, log, self.requests, waiters)
        self.barriers = Barriers(limits, self.requests, self.keys)
        self._waiters = waiters
        self._identities: dict[Client, bytes] = {}
        self._immediate: dict[Op, AnyFunction] = {
            Op.SET: self.keys.set,
            Op.ADD: self.keys.add,
            Op.CHECK: self.check,
            Op.COMPARE_SET: self.keys.compare_set,
            Op.DELETE_KEY: self.keys.delete,
            Op.NUM_KEYS: partial(len, self.keys),
            Op.APPEND: self.keys.append,
            Op.MULTI_SET: self.keys.multi_set,
            Op.LIST_KEYS: self.keys.list_keys,
            Op.QUEUE_PUSH: self.queues.push,
            Op.QUEUE_LEN: self.queues.length,
            Op.PUBLISH: self._streams.publish,
        }
        self._of_place: dict[Op, AnyFunction] = {
            Op.GET: self.keys.get,
            Op.MULTI_GET: self.keys.multi_get,
            Op.OFFER: self._offer,
            Op.WAIT: self.wait,
            Op.QUEUE_POP: self.queues.pop,
            Op.BARRIER: self.barriers.join,
            Op.SUBSCRIBE: self._streams.subscribe,
            Op.WATCH: self._watch,
            Op.WATCH_KEYS: self._watch_keys,
            Op.SET_EPHEMERAL: self._set_ephemeral,
            Op.RESTORE_EPHEMERAL: self._restore_ephemeral,
            Op.ACQUIRE_LEASE: self._acquire_lease,
            Op.RELEASE_LEASE: self._release_lease,
            Op.CANCEL: self._cancel,
            Op.CONFIRM: self._confirm,
            Op.LEAVE: self._leave,
        }

    def execute(self, client: Client, request: int, op: Op, args: tuple[Any, ...]) -> list[Reply]:
        """Execute a request; return the replies that are due, its own included unless it blocks."""
        requests = self.requests
        try:
            handler = self._immediate.get(op)
            result = self._of_place[op]((client, request), *args) if handler is None else handler(*args)
            if result is not NO_REPLY:
                requests.due.append(Reply(client, request, OperationKind.RESULT, result))
        except RequestRefused as refused:
            requests.due.append(refused.reply(client, request))
        return requests.collect()

    @property
    def num_open(self) -> int:
        return self.requests.num_open

    # -- keys and queues ---------------------------------------------------------------------------

    def check(self, keys: list[str]) -> bool:
        peek, queues = self.keys.peek, self.queues
        for key in keys:
            if peek(key) is None and key not in queues:
                return False
        return True

    def wait(self, place: Place, keys: list[str]) -> Any:
        missing = {key for key in keys if key not in self.keys and key not in self.queues}
        return self._waiters.add(place, Op.WAIT, keys, missing) if missing else None

    def _offer(self, place: Place, key: str, value: bytes, keys: list[str], optional: list[str]) -> Any:
        self.keys.compare_set(key, b"", value)
        return self.keys.multi_get(place, keys, optional)

    def _watch(self, place: Place, key: str) -> bytes | None:
        self._streams.watch(place, key)
        return self.keys.peek(key)

    def _watch_keys(self, place: Place, prefix: str) -> list[str | bytes]:
        return self._streams.watch_prefix(place, prefix, self.keys.under(prefix))

    # -- leases -----------------------------------------------------------------------------------

    def bind(self, client: Client, identity: bytes) -> list[Reply]:
        """Let ``identity`` keep the leases of ``client``, which is a connection. An identity outlives connections.

        Return the replies that are due to other clients.
        """
        self._identities[client] = identity
        self.leases.connected(identity)
        return self.requests.collect()

    def expire(self, client: Client) -> list[Reply]:
        """Delete what the leases of an identity, or of a client without one, held; return the replies that are due."""
        self._expire(client)
        return self.requests.collect()

    def _expire(self, client: Client) -> None:
        for lease in self.leases.expired(client):
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        for key in list(lease.keys):
            self.keys.delete(key)
        if lease.prefix is not None:
            for key in self.keys.under(lease.prefix):
                self.keys.delete(key)
            self.queues.clear(lease.prefix)
            self.leases.admit(lease.prefix)
        for callback in lease.at_end:
            callback()

    def _set_ephemeral(self, place: Place, key: str, value: bytes) -> None:
        self.keys.set(key, value)
        self.leases.attach(key, self._keeper(place))

    def _restore_ephemeral(self, place: Place, key: str, value: bytes) -> bool:
        if key in self.keys:
            return False
        self._set_ephemeral(place, key, value)
        return True

    def _acquire_lease(self, place: Place, prefix: str) -> object:
        return self.leases.acquire(place, self._keeper(place), prefix)

    def _release_lease(self, place: Place, prefix: str) -> None:
        lease = self.leases.release(self._keeper(place), prefix)
        if lease is not None:
            self._end(lease)

    def _keeper(self, place: Place) -> Client:
        return self._identities.get(place[0], place[0])

    # -- cancelled requests and clients that leave -------------------------------------------------

    def leave(self, client: Client) -> list[Reply]:
        """Withdraw all requests of a client that has left; return the replies that are due to other clients."""
        return self.execute(client, 0, Op.LEAVE, ())

    def _cancel(self, place: Place, request: int) -> object:
        self.requests.withdraw((place[0], request))
        return NO_REPLY

    def _confirm(self, place: Place, request: int) -> object:
        self.queues.confirm((place[0], request))
        return NO_REPLY

    def _leave(self, place: Place) -> object:
        client = place[0]
        given_back = []
        for each in self.requests.places_of(client):
            if self.queues.is_unconfirmed(each):
                self.requests.close(each)
                given_back.append(each)
            else:
                self.requests.withdraw(each)
        # After all withdrawals, or another pop of this client could get an item.
        self.queues.give_back(given_back)
        self.queues.release_wakeups(client)
        identity = self._identities.pop(client, None)
        if identity is None:
            self._expire(client)
        else:
            self.leases.disconnected(identity)
        return NO_REPLY

    # -- ends of a server -------------------------------------------------------------------------

    def gather(self) -> Supplier[Contents]:
        """Return a function that makes, in any thread, a copy of the present contents, without client sessions.

        This call copies references only. The rest takes a second for millions of items.
        """
        values, queues, serial = self.keys.contents(), self.queues.gather(), self.queues.last_serial
        attached, shared = self.leases.attached(), self.leases.shared()
        return lambda: Contents(values, queues(), serial, attached=attached(), shared=shared)

    def restore(self, contents: Contents) -> None:
        self.keys.restore(contents.values)
        self.queues.restore(contents.queues, contents.pushed)
        self.leases.restore(contents.attached, contents.shared)
