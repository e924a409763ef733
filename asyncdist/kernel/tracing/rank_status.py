"""The status of each rank of a running world: its current call, the ranks that it waits for, its rates.

The records are those that all ranks have made at about the same time. Unlike `desync_report`, which finds the call that
blocks a group, this module describes every rank, also while nothing is blocked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncdist.kernel.tracing.desync_report import paces
from asyncdist.kernel.tracing.stacks import Stack
from asyncdist.kernel.tracing.trace_record import TracedCall, TraceRecord

# A rank that issues this share of so many collectives last, and is so many seconds late, is a straggler.
_STRAGGLER_SHARE, _STRAGGLER_CALLS, _STRAGGLER_SECONDS = 0.8, 10, 1e-3


@dataclass
class RankStatus:
    """The status of one rank.

    Attributes:
        rank: Its rank when the members met, which is its member id.
        state: ``pending``, ``failed`` (the last call, or for a job a group of it), or ``idle`` between calls and before the
            first. For a job also ``silent`` if it does not answer; ``lost`` or ``left`` if others say so.
        call: The oldest pending call; without one, the newest call; None before the first.
        seconds: Seconds since the call if it is pending, else since its end; None without one.
        pending: The number of pending calls.
        calls_per_second: Rate of completed calls.
        bytes_per_second: Rate of the payload of these calls.
        waits_for: The ranks that a pending call waits for: those that have not issued the collective, or the other side of
            a message. Empty if all members have issued it, and for a receive from any rank.
        waited_for_by: The ranks that wait for this one.
        remarks: Sentences about a different call, a straggler, and an error.
        is_member: Whether it is in the present generation of the default group.
        reason: Why a rank is silent, lost or failed.
        last_heard: Seconds since the last sign of life; 0 for a rank that answers, None if it is not known.
        waited_for: Seconds of the longest wait for this rank.
        culprit: Whether the job is stuck because of this rank.
    """

    rank: int
    state: str = "idle"
    host: str = ""
    pid: int | None = None
    generation: int | None = None
    call: TracedCall | None = None
    seconds: float | None = None
    pending: int = 0
    calls_per_second: float = 0.0
    bytes_per_second: float = 0.0
    waits_for: list[int] = field(default_factory=list)
    waited_for_by: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    stacks: Sequence[Stack] = ()
    is_member: bool = True
    reason: str = ""
    last_heard: float | None = 0.0
    waited_for: float = 0.0
    culprit: bool = False

    @property
    def progress(self) -> float | None:
        """The completed part of a pending call, from 0 to 1; None if it is not known."""
        call = self.call
        if call is None or call.finished is not None or call.done is None or not call.nbytes:
            return None
        return min(1.0, call.done / call.nbytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the status as JSON values, with the keys that docs/debugging.md documents."""
        call = self.call
        return {
            "rank": self.rank,
            "state": self.state,
            "host": self.host,
            "pid": self.pid,
            "generation": self.generation,
            "member": self.is_member,
            "reason": self.reason,
            "operation": call.op if call else None,
            "number": call.seq if call else None,
            "call": call.call if call else None,
            "group": call.group if call else None,
            "nbytes": call.nbytes if call else None,
            "done_nbytes": call.done if call and call.finished is None else None,
            "seconds": self.seconds,
            "pending_calls": self.pending,
            "calls_per_second": self.calls_per_second,
            "bytes_per_second": self.bytes_per_second,
            "last_heard": self.last_heard,
            "waits_for": self.waits_for,
            "waited_for_by": self.waited_for_by,
            "remarks": self.remarks,
            "culprit": self.culprit,
        }


@dataclass
class WaitEdge:
    """Ranks that wait in one call for other ranks."""

    call: TracedCall
    waiting: list[int]
    awaited: list[int]


