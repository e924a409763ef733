"""Finds out where a stuck operation is stuck: probes along the chain of ranks that wait for each other.

Shortly before its deadline an operation asks each rank that it waits for where that rank waits. The other rank
answers at once, asks the ranks that it waits for itself, and answers again when it learns more. The findings thus travel
back along the chain: that ranks do not answer, that they have no pending call, or that a collective and a message wait for
each other. See K. M. Chandy, J. Misra and L. M. Haas, "Distributed Deadlock Detection", ACM TOCS 1(2), 1983.

`endpoint` owns one `WaitProbes`. This module does no I/O: the clock, the timers and the sending are passed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgpack

from asyncdist.base.ops import is_message
from asyncdist.base.timers import TimerTable
from asyncdist.engine.operation import Operation, awaited, waiting_for
from asyncdist.errors import GroupError, MismatchError, OperationTimeoutError, ranks
from asyncdist.transport.wire_format import PROBE, WAITING, pack_key

SILENT, IDLE, MISMATCH = "does not answer", "has no pending call", "mismatch"
_MOST_FINDINGS = 32
_MOST_PEERS = 4096
"""Ranks in an answer; the message must fit into one packet."""
_KEEPS = 2.0
"""Seconds, or twice the time left until the deadline if that is longer, after which a probe asks again."""


class Finding(NamedTuple):
    """One end of a chain of waiting ranks.

    Attributes:
        kind: SILENT, IDLE or MISMATCH.
        rank: World rank; of a mismatch, the rank that waits for a message.
        other: Of a mismatch, the world rank that waits in the collective; else -1.
        text: Of a mismatch, both calls as a sentence.
    """

    kind: str
    rank: int
    other: int = -1
    text: str = ""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank waits: its answer to a probe.

    Attributes:
        call: The pending call; empty for an idle rank.
        group: The number of the call's group.
        sequence: The sequence number of a collective, the tag of a message.
        peers: The world ranks that it waits for; -1 stands for any rank.
        over: Whether the rank has completed the collective that the probe asks about.
        findings: The findings of the rank's own probe.
    """

    call: str = ""
    group: int = 0
    message: bool = False
    sequence: int = 0
    peers: tuple[int, ...] = ()
    over: bool = False
    findings: tuple[Finding, ...] = ()

    def pack(self, probe: bytes) -> bytes:
        """Return the answer to ``probe`` as bytes."""
        fields = (
            self.call,
            self.group,
            self.message,
            self.sequence,
            self.peers[:_MOST_PEERS],
            self.over,
            self.findings,
        )
        packed: bytes = msgpack.packb((probe, *fields))
        return packed

    @classmethod
    def unpack(cls, body: bytes) -> tuple[bytes, Standing]:
        """Return the probe that was answered, and the answer. Raises ValueError and TypeError."""
        probe, call, group, message, sequence, peers, over, findings = msgpack.unpackb(body)
        return probe, cls(
            str(call), int(group), bool(message), int(sequence), tuple(peers), bool(over),
            tuple(Finding(str(kind), int(rank), int(other), str(text)) for kind, rank, other, text in findings),
        )  # fmt: skip


def standing_of(operation: Operation) -> Standing:
    """Return where a rank waits that has this operation pending."""
    channel = operation.channel
    group = channel.sibling if channel.point_to_point and channel.sibling is not None else channel
    which = f"with tag {operation.sequence}" if is_message(operation.name) else f"#{operation.sequence}"
    return Standing(
        f"{operation.name} {which}", group.number, channel.point_to_point, operation.sequence, tuple(awaited(operation))
    )


@dataclass(slots=True, eq=False)
class _Probe:
    """The questions of one pending operation, and the answers."""

    began: float
    patience: float
    asked: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Standing] = field(default_factory=dict)
    askers: set[tuple[int, bytes]] = field(default_factory=set)
    told: tuple[Finding, ...] = ()


