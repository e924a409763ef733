"""The status of a running job: of each rank its current call, the ranks that it waits for and its rates; and who is stuck.

``asyncdist top`` and torch's debug server show it. The records are those that all ranks have made at about the same time.
Unlike `desync_report`, which finds the call that blocks a group, `statuses` describes every rank, also while nothing is
blocked. `job_status` adds the ranks that do not answer: what the others know about them, and what their processes do.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncdist.kernel.tracing.desync_report import paces, standings, tell
from asyncdist.kernel.tracing.stacks import Stack
from asyncdist.kernel.tracing.trace_record import TracedCall, TraceRecord, parse

LATE = 10.0
"""Seconds for which others wait for a rank before it is marked as late."""
_TOLD = 1.0
"""Seconds after which a pending collective is worth a sentence."""
_SILENT = "did not answer"
_ORDER = {"lost": 0, "silent": 1, "failed": 2, "pending": 3, "idle": 4, "left": 5}
# The fields that a status as JSON values shows, and those of its call by their keys.
_SHOWN = (
    "rank", "state", "host", "pid", "generation", "reason", "seconds", "calls_per_second", "bytes_per_second",
    "last_heard", "waits_for", "waited_for_by", "remarks", "culprit",
)  # fmt: skip
_SHOWN_OF_CALL = {"operation": "op", "number": "seq", "call": "call", "group": "group", "nbytes": "nbytes"}
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
        own = {name: getattr(self, name) for name in _SHOWN}
        of_call = {name: getattr(call, field, None) for name, field in _SHOWN_OF_CALL.items()}
        done = call.done if call and call.finished is None else None
        return {**own, "member": self.is_member, "pending_calls": self.pending, **of_call, "done_nbytes": done}


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


# -- the job ----------------------------------------------------------------------------------------


@dataclass
class JobStatus:
    """A world of a job.

    Attributes:
        generation: The highest generation of the default group that a rank has.
        answered_by: The rank that has collected the answers of the others.
        rows: Its ranks.
        story: The sentences of `desync_report` about the open groups.
    """

    world: str
    world_size: int
    name: str
    generation: int
    answered_by: int
    time: float
    rows: list[RankStatus]
    story: list[str]

    @property
    def members(self) -> int:
        """The size of the present generation."""
        return sum(row.is_member for row in self.rows)

    @property
    def healthy(self) -> bool:
        """Whether every member answers, no group has failed, and no rank holds up others."""
        return not any(row.culprit or row.state in ("silent", "lost", "failed") for row in self.rows if row.is_member)

    def as_dict(self) -> dict[str, Any]:
        """Return the status as JSON values, with the keys that docs/debugging.md documents."""
        fields = dataclasses.asdict(dataclasses.replace(self, rows=[]))
        del fields["rows"]
        report = fields.pop("story")
        ranks = [row.as_dict() for row in self.rows]
        return {**fields, "members": self.members, "healthy": self.healthy, "report": report, "ranks": ranks}


def job_status(answer: Mapping[str, Any], late: float = LATE) -> JobStatus:
    """Return the status of a world.

    Args:
        answer: The answer to `asyncdist.status.viewer.JobViewer.ask`.
        late: Seconds for which others wait for a rank before it is marked as the culprit.
    """
    records = [_open_groups(parse(content)) for content in answer["ranks"]]
    silent = {int(rank): (str(why), pid) for rank, why, pid in answer["silent"]}
    newest = max(records, key=lambda record: record.generation)
    by_rank = {record.rank: record for record in records}
    rows = {row.rank: row for row in statuses(records)}
    for row in rows.values():
        _look_at_groups(row, by_rank[row.rank])
    addresses = [None if each is None else str(each[0]) for each in answer["addresses"]]
    hosts = {addresses[record.rank]: record.host for record in records}
    for rank, address in enumerate(addresses):
        if rank not in rows:
            why, pid = silent.get(rank, (_SILENT, None))
            rows[rank] = _absent(rank, why, records)
            rows[rank].pid, rows[rank].host = pid, hosts.get(address, address or "")
    for row in rows.values():
        row.is_member = not newest.members or row.rank in newest.members
    mark_waits(rows)
    _mark_culprits(rows, records, late)
    return JobStatus(
        world=str(answer["world"]),
        world_size=int(answer["world_size"]),
        name=str(answer["ranks"][0].get("name", "")),
        generation=newest.generation,
        answered_by=int(answer["answered_by"]),
        time=max(record.written for record in records),
        rows=[rows[rank] for rank in sorted(rows)],
        story=_story(records, rows),
    )


def stuck_first(rows: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the rows in the order of interest: culprits, ranks that do not answer, failed ones, then the longest waits."""
    return sorted(
        rows, key=lambda row: (not row.culprit, not row.is_member, _ORDER[row.state], -(row.seconds or 0.0), row.rank)
    )


