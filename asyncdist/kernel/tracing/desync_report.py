"""The report of ``asyncdist trace``: which call blocks a group, and which ranks have not issued it.

It compares the flight recorder dumps of all ranks. The k-th collective of a group is the same call on every rank. A
collective that has completed on some ranks only, or that some ranks have not issued, is therefore the position of the
group. A recorder evicts completed calls, never pending ones, and counts the calls. So a call without a record, up to the
number of the last call, has completed. Times of several hosts are compared by their wall clocks.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncdist.errors import UsageError
from asyncdist.kernel.tracing.trace_record import TracedCall, TraceRecord, parse

_FILE_NAMES = "asyncdist-*-rank*.json"  # those of `Recorder.write`
# A message that was pending for a shorter time, in seconds, is not reported.
_MIN_PENDING = 0.05
# The ranks of worlds that fail, or receive the signal, together write their files within these seconds.
_SIMULTANEOUS = 30.0


def read(folder: Path) -> list[list[TraceRecord]]:
    """Return the dumps in a folder by world and rank; the world that wrote last comes first.

    Raises UsageError if the folder holds no dump, or another kind of file.
    """
    worlds: dict[str, list[TraceRecord]] = {}
    for record in sorted(map(_record, folder.glob(_FILE_NAMES)), key=lambda record: record.rank):
        worlds.setdefault(record.world, []).append(record)
    if not worlds:
        raise UsageError(
            f"{folder} holds no flight recorder: ranks write one there when a group fails (ASYNCDIST_DUMP_DIR), or on "
            "a signal (ASYNCDIST_DUMP_SIGNAL)"
        )
    return sorted(worlds.values(), key=_newest, reverse=True)


def recent(worlds: Sequence[list[TraceRecord]]) -> list[list[TraceRecord]]:
    """Return the worlds of `read` that wrote at about the same time as the first; others may be of earlier jobs."""
    return [records for records in worlds if _newest(worlds[0]) - _newest(records) < _SIMULTANEOUS]


def _newest(records: Sequence[TraceRecord]) -> float:
    return max(record.written for record in records)


def name_of(records: Sequence[TraceRecord]) -> str:
    """Return a short name of a world, as in the names of its files."""
    return f"world {records[0].world[:8]}"


def _record(path: Path) -> TraceRecord:
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise UsageError(f"{path} is no flight recorder of this version ({type(cause).__name__}: {cause})") from None


# -- positions of groups ------------------------------------------------------------------------------


@dataclass
class RankPosition:
    """The position of one group: its first collective that has not completed on all ranks.

    Attributes:
        number: Number of that collective, or of a later one in which the ranks made different calls; None if all
            collectives have completed on all ranks.
        waiting: Seconds since the call, by rank, for the ranks on which it is pending.
        through: The ranks on which it has completed.
        behind: Number of the last call, by rank, for the ranks that have not issued it; 0 without any call.
        silent: The ranks without a dump.
        calls: The recorded call of each rank that has issued it.
        differ: Whether the calls differ.
    """

    group: str
    ranks: tuple[int, ...]
    number: int | None = None
    waiting: dict[int, float] = field(default_factory=dict)
    through: list[int] = field(default_factory=list)
    behind: dict[int, int] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)
    differ: bool = False


def standings(records: Sequence[TraceRecord]) -> list[RankPosition]:
    """Return the position of each group, blocked groups first."""
    groups = {(name, ranks) for record in records for name, ranks in record.groups.items()}
    found = [_position(name, ranks, records) for name, ranks in groups]
    return sorted(found, key=lambda one: (one.number is None, -len(one.ranks), one.group))


def late_records(records: Sequence[TraceRecord]) -> list[TraceRecord]:
    """Return the records of the ranks that hold up a group: they have not issued its call, or have issued another one."""
    late: set[int] = set()
    for position in standings(records):
        late.update(position.behind)
        if position.differ:
            usual = Counter(position.calls.values()).most_common(1)[0][0]
            late.update(rank for rank, call in position.calls.items() if call != usual)
    return [record for record in records if record.rank in late]


def _position(group: str, ranks: tuple[int, ...], records: Sequence[TraceRecord]) -> RankPosition:
    position = RankPosition(group, ranks)
    members = {record.rank: record for record in records if record.groups.get(group) == ranks}
    position.silent = [rank for rank in ranks if rank not in members]
    position.number = _first_open(group, list(members.values()))
    if position.number is None:
        return position
    fingerprints = set()
    for rank, record in members.items():
        call = record.collectives(group).get(position.number)
        if call is not None:
            position.calls[rank] = call.call
            fingerprints.add(call.fingerprint)
        if call is not None and call.finished is None:
            position.waiting[rank] = record.written - call.issued
        elif call is None and record.last(group) < position.number:
            position.behind[rank] = record.last(group)
        else:
            position.through.append(rank)
    position.differ = len(fingerprints) > 1
    return position


def _first_open(group: str, records: Sequence[TraceRecord]) -> int | None:
    """Return the lowest number of a collective that is pending on a rank, or missing where others have continued.

    A later one of which the pending calls differ comes first: it fails the group on ranks that are still in earlier calls.
    """
    last = [record.last(group) for record in records]
    calls = [call for record in records for call in record.collectives(group).values()]
    opened: dict[int, set[int]] = {}
    for call in calls:
        if call.finished is None:
            opened.setdefault(call.seq, set()).add(call.fingerprint)
    differing = [number for number, fingerprints in opened.items() if len(fingerprints) > 1]
    missing = [number + 1 for number in last if number < max(last)]
    return min(differing or [*opened, *missing], default=None)


# -- late ranks -----------------------------------------------------------------------------------------


@dataclass
class RankPace:
    """How late one rank issues its collectives.

    Attributes:
        last: Share of the collectives that this rank issued last.
        lateness: Median of the seconds between the first rank's call and this rank's.
        duration: Median of the seconds that this rank's calls took.
        counted: Number of the compared collectives.
    """

    last: float
    lateness: float
    duration: float
    counted: int


def paces(records: Sequence[TraceRecord], group: str, ranks: tuple[int, ...]) -> dict[int, RankPace]:
    """Return the pace of each rank of a group, over the collectives that all ranks have recorded."""
    issued = {record.rank: record.collectives(group) for record in records if record.groups.get(group) == ranks}
    if not issued:
        return {}
    shared = sorted(set.intersection(*[set(calls) for calls in issued.values()]))
    if not shared or len(issued) < 2:
        return {}
    first = {number: min(calls[number].issued for calls in issued.values()) for number in shared}
    last = [max(issued, key=lambda rank: issued[rank][number].issued) for number in shared]
    return {
        rank: RankPace(
            last.count(rank) / len(shared),
            statistics.median(calls[number].issued - first[number] for number in shared),
            statistics.median(
                [end - calls[number].issued for number in shared if (end := calls[number].finished) is not None]
                or [0.0]
            ),
            len(shared),
        )
        for rank, calls in issued.items()
    }


# -- the text -------------------------------------------------------------------------------------------


_NO_DUMP = "left no flight recorder: killed, not signalled, or writing to the folder of another host"


def tell(records: Sequence[TraceRecord], absent: str = _NO_DUMP) -> Iterator[str]:
    """Yield sentences that name the blocked groups of a world, the calls that block them, and the ranks that cause it.

    ``absent`` says what the ranks without a record did.
    """
    silent = sorted(set(range(records[0].world_size)) - {record.rank for record in records})
    if silent:
        yield f"{ranks_in_words(silent)} {absent}."
    by_rank = {record.rank: record for record in records}
    blocked = [position for position in standings(records) if position.number is not None]
    for position in blocked:
        yield from _tell_position(position, by_rank)
    for record in records:
        yield from _tell_messages(record)
    if not blocked:
        yield "No collective is pending: every call has completed on all of these ranks."


def _tell_position(position: RankPosition, records: Mapping[int, TraceRecord]) -> Iterator[str]:
    where = f"group {position.group!r}, collective #{position.number}"
    if position.differ:
        callers: dict[str, list[int]] = {}
        for rank, call in sorted(position.calls.items()):
            callers.setdefault(call, []).append(rank)
        calls = "; ".join(f"{ranks_in_words(ranks)} called {call}" for call, ranks in callers.items())
        yield f"{where}: the ranks made different calls. {calls}."
    else:
        call = next(iter(position.calls.values()), "a call of which no rank has a record")
        yield f"{where}: {call} has not completed."
    if position.waiting:
        low, high = min(position.waiting.values()), max(position.waiting.values())
        ago = f"{low:.1f} s" if high - low < 0.1 else f"{low:.1f} to {high:.1f} s"
        yield f"  {ranks_in_words(position.waiting)} called it {ago} ago."
    for rank, number in sorted(position.behind.items()):
        if not number:
            yield f"  rank {rank} has called nothing in this group: the other ranks wait for it."
            continue
        last = records[rank].collectives(position.group).get(number)
        yield (
            f"  rank {rank} has not called it: the other ranks wait for it. Its last call was #{number}, "
            f"{'which has completed' if last is None else _in_words(last, records[rank].written)}."
        )
    if position.silent:
        yield f"  Nothing is known about {ranks_in_words(position.silent)} of this group."


def _in_words(call: TracedCall, written: float) -> str:
    end, since = ("began", call.issued) if call.finished is None else ("ended", call.finished)
    return f"{call.call}, which {end} {written - since:.1f} s before the dump"


def _tell_messages(record: TraceRecord) -> Iterator[str]:
    pending = [call for call in record.calls if call.is_message and call.finished is None]
    waiting = [call for call in pending if record.written - call.issued > _MIN_PENDING]
    if waiting:
        oldest = min(waiting, key=lambda call: call.issued)
        yield (
            f"rank {record.rank} waits for {len(waiting)} message{'s' * (len(waiting) > 1)}; the oldest, a {oldest.call} "
            f"{_other_side(oldest, record)} (tag {oldest.seq}, {oldest.nbytes} bytes), has been pending for "
            f"{record.written - oldest.issued:.1f} s."
        )


def _other_side(message: TracedCall, record: TraceRecord) -> str:
    direction = "to" if message.op.startswith("send") else "from"
    if message.peer is None:
        return f"{direction} any rank"
    members = record.groups.get(message.group)
    # A dump lists the newest groups only.
    if members is None:
        return f"{direction} rank {message.peer} of group {message.group!r}"
    return f"{direction} rank {members[message.peer]}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1 and 3``."""
    *others, last = [str(rank) for rank in sorted(ranks)]
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