class WaitProbes:
    """The probes of one rank. Called under the lock of its `Progress`.

    Args:
        rank: This rank.
        operations: The pending operations by key, the oldest first.
        standing: Returns the pending operation that answers a question about a key, and whether the collective of that key
            is over; None and False for an idle rank.
        send: Sends a control message: peer, kind, key, body.
        timers: The timers of the endpoint.
        clock: The monotonic clock.
    """

    def __init__(
        self,
        rank: int,
        operations: Mapping[bytes, Operation],
        standing: Callable[[bytes], tuple[Operation | None, bool]],
        send: Callable[[int, int, bytes, bytes], None],
        timers: TimerTable,
        clock: Callable[[], float],
    ) -> None:
        self._rank, self._operations, self._standing = rank, operations, standing
        self._send, self._timers, self._clock = send, timers, clock
        self._probes: dict[bytes, _Probe] = {}

    def begin(self, operation: Operation, left: float) -> _Probe:
        """Ask the ranks that an operation waits for, with ``left`` seconds until a deadline; return the probe."""
        now, key = self._clock(), operation.key
        self._probes = {key: probe for key, probe in self._probes.items() if key in self._operations}
        probe = self._probes.get(key)
        if probe is None or now > probe.began + max(_KEEPS, 2 * left):
            probe = self._probes[key] = _Probe(now, left / 2)
        question: bytes = msgpack.packb((key, left))
        for peer in awaited(operation):
            if peer >= 0 and peer not in probe.asked:
                probe.asked[peer] = now
                self._send(peer, PROBE, key[:12], question)
        # Ranks that have not answered by then are a finding.
        self._timers.schedule(probe, now + probe.patience, functools.partial(self._tell, key))
        return probe

    def asked(self, peer: int, key: bytes, body: bytes) -> None:
        """Answer the question of a peer whose operation ``key`` waits for this rank."""
        try:
            asker, left = msgpack.unpackb(body)
            asker, left = bytes(asker), float(left)
        except (ValueError, TypeError):
            return
        operation, over = self._standing(key)
        answer = Standing(over=over)
        if operation is not None and not over:
            probe = self.begin(operation, left)
            probe.askers.add((peer, asker))
            answer = replace(standing_of(operation), findings=self._findings(operation, probe))
        self._send(peer, WAITING, key, answer.pack(asker))

    def answered(self, peer: int, body: bytes) -> None:
        """Take the answer of a peer."""
        try:
            key, answer = Standing.unpack(body)
        except (ValueError, TypeError):
            return
        probe = self._probes.get(key)
        if probe is not None:
            probe.answers[peer] = answer
            self._tell(key)

    def findings(self, operation: Operation) -> tuple[Finding, ...]:
        """Return the findings so far about the ranks that an operation waits for."""
        probe = self._probes.get(operation.key)
        return () if probe is None else self._findings(operation, probe)

    def _tell(self, key: bytes) -> None:
        """Send the askers of an operation a new answer if the findings have changed."""
        probe, operation = self._probes.get(key), self._operations.get(key)
        if probe is None or operation is None:
            return
        findings = self._findings(operation, probe)
        if findings != probe.told:
            probe.told = findings
            answer = replace(standing_of(operation), findings=findings)
            for peer, asker in probe.askers:
                self._send(peer, WAITING, key[:12], answer.pack(asker))

    def _findings(self, operation: Operation, probe: _Probe) -> tuple[Finding, ...]:
        now, own = self._clock(), standing_of(operation)
        found: dict[Finding, None] = {}
        for peer in own.peers:
            answer = probe.answers.get(peer)
            if answer is None:
                if now >= probe.asked.get(peer, now) + probe.patience:
                    found[Finding(SILENT, peer)] = None
            elif answer.call:
                mismatch = self._mismatch(own, peer, answer)
                found.update(dict.fromkeys(answer.findings if mismatch is None else [mismatch]))
            elif not answer.over:
                found[Finding(IDLE, peer)] = None
        return tuple(found)[:_MOST_FINDINGS]

    def _mismatch(self, own: Standing, peer: int, other: Standing) -> Finding | None:
        """Return the finding that a collective and a message of one group wait for each other, if they do."""
        if own.group != other.group or own.message == other.message:
            return None
        message, waits, collective, calls = (
            (own, self._rank, other, peer) if own.message else (other, peer, own, self._rank)
        )
        if calls not in message.peers and -1 not in message.peers:
            return None
        if own.message:
            key = pack_key(collective.group, collective.sequence, 0)[:12]
            called, over = self._standing(key)
            if over or (called is not None and called.key == key):
                return None
        text = f"rank {waits} waits in {message.call} for rank {calls}, which waits in {collective.call}"
        return Finding(MISMATCH, waits, calls, text)


def timeout_error(operation: Operation, findings: Iterable[Finding], trouble: str) -> GroupError:
    """Return the error of an operation whose deadline has passed.

    Args:
        operation: The operation.
        findings: The findings of its probe.
        trouble: Why the ranks that it waits for cannot be reached; empty if they can.
    """
    rank = operation.channel.world_rank
    reason, peers = waiting_for(operation)
    named: dict[str, list[int]] = {}
    for finding in [] if trouble else findings:
        if finding.kind == MISMATCH:
            return MismatchError(finding.other if finding.rank == rank else finding.rank, finding.text)
        named.setdefault(finding.kind, []).append(finding.rank)
    if named:
        peers = sorted({one for group in named.values() for one in group})
        reason += f" ({', '.join(_said(kind, who) for kind, who in named.items())})"
    error = OperationTimeoutError(
        f"timed out after {operation.timeout:g} s, {reason}", peers=peers, timeout=operation.timeout
    )
    error.explain(trouble)
    return error


def _said(kind: str, who: Sequence[int]) -> str:
    if len(who) == 1:
        return f"rank {who[0]} {kind}"
    return f"ranks {ranks(who)} {kind.replace('does', 'do').replace('has', 'have')}"
