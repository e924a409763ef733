"""The status of a whole job from the answers of its ranks: a row per rank, and the ranks at which it is stuck.

``asyncdist top`` shows it. The rows build on `rank_status`, and add the ranks that do not answer: what the others know
about them, and what their processes do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncdist.kernel.tracing.desync_report import standings, tell
from asyncdist.kernel.tracing.rank_status import RankStatus, mark_waits, statuses
from asyncdist.kernel.tracing.trace_record import TraceRecord, parse

LATE = 10.0
"""Seconds for which others wait for a rank before it is marked as late."""
_TOLD = 1.0
"""Seconds after which a pending collective is worth a sentence."""
_SILENT = "did not answer"
_ORDER = {"lost": 0, "silent": 1, "failed": 2, "pending": 3, "idle": 4, "left": 5}


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