def statuses(records: Sequence[TraceRecord]) -> list[RankStatus]:
    """Return the status of each rank of a world that has a record, in the order of the records."""
    by_rank = {record.rank: record for record in records}
    found = {record.rank: _status(record, by_rank) for record in records}
    mark_waits(found)
    for group, ranks in {item for record in records for item in record.groups.items()}:
        _mark_stragglers(found, records, group, ranks)
        _mark_different_calls(found.values(), group)
    return list(found.values())


def mark_waits(found: Mapping[int, RankStatus]) -> None:
    """Note at each rank which others wait for it, and for how long."""
    for status in found.values():
        status.waited_for_by, status.waited_for = [], 0.0
    for rank, status in found.items():
        for peer in (found[peer] for peer in status.waits_for if peer in found):
            peer.waited_for_by.append(rank)
            peer.waited_for = max(peer.waited_for, status.seconds or 0.0)


def wait_edges(found: Iterable[RankStatus]) -> list[WaitEdge]:
    """Return who waits for whom, one edge for each call and set of awaited ranks."""
    edges: dict[tuple[object, ...], WaitEdge] = {}
    for status in found:
        if status.call is not None and status.waits_for:
            key = (status.call.group, status.call.seq, status.call.call, *status.waits_for)
            edges.setdefault(key, WaitEdge(status.call, [], status.waits_for)).waiting.append(status.rank)
    return list(edges.values())


def quantity(value: float, unit: str = "") -> str:
    """Write a number with three digits and a decimal prefix: ``31.4 MB``."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def _status(record: TraceRecord, records: Mapping[int, TraceRecord]) -> RankStatus:
    status = RankStatus(
        record.rank,
        host=record.host,
        pid=record.pid,
        generation=record.generation,
        calls_per_second=record.calls_per_second,
        bytes_per_second=record.bytes_per_second,
        stacks=record.stacks,
    )
    if not record.calls:
        return status
    pending = [call for call in record.calls if call.finished is None]
    newest = max(record.calls, key=lambda call: call.finished or 0.0)
    status.call = call = min(pending, key=lambda call: call.issued, default=newest)
    status.pending = len(pending)
    if call.finished is None:
        status.state, status.waits_for = "pending", _awaits(call, record, records)
    elif call.error:
        status.state = "failed"
    status.seconds = max(0.0, record.written - (call.finished or call.issued))
    if call.error:
        status.remarks.append(call.error)
    return status


def _awaits(call: TracedCall, record: TraceRecord, records: Mapping[int, TraceRecord]) -> list[int]:
    # A dump lists the newest groups only.
    members = record.groups.get(call.group, ())
    if call.is_message:
        return [members[call.peer]] if members and call.peer is not None else []
    return [rank for rank in members if rank not in records or records[rank].last(call.group) < call.seq]


def _mark_different_calls(found: Iterable[RankStatus], group: str) -> None:
    """Mark the ranks whose call differs from the one that most ranks have issued under its number."""
    calls = [(status, call) for status in found if (call := status.call) and call.group == group]
    by_number: dict[int, list[tuple[RankStatus, TracedCall]]] = {}
    for status, call in calls:
        if status.state in ("pending", "failed") and not call.is_message:
            by_number.setdefault(call.seq, []).append((status, call))
    for same in by_number.values():
        usual = Counter(call.call for _, call in same).most_common(1)[0][0]
        for status, call in same:
            if call.call != usual:
                status.remarks.insert(0, f"mismatch: other ranks called {usual}")


def _mark_stragglers(
    found: Mapping[int, RankStatus], records: Sequence[TraceRecord], group: str, ranks: tuple[int, ...]
) -> None:
    for rank, pace in paces(records, group, ranks).items():
        is_late = pace.last >= _STRAGGLER_SHARE and pace.lateness >= _STRAGGLER_SECONDS
        if is_late and pace.counted >= _STRAGGLER_CALLS:
            found[rank].remarks.append(
                f"straggler: last in {pace.last:.0%} of {pace.counted} collectives of {group!r}, "
                f"{pace.lateness * 1e3:.1f} ms behind the first (median)"
            )
