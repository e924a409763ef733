"""Finds out why an operation is stuck: probes along the chain of ranks that wait for each other.

Shortly before its deadline an operation asks each rank that it waits for what that rank itself waits for. The other rank
answers at once, asks the ranks that it waits for in turn, and answers again when it learns more. The findings thus travel
back along the chain: that ranks do not answer, that they have no pending call, or that a collective and a message wait for
each other. See K. M. Chandy, J. Misra and L. M. Haas, "Distributed Deadlock Detection", ACM TOCS 1(2), 1983.

This module does no I/O: the clock, the timers and the sending are passed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from asyncdist.base.ops import is_message
from asyncdist.errors import GroupError, MismatchError, OperationTimeoutError, ranks
from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.kernel.engine.operation import Operation, awaited, waiting_for
from asyncdist.kernel.transport.wire_format import PROBE, WAITING, pack_key

SILENT, IDLE, MISMATCH = "does not answer", "has no pending call", "mismatch"
_MAX_FINDINGS = 32
_MAX_PEERS = 4096
"""The number of ranks in an answer, which must fit into one packet."""
_RESTART_AFTER = 2.0
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


class Answer(NamedTuple):
    """A rank's answer to a probe: what it waits for.

    Attributes:
        call: The pending call; empty for an idle rank.
        group: The number of the call's group.
        is_message: Whether the call is point-to-point.
        sequence: The sequence number of a collective, or the tag of a message.
        peers: The world ranks that it waits for; -1 stands for any rank.
        is_complete: Whether the rank has completed the collective that the probe asks about.
        findings: The findings of the rank's own probe.
    """

    call: str = ""
    group: int = 0
    is_message: bool = False
    sequence: int = 0
    peers: tuple[int, ...] = ()
    is_complete: bool = False
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, operation: Operation, findings: tuple[Finding, ...] = ()) -> Answer:
        """Return the answer of a rank with a pending operation."""
        channel = operation.channel
        group = channel.sibling if channel.point_to_point and channel.sibling is not None else channel
        number = f"with tag {operation.sequence}" if is_message(operation.name) else f"#{operation.sequence}"
        peers = tuple(awaited(operation))
        call, sequence = f"{operation.name} {number}", operation.sequence
        return cls(call, group.number, channel.point_to_point, sequence, peers, False, findings)

    def pack(self, probe: bytes) -> bytes:
        """Return the answer to ``probe`` as bytes."""
        packed: bytes = msgpack.packb((probe, *self._replace(peers=self.peers[:_MAX_PEERS])))
        return packed

    @classmethod
    def unpack(cls, body: bytes) -> tuple[bytes, Answer]:
        """Return the probe that was answered, and the answer. Raises ValueError and TypeError."""
        probe, call, group, is_message, sequence, peers, is_complete, findings = msgpack.unpackb(body)
        return probe, cls(
            str(call), int(group), bool(is_message), int(sequence), tuple(peers), bool(is_complete),
            tuple(Finding(str(kind), int(rank), int(other), str(text)) for kind, rank, other, text in findings),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class _Probe:
    """The questions of one pending operation, and their answers.

    Attributes:
        began: The time of the first question.
        patience: Seconds after which a rank that has not answered is a finding.
        asked: The times of the questions, by rank.
        answers: The answers, by rank.
        askers: The ranks that wait for this rank, each with its own operation.
        reported: The findings that the askers have got.
    """

    began: float
    patience: float
    asked: dict[int, float] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    askers: set[tuple[int, bytes]] = field(default_factory=set)
    reported: tuple[Finding, ...] = ()


class WaitProbes:
    """The probes of one rank. Called under the lock of its `Progress`."""

    def __init__(self, host: EngineHost, clock: Callable[[], float]) -> None:
        self._rank, self._operations, self._timers = host.rank, host.operations, host.timers
        self._host, self._clock = host, clock
        self._probes: dict[bytes, _Probe] = {}

    def begin(self, operation: Operation, left: float) -> _Probe:
        """Ask the ranks that an operation waits for, with ``left`` seconds until a deadline; return the probe."""
        self._host.assert_held()
        now, key = self._clock(), operation.key
        self._probes = {key: probe for key, probe in self._probes.items() if key in self._operations}
        probe = self._probes.get(key)
        if probe is None or now > probe.began + max(_RESTART_AFTER, 2 * left):
            probe = self._probes[key] = _Probe(now, left / 2)
        question: bytes = msgpack.packb((key, left))
        for peer in awaited(operation):
            if peer >= 0 and peer not in probe.asked:
                probe.asked[peer] = now
                self._host.send_unordered(peer, PROBE, key[:12], question)
        # Ranks that have not answered by then are findings.
        self._timers.schedule(probe, now + probe.patience, functools.partial(self._report, key))
        return probe

    def on_probe(self, peer: int, key: bytes, body: bytes) -> None:
        """Answer the question of a peer whose operation ``key`` waits for this rank."""
        self._host.assert_held()
        try:
            asker, left = msgpack.unpackb(body)
            asker, left = bytes(asker), float(left)
        except (ValueError, TypeError):
            return
        operation, is_complete = self._host.pending_for(key)
        answer = Answer(is_complete=is_complete)
        if operation is not None and not is_complete:
            probe = self.begin(operation, left)
            probe.askers.add((peer, asker))
            answer = Answer.of(operation, self._findings(operation, probe))
        self._host.send_unordered(peer, WAITING, key, answer.pack(asker))

    def on_answer(self, peer: int, body: bytes) -> None:
        """Store the answer of a peer, and report what it changes."""
        try:
            key, answer = Answer.unpack(body)
        except (ValueError, TypeError):
            return
        probe = self._probes.get(key)
        if probe is not None:
            probe.answers[peer] = answer
            self._report(key)

    def findings(self, operation: Operation) -> tuple[Finding, ...]:
        """Return the findings so far about the ranks that an operation waits for."""
        probe = self._probes.get(operation.key)
        return () if probe is None else self._findings(operation, probe)

    def _report(self, key: bytes) -> None:
        """Send the askers of an operation a new answer if the findings have changed."""
        probe, operation = self._probes.get(key), self._operations.get(key)
        if probe is None or operation is None:
            return
        findings = self._findings(operation, probe)
        if findings != probe.reported:
            probe.reported = findings
            answer = Answer.of(operation, findings)
            for peer, asker in probe.askers:
                self._host.send_unordered(peer, WAITING, key[:12], answer.pack(asker))

    def _findings(self, operation: Operation, probe: _Probe) -> tuple[Finding, ...]:
        now, own = self._clock(), Answer.of(operation)
        found: dict[Finding, None] = {}
        for peer in own.peers:
            answer = probe.answers.get(peer)
            if answer is None:
                if now >= probe.asked.get(peer, now) + probe.patience:
                    found[Finding(SILENT, peer)] = None
            elif answer.call:
                mismatch = self._mismatch(own, peer, answer)
                found.update(dict.fromkeys(answer.findings if mismatch is None else [mismatch]))
            elif not answer.is_complete:
                found[Finding(IDLE, peer)] = None
        return tuple(found)[:_MAX_FINDINGS]

    def _mismatch(self, own: Answer, peer: int, other: Answer) -> Finding | None:
        """Return the finding that a collective and a message of one group wait for each other, if they do."""
        if own.group != other.group or own.is_message == other.is_message:
            return None
        if own.is_message:
            (message, message_rank), (collective, collective_rank) = (own, self._rank), (other, peer)
        else:
            (message, message_rank), (collective, collective_rank) = (other, peer), (own, self._rank)
        if collective_rank not in message.peers and -1 not in message.peers:
            return None
        if own.is_message:
            key = pack_key(collective.group, collective.sequence, 0)[:12]
            operation, is_complete = self._host.pending_for(key)
            if is_complete or (operation is not None and operation.key == key):
                return None
        waits = f"rank {message_rank} waits in {message.call} for rank {collective_rank}"
        return Finding(MISMATCH, message_rank, collective_rank, f"{waits}, which waits in {collective.call}")


def timeout_error(operation: Operation, findings: Iterable[Finding], problem: str) -> GroupError:
    """Return the error of an operation whose deadline has passed.

    Args:
        problem: Why the ranks that it waits for cannot be reached; empty if they can.
    """
    rank = operation.channel.world_rank
    reason, awaited = waiting_for(operation)
    peers = awaited
    ranks_by_kind: dict[str, list[int]] = {}
    for finding in [] if problem else findings:
        if finding.kind == MISMATCH:
            return MismatchError(finding.other if finding.rank == rank else finding.rank, finding.text)
        ranks_by_kind.setdefault(finding.kind, []).append(finding.rank)
    if ranks_by_kind:
        peers = sorted(set().union(*ranks_by_kind.values()))
        reason += f" ({', '.join(_describe(kind, numbers) for kind, numbers in ranks_by_kind.items())})"
    error = OperationTimeoutError(
        f"timed out after {operation.timeout:g} s, {reason}", peers=peers, awaited=awaited, timeout=operation.timeout
    )
    error.explain(problem)
    return error


def _describe(kind: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]} {kind}"
    return f"ranks {ranks(numbers)} {kind.replace('does', 'do').replace('has', 'have')}"
