"""Client sessions that survive reconnects, and their leases.

A client names itself with an identity at the beginning of each connection. The table keeps the replies to its changes
until the client confirms them, so that a change that is retried after a broken connection is applied once. Beyond a limit
the table drops the oldest replies and remembers up to which request it did. When a connection breaks, the session's
*lease* starts to run; at its end the session closes and the server deletes its ephemeral keys. ``now`` is an argument of
every method that needs the time. Used by `store.server` and `store.persistence`. No I/O, no clock.
"""

from __future__ import annotations

import heapq
import math

from asyncdist.store.protocol.operations import Client, OperationKind, Reply
from asyncdist.store.state.change_log import Change, ChangeLog
from asyncdist.store.state.limits import MemoryQuota
from asyncdist.store.state.model import KEPT_ANSWERS, KEPT_NBYTES, MemberContents, cost_of


class ClientSession:
    """A client of a store. ``connection`` is where it is now; None while it is waited for, until ``until``."""

    __slots__ = ("_answers", "_log", "_quota", "connection", "identity", "lease", "nbytes", "unsure", "until")

    def __init__(
        self, identity: bytes, lease: float, connection: Client | None, quota: MemoryQuota, log: ChangeLog
    ) -> None:
        self.identity = identity
        self.lease = lease
        self.connection: Client | None = connection
        self.until = math.inf
        self.nbytes = 0
        """Bytes that its kept replies cost."""
        self.unsure = 0
        """Up to this request, what is not known may have been done all the same."""
        self._answers: dict[int, Reply] = {}
        self._quota = quota
        self._log = log

    def answer_to(self, request: int) -> Reply | None:
        """Return what a change came to that was made already."""
        return self._answers.get(request)

    def remember(self, reply: Reply) -> None:
        """Keep what a change came to."""
        self._answers[reply.request] = Reply(None, reply.request, reply.kind, reply.value)  # not the connection
        self._count(cost_of(reply.value))
        self._log.record(Change.ANSWERED, self.identity, reply.request, reply.kind, reply.value)
        while len(self._answers) > KEPT_ANSWERS or (self.nbytes > KEPT_NBYTES and len(self._answers) > 1):
            self._drop(next(iter(self._answers)))

    def received(self, before: int) -> None:
        """All answers to requests with a smaller number have arrived."""
        self._let_go(before)
        self._log.record(Change.RECEIVED, self.identity, before)

    def _drop(self, last: int) -> None:
        """Throw away the oldest answers, up to that one, although nobody has heard them."""
        self.unsure = max(self.unsure, last)
        self._let_go(last + 1)
        self._log.record(Change.DROPPED, self.identity, last)

    def _let_go(self, before: int) -> None:
        answers = self._answers
        while answers and (oldest := next(iter(answers))) < before:
            self._count(-cost_of(answers.pop(oldest).value))

    @property
    def last(self) -> int:
        """The highest id of the requests that were executed and may be repeated."""
        return max(self._answers, default=self.unsure)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._quota.nbytes += nbytes

    def contents(self) -> MemberContents:
        """Return what a later server must know."""
        answers = {request: (int(reply.kind), reply.value) for request, reply in self._answers.items()}
        return self.lease, answers, self.unsure

    def restore(self, contents: MemberContents) -> None:
        """Take what an earlier server knew."""
        _, answers, self.unsure = contents
        self._answers = {
            request: Reply(None, request, OperationKind(kind), value) for request, (kind, value) in answers.items()
        }
        self._count(sum(cost_of(value) for _, value in answers.values()))


class SessionTable:
    """All clients of one store that have an identity."""

    def __init__(self, quota: MemoryQuota | None = None, log: ChangeLog | None = None) -> None:
        self._quota = quota or MemoryQuota()
        self._log = log or ChangeLog()
        self._members: dict[bytes, ClientSession] = {}
        self._away: list[tuple[float, bytes]] = []

    def get(self, identity: bytes) -> ClientSession | None:
        """Return a client that is known."""
        return self._members.get(identity)

    def contents(self) -> dict[bytes, MemberContents]:
        """Return what a later server must know of all clients."""
        return {identity: member.contents() for identity, member in self._members.items()}

    def restore(self, contents: dict[bytes, MemberContents], now: float) -> None:
        """Wait for the clients of an earlier server."""
        for identity, known in contents.items():
            member = self._members[identity] = ClientSession(identity, known[0], None, self._quota, self._log)
            member.restore(known)
            self._wait_for(member, now)

    def __len__(self) -> int:
        return len(self._members)

    def open(self, identity: bytes, lease: float, connection: Client) -> tuple[ClientSession, bool, Client | None]:
        """A client has come over a connection: return it, whether it was known, and the connection it had till now."""
        member = self._members.get(identity)
        if member is None:
            member = ClientSession(identity, lease, connection, self._quota, self._log)
            self._members[identity] = member
            self._log.record(Change.ARRIVED, identity, lease)
            return member, False, None
        before, member.connection = member.connection, connection
        member.lease, member.until = lease, math.inf
        return member, True, before

    def disconnect(self, member: ClientSession, connection: Client, now: float) -> None:
        """A connection is over. If it is the one that the client has, its lease runs."""
        if member.connection is connection:
            member.connection = None
            self._wait_for(member, now)

    def _wait_for(self, member: ClientSession, now: float) -> None:
        member.until = now + member.lease
        heapq.heappush(self._away, (member.until, member.identity))

    def close(self, member: ClientSession) -> None:
        """A client says that it will not be back."""
        if self._members.pop(member.identity, None) is not None:
            self._quota.nbytes -= member.nbytes
            self._log.record(Change.FORGOTTEN, member.identity)

    def next_end(self) -> float:
        """Return when the next lease may run out."""
        return self._away[0][0] if self._away else math.inf

    def expire(self, now: float) -> list[ClientSession]:
        """Forget the clients whose leases have run out, and return them."""
        over = []
        while self._away and self._away[0][0] <= now:
            until, identity = heapq.heappop(self._away)
            member = self._members.get(identity)
            if member is not None and member.until == until:  # it has not been back since
                self.close(member)
                over.append(member)
        return over
