"""Reads the flight recorders of all ranks together: which call holds a group up, and which ranks are not in it.

Each rank has written its own operations. The k-th collective of a group is the same call on every rank, so one that is over
on some ranks and not on others, or that not every rank has issued, is where the group stands. A rank forgets what is over,
never what it is in, and knows how many it has called: what it has no record of was called and is over, up to that number.
Times are made comparable by the wall clocks of the hosts, which are taken at their word.
"""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncdist.base.ops import is_message
from asyncdist.errors import UsageError
from asyncdist.tracing.recorder import FILE_NAMES

# Seconds by which a call may be older than the dump without counting as waiting.
_ABOUT_NOW = 0.05
# Seconds within which the ranks of worlds that were signalled, or failed, together write their files.
_AT_ONCE = 30.0


# What is in a file, and of which types.
_RANK = {
    "rank": int, "world": str, "world_size": int, "host": str, "pid": int, "reason": str, "time": float | int,
    "clock": float | int, "groups": dict, "entries": list,
}  # fmt: skip
_GROUP = {"ranks": list, "last": int}
_ENTRY = {
    "group": str, "op": str, "seq": int, "peer": int | None, "call": str, "nbytes": int, "issued": float | int,
    "finished": float | int, "error": str | None, "fingerprint": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One operation on one rank. Times are seconds of the wall clock; ``finished`` is None while it goes on.

    A message's ``peer`` is the group rank that it goes to or comes from, None for any.
    """

    group: str
    op: str
    number: int
    peer: int | None
    words: str
    nbytes: int
    issued: float
    finished: float | None
    error: str | None
    fingerprint: int

    @property
    def is_message(self) -> bool:
        return is_message(self.op)


@dataclass(frozen=True)
class TraceRecord:
    """The dump of one rank, written at ``written``.

    ``groups`` has the ranks of each group by its name, ``counts`` how many of its collectives this rank has called.
    """

    rank: int
    world: str
    world_size: int
    host: str
    pid: int
    reason: str
    written: float
    groups: Mapping[str, tuple[int, ...]]
    counts: Mapping[str, int]
    calls: Sequence[TracedCall]

    def collectives(self, group: str) -> dict[int, TracedCall]:
        """Return the recorded calls of a group's collectives by number."""
        return {call.number: call for call in self.calls if call.group == group and not call.is_message}

    def last(self, group: str) -> int:
        """Return the number of the last collective called in a group; 0 if none was."""
        return max(self.counts.get(group, 0), *self.collectives(group), 0)


def read(folder: Path) -> list[list[TraceRecord]]:
    """Return the dumps in a folder by world and rank; the world that wrote last comes first.

    Raises UsageError if the folder holds no dump, or another kind of file.
    """
    worlds: dict[str, list[TraceRecord]] = {}
    for record in sorted(map(_record, folder.glob(FILE_NAMES)), key=lambda record: record.rank):
        worlds.setdefault(record.world, []).append(record)
    if not worlds:
        raise UsageError(
            f"{folder} holds no flight recorder: ranks write one there when a group fails (ASYNCDIST_DUMP_DIR), or on "
            "a signal (ASYNCDIST_DUMP_SIGNAL)"
        )
    return sorted(worlds.values(), key=_newest, reverse=True)


def recent(worlds: Sequence[list[TraceRecord]]) -> list[list[TraceRecord]]:
    """Return the worlds of `read` that wrote at about the time of the first; others may be of earlier jobs."""
    return [records for records in worlds if _newest(worlds[0]) - _newest(records) < _AT_ONCE]


def _newest(records: Sequence[TraceRecord]) -> float:
    return max(record.written for record in records)


def name_of(records: Sequence[TraceRecord]) -> str:
    """Return a short name of a world, as in the names of its files."""
    return f"world {records[0].world[:8]}"


def _record(path: Path) -> TraceRecord:
    try:
        facts = _typed(json.loads(path.read_text(encoding="utf-8")), _RANK)
        groups = {name: _typed(group, _GROUP) for name, group in facts.pop("groups").items()}
        written = facts.pop("time")
        offset = written - facts.pop("clock")  # from the clock of the process to that of the wall
        return TraceRecord(
            calls=[_call(_typed(entry, _ENTRY), offset) for entry in facts.pop("entries")],
            written=written,
            groups={name: tuple(operator.index(rank) for rank in group["ranks"]) for name, group in groups.items()},
            counts={name: group["last"] for name, group in groups.items()},
            **facts,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise UsageError(f"{path} is no flight recorder of this version ({type(cause).__name__}: {cause})") from None


def _typed(content: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected fields of a file; TypeError for a value of another type."""
    for name, kind in types.items():
        if not isinstance(content[name], kind):
            raise TypeError(f"{name} is {content[name]!r}")
    return {name: content[name] for name in types}


def _call(entry: Mapping[str, Any], offset: float) -> TracedCall:
    return TracedCall(
        entry["group"],
        entry["op"],
        entry["seq"],
        entry["peer"],
        entry["call"],
        entry["nbytes"],
        entry["issued"] + offset,
        entry["finished"] + offset if entry["finished"] else None,
        entry["error"],
        entry["fingerprint"],
    )


# -- where a group stands -----------------------------------------------------------------------------


@dataclass
class RankPosition:
    """The position of one group: its first collective that has not completed on all ranks, and how far each rank is.

    ``number`` is None if all have completed everywhere. ``waiting`` are the ranks that are in it, with the seconds since
    their call; ``through`` those on which it has completed; ``behind`` those that have not called it, with the number of
    their last call (0: there was none); ``silent`` those that have written nothing.
    """

    group: str
    ranks: tuple[int, ...]
    number: int | None = None
    waiting: dict[int, float] = field(default_factory=dict)
    through: list[int] = field(default_factory=list)
    behind: dict[int, int] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    calls: dict[int, str] = field(default_factory=dict)
    """The call of each rank that has issued it, as far as recorded."""
    differ: bool = False


def standings(records: Sequence[TraceRecord]) -> list[RankPosition]:
    """Return the position of each group, those that are held up first."""
    groups = {(name, ranks) for record in records for name, ranks in record.groups.items()}
    found = [_standing(name, ranks, records) for name, ranks in groups]
    return sorted(found, key=lambda one: (one.number is None, -len(one.ranks), one.group))


def _standing(group: str, ranks: tuple[int, ...], records: Sequence[TraceRecord]) -> RankPosition:
    standing = RankPosition(group, ranks)
    members = {record.rank: record for record in records if record.groups.get(group) == ranks}
    standing.silent = [rank for rank in ranks if rank not in members]
    standing.number = _first_open(group, list(members.values()))
    if standing.number is None:
        return standing
    fingerprints = set()
    for rank, record in members.items():
        call = record.collectives(group).get(standing.number)
        if call is None:
            if record.last(group) < standing.number:
                standing.behind[rank] = record.last(group)
            else:
                standing.through.append(rank)
            continue
        standing.calls[rank] = call.words
        fingerprints.add(call.fingerprint)
        if call.finished is None:
            standing.waiting[rank] = record.written - call.issued
        else:
            standing.through.append(rank)
    standing.differ = len(fingerprints) > 1
    return standing


def _first_open(group: str, records: Sequence[TraceRecord]) -> int | None:
    """Return the lowest number of a collective that is pending on a rank, or missing where others have continued."""
    last = [record.last(group) for record in records]
    calls = [call for record in records for call in record.collectives(group).values()]
    opened = [call.number for call in calls if call.finished is None]
    lacking = [number + 1 for number in last if number < max(last)]
    return min([*opened, *lacking], default=None)


# -- who comes last -------------------------------------------------------------------------------------


@dataclass
class RankPace:
    """How often one rank comes last to a collective (share), and by how much (median, seconds).

    ``lateness`` is counted from the rank that came first; ``duration`` is that of its own calls.
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
            statistics.median(_durations(calls, shared)),
            len(shared),
        )
        for rank, calls in issued.items()
    }


def _durations(calls: Mapping[int, TracedCall], numbers: Sequence[int]) -> list[float]:
    return [end - calls[number].issued for number in numbers if (end := calls[number].finished) is not None] or [0.0]


# -- in words -------------------------------------------------------------------------------------------


def tell(records: Sequence[TraceRecord]) -> Iterator[str]:
    """Yield sentences that say what holds which group of a world up, and which ranks cause it as far as recorded."""
    silent = sorted(set(range(records[0].world_size)) - {record.rank for record in records})
    if silent:
        yield f"{_ranks(silent)} left no flight recorder: killed, writing to a folder of another host, or not signalled."
    held_up = [standing for standing in standings(records) if standing.number is not None]
    for standing in held_up:
        yield from _tell_standing(standing, {record.rank: record for record in records})
    for record in records:
        yield from _tell_messages(record)
    if not held_up:
        yield "No collective is pending: every call has completed on all ranks that wrote a file."


def _tell_standing(standing: RankPosition, records: Mapping[int, TraceRecord]) -> Iterator[str]:
    where = f"group {standing.group!r}, collective #{standing.number}"
    if standing.differ:
        callers: dict[str, list[int]] = {}
        for rank, words in sorted(standing.calls.items()):
            callers.setdefault(words, []).append(rank)
        said = "; ".join(f"{_ranks(ranks)} called {words}" for words, ranks in callers.items())
        yield f"{where}: the ranks called different things. {said}."
    else:
        words = next(iter(standing.calls.values()), "a call of which no rank has a record")
        yield f"{where}: {words} has not completed."
    if standing.waiting:
        yield f"  {_ranks(standing.waiting)} in it, since {_spread(standing.waiting.values())}."
    for rank, number in sorted(standing.behind.items()):
        if not number:
            yield f"  rank {rank} has called nothing in this group: it is what the others wait for."
            continue
        last = records[rank].collectives(standing.group).get(number)
        yield (
            f"  rank {rank} never called it: it is what the others wait for. Its last was #{number}, "
            f"{'which has completed' if last is None else _in_words(last, records[rank].written)}."
        )
    if standing.silent:
        yield f"  {_ranks(standing.silent)} of this group left no recorder."


def _in_words(call: TracedCall, written: float) -> str:
    end, since = ("began", call.issued) if call.finished is None else ("ended", call.finished)
    return f"{call.words}, which {end} {written - since:.1f} s before it wrote"


def _tell_messages(record: TraceRecord) -> Iterator[str]:
    pending = [call for call in record.calls if call.is_message and call.finished is None]
    waiting = [call for call in pending if record.written - call.issued > _ABOUT_NOW]
    if waiting:
        longest = min(waiting, key=lambda call: call.issued)
        many, since = "s" * (len(waiting) > 1), record.written - longest.issued
        yield (
            f"rank {record.rank} waits in {len(waiting)} message{many}, the longest a {longest.words} "
            f"{_whom(longest, record)} (tag {longest.number}, {longest.nbytes} bytes) since {since:.1f} s."
        )


def _whom(message: TracedCall, record: TraceRecord) -> str:
    way = "to" if message.op.startswith("send") else "from"
    if message.peer is None:
        return f"{way} any rank"
    members = record.groups.get(message.group)  # of very many groups the oldest are not written
    return (
        f"{way} rank {message.peer} of group {message.group!r}"
        if members is None
        else f"{way} rank {members[message.peer]}"
    )


def _ranks(ranks: Any) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _spread(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:.1f} s" if high - low < 0.1 else f"{low:.1f} to {high:.1f} s"
