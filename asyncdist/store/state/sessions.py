"""Client sessions that survive reconnects, and their leases.

A client sends its identity at the beginning of each connection. Its session keeps the replies to its changes until the
client confirms them, so that a change that is retried after a broken connection is applied once. Beyond a limit the
session drops the oldest replies, and keeps the number of the last request whose reply it dropped. When a connection
breaks, the session's lease starts to run; at its end the session closes and the server deletes its ephemeral keys.
``now`` is an argument of every method that needs the time.
"""

from __future__ import annotations

import heapq
import math

from asyncdist.base.callables import Supplier
from asyncdist.store.protocol.operations import Client, OperationKind, Reply
from asyncdist.store.state.change_log import Change, ChangeLog
from asyncdist.store.state.model import KEPT_ANSWERS, KEPT_NBYTES, MemberContents, MemoryQuota, cost_of


class ClientSession:
    """A client of a store, across its connections. ``connection`` is None while it is disconnected, until ``until``."""

    __slots__ = ("_answers", "_log", "_quota", "connection", "identity", "lease", "nbytes", "unsure", "until")

    def __init__(
        self, identity: bytes, lease: float, connection: Client | None, quota: MemoryQuota, log: ChangeLog
    ) -> None:
        self.identity = identity
        self.lease = lease
        self.connection: Client | None = connection
        self.until = math.inf
        self.nbytes = 0
        """Memory of the kept replies in bytes."""
        self.unsure = 0
        """Requests up to this one may have been executed, although their replies are not kept."""
        self._answers: dict[int, Reply] = {}
        self._quota = quota
        self._log = log

    def answer_to(self, request: int) -> Reply | None:
        return self._answers.get(request)

    def remember(self, reply: Reply) -> None:
        self._answers[reply.request] = Reply(None, *reply[1:])
        self._count(cost_of(reply.value))
        if self._log.recording:
            self._log.record(Change.ANSWERED, self.identity, reply.request, reply.kind, reply.value)
        while len(self._answers) > KEPT_ANSWERS or (self.nbytes > KEPT_NBYTES and len(self._answers) > 1):
            self._drop(next(iter(self._answers)))

    def received(self, before: int) -> None:
        self._discard(before)
        self._log.record(Change.RECEIVED, self.identity, before)

    def _drop(self, last: int) -> None:
        """Drop the replies up to that of request ``last``, which may not have arrived."""
        self.unsure = max(self.unsure, last)
        self._discard(last + 1)
        self._log.record(Change.DROPPED, self.identity, last)

    def _discard(self, before: int) -> None:
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

    def gather(self) -> tuple[float, dict[int, Reply], int]:
        return self.lease, self._answers.copy(), self.unsure

    def restore(self, contents: MemberContents) -> None:
        _, answers, self.unsure = contents
        self._answers = {
            request: Reply(None, request, OperationKind(kind), value) for request, (kind, value) in answers.items()
        }
        self._count(sum(cost_of(value) for _, value in answers.values()))


class SessionTable:
    """The client sessions of one store."""

    def __init__(self, quota: MemoryQuota | None = None, log: ChangeLog | None = None) -> None:
        self._quota = quota or MemoryQuota()
        self._log = log or ChangeLog()
        self._sessions: dict[bytes, ClientSession] = {}
        self._disconnected: list[tuple[float, bytes]] = []
        """A heap of the ends of leases, with the identities. It may hold sessions that have reconnected since."""

    def get(self, identity: bytes) -> ClientSession | None:
        return self._sessions.get(identity)

    def gather(self) -> Supplier[dict[bytes, MemberContents]]:
        gathered = {identity: session.gather() for identity, session in self._sessions.items()}
        return lambda: {
            identity: (lease, {request: (int(reply.kind), reply.value) for request, reply in answers.items()}, unsure)
            for identity, (lease, answers, unsure) in gathered.items()
        }

    def restore(self, contents: dict[bytes, MemberContents], now: float) -> None:
        for identity, known in contents.items():
            session = self._sessions[identity] = ClientSession(identity, known[0], None, self._quota, self._log)
            session.restore(known)
            self._start_lease(session, now)

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, identity: bytes, lease: float, connection: Client) -> tuple[ClientSession, bool, Client | None]:
        """Open or resume a session; return it, whether it was known, and its previous connection."""
        session = self._sessions.get(identity)
        if session is None:
            session = ClientSession(identity, lease, connection, self._quota, self._log)
            self._sessions[identity] = session
            self._log.record(Change.ARRIVED, identity, lease)
            return session, False, None
        before, session.connection = session.connection, connection
        session.lease, session.until = lease, math.inf
        return session, True, before

    def disconnect(self, session: ClientSession, connection: Client, now: float) -> None:
        """Start the session's lease at the end of a connection, unless the session has a newer connection."""
        if session.connection is connection:
            session.connection = None
            self._start_lease(session, now)

    def _start_lease(self, session: ClientSession, now: float) -> None:
        session.until = now + session.lease
        heapq.heappush(self._disconnected, (session.until, session.identity))

    def close(self, session: ClientSession) -> None:
        if self._sessions.pop(session.identity, None) is not None:
            self._quota.nbytes -= session.nbytes
            self._log.record(Change.FORGOTTEN, session.identity)

    def next_end(self) -> float:
        return self._disconnected[0][0] if self._disconnected else math.inf

    def restart_leases(self, now: float) -> None:
        """Start the leases of disconnected clients again: the server was stopped, and no client could return."""
        for session in self._sessions.values():
            if session.connection is None:
                self._start_lease(session, now)

    def expire(self, now: float) -> list[ClientSession]:
        ended = []
        while self._disconnected and self._disconnected[0][0] <= now:
            until, identity = heapq.heappop(self._disconnected)
            session = self._sessions.get(identity)
            if session is not None and session.until == until:  # it has not reconnected since
                self.close(session)
                ended.append(session)
        return ended
