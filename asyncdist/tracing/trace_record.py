"""One rank's flight recorder dump as values: the input of the report and of the conversion to torch's format."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from asyncdist.base.ops import is_message

# The types of the fields of a file and of its groups; those of its entries are the fields of `TracedCall`.
_RANK = {
    "rank": int, "world": str, "world_size": int, "host": str, "pid": int, "reason": str, "time": float | int,
    "clock": float | int, "groups": dict, "entries": list,
}  # fmt: skip
_GROUP = {"ranks": list, "last": int}


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One operation on one rank.

    Attributes:
        seq: Number of the collective, or tag of the message.
        peer: Group rank of the other side of a message; None for any rank, and for collectives.
        call: The call in source form.
        issued: Time of the wall clock in seconds.
        finished: Time of the wall clock in seconds; None while the operation is pending.
    """

    group: str
    op: str
    seq: int
    peer: int | None
    call: str
    nbytes: int
    issued: float
    finished: float | None
    error: str | None
    fingerprint: int

    @property
    def is_message(self) -> bool:
        return is_message(self.op)


_CALL = get_type_hints(TracedCall)


@dataclass(frozen=True)
class TraceRecord:
    """The dump of one rank.

    Attributes:
        written: Time of the wall clock in seconds at which the rank wrote the dump.
        groups: The ranks of each group, by its name.
        counts: The number of collectives that this rank has issued, by the name of the group.
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
        return {call.seq: call for call in self.calls if call.group == group and not call.is_message}

    def last(self, group: str) -> int:
        """Return the number of the last collective that this rank has issued in a group; 0 if it has issued none."""
        return max(self.counts.get(group, 0), *self.collectives(group), 0)


def parse(content: Mapping[str, Any]) -> TraceRecord:
    """Return the record of a file's JSON values. Raises KeyError, TypeError, ValueError or AttributeError for others."""
    facts = _typed(content, _RANK)
    groups = {name: _typed(group, _GROUP) for name, group in facts.pop("groups").items()}
    written = facts.pop("time")
    # The difference of the wall clock and the process's clock.
    offset = written - facts.pop("clock")
    return TraceRecord(
        calls=[_call(entry, offset) for entry in facts.pop("entries")],
        written=written,
        groups={name: tuple(operator.index(rank) for rank in group["ranks"]) for name, group in groups.items()},
        counts={name: group["last"] for name, group in groups.items()},
        **facts,
    )


def _typed(content: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in ``types``; raise TypeError for a value of another type."""
    for name, kind in types.items():
        if not isinstance(content[name], kind):
            raise TypeError(f"{name} is {content[name]!r}")
    return {name: content[name] for name in types}


def _call(entry: Mapping[str, Any], offset: float) -> TracedCall:
    fields = _typed(entry, _CALL)
    fields["issued"] += offset
    fields["finished"] = fields["finished"] + offset if fields["finished"] else None
    return TracedCall(**fields)