def _open_groups(record: TraceRecord) -> TraceRecord:
    """Return a record without the groups that its rank has destroyed, and without their completed calls."""
    groups = {name: ranks for name, ranks in record.groups.items() if name in record.open_groups}
    counts = {name: count for name, count in record.counts.items() if name in groups}
    errors = {name: error for name, error in record.errors.items() if name in groups}
    # A call of a group that the recorder does not know any more may be pending.
    calls = [call for call in record.calls if call.group in groups or call.group not in record.groups]
    return dataclasses.replace(record, groups=groups, counts=counts, errors=errors, calls=calls)


def _look_at_groups(row: RankStatus, record: TraceRecord) -> None:
    """A rank has failed if one of its groups has. A call that all members have issued waits for what it says itself."""
    call, row.reason = row.call, next(iter(record.errors.values()), "")
    if row.state == "pending" and call is not None and not row.waits_for:
        row.waits_for = [rank for rank in call.awaits if rank >= 0]
    row.state = "failed" if row.reason else "pending" if row.state == "pending" else "idle"
    row.remarks = [remark for remark in row.remarks if call is None or remark != call.error]


def _absent(rank: int, why: str, records: Sequence[TraceRecord]) -> RankStatus:
    """Return the row of a rank that has not answered."""
    heard = [record.heard[rank] for record in records if rank in record.heard]
    lost = next((record.lost[rank] for record in records if rank in record.lost), None)
    row = RankStatus(rank, "silent", reason=why, last_heard=min(heard, default=None))
    if lost is not None:
        # `GroupFailures.left` has the words of a goodbye.
        row.state, row.reason = ("left" if lost.startswith("it has destroyed") else "lost"), lost
    return row


def _mark_culprits(rows: Mapping[int, RankStatus], records: Sequence[TraceRecord], late: float) -> None:
    """Mark the ranks at which chains of waits end, and those whose call differs from the others'."""
    for row in rows.values():
        does_not_wait = not row.waits_for
        if row.state in ("silent", "lost"):
            row.culprit = row.is_member
        elif row.waited_for >= late and does_not_wait:
            row.culprit = True
            row.remarks.insert(0, f"late: {len(row.waited_for_by)} wait for it")
        elif any(remark.startswith("mismatch") for remark in row.remarks):
            row.culprit = True


def _story(records: Sequence[TraceRecord], rows: Mapping[int, RankStatus]) -> list[str]:
    lines = [f"rank {row.rank} is {row.state}: {row.reason}." for row in rows.values() if row.reason and row.is_member]
    blocked = [position for position in standings(records) if position.number is not None]
    waited = max((seconds for position in blocked for seconds in position.waiting.values()), default=0.0)
    if blocked and (waited >= _TOLD or any(row.culprit for row in rows.values())):
        told = [line for line in tell(records, _SILENT) if not line.endswith(f"{_SILENT}.")]
        lines += [line.replace(" before the dump", " ago") for line in told]
    return lines
