"""One rank's flight recorder dump as values: the input of the report and of the conversion to torch's format."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from asyncdist.base.ops import is_message
from asyncdist.kernel.tracing.stacks import Stack

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
        awaits: World ranks for whose data or arrival a pending operation waits, as its own rank knows; -1 for any rank.
        done: The payload bytes of the parts of a pending operation that are complete; None if it has a single part.
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
    awaits: Sequence[int] = ()
    done: int | None = None

    @property
    def is_message(self) -> bool:
        return is_message(self.op)


_LIVE = ("awaits", "done")
# The fields that every entry has.
_CALL = {name: kind for name, kind in get_type_hints(TracedCall).items() if name not in _LIVE}


@dataclass(frozen=True)
class TraceRecord:
    """The dump of one rank.

    Attributes:
        written: Time of the wall clock in seconds at which the rank wrote the dump.
        groups: The ranks of each group, by its name.
        counts: The number of collectives that this rank has issued, by the name of the group.
        open_groups: The names of the groups that the rank has not destroyed.
        errors: The errors of the groups that have failed, by name.
        calls_per_second: Rate of completed calls.
        bytes_per_second: Rate of the payload of these calls.
        lost: Why peers are lost or have left, by rank, as this rank knows.
        heard: Seconds since the last heartbeat of peers, by rank.
        waiting: How the rank waits for its peers: "spin", "yield" or "sleep"; empty if unknown.
        stacks: The Python stacks of the process; empty if they were not asked for.
        generation: The generation of the default group, when the rank was asked for its status.
        members: The world ranks of the members of the default group then, in group order.
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
    open_groups: frozenset[str] = frozenset()
    errors: Mapping[str, str] = field(default_factory=dict)
    calls_per_second: float = 0.0
    bytes_per_second: float = 0.0
    lost: Mapping[int, str] = field(default_factory=dict)
    heard: Mapping[int, float] = field(default_factory=dict)
    waiting: str = ""
    stacks: Sequence[Stack] = ()
    generation: int = 0
    members: tuple[int, ...] = ()

    def collectives(self, group: str) -> dict[int, TracedCall]:
        """Return the recorded calls of a group's collectives by number."""
        return {call.seq: call for call in self.calls if call.group == group and not call.is_message}

    def last(self, group: str) -> int:
        """Return the number of the last collective that this rank has issued in a group; 0 if it has issued none."""
        return max(self.counts.get(group, 0), *self.collectives(group), 0)


def parse(content: Mapping[str, Any]) -> TraceRecord:
    """Return the record of a file's JSON values. Raises KeyError, TypeError, ValueError or AttributeError for others."""
    facts = _typed(content, _RANK)
    described = facts.pop("groups")
    groups = {name: _typed(group, _GROUP) for name, group in described.items()}
    rates = content.get("rates") or {}
    written = facts.pop("time")
    # The difference of the wall clock and the process's clock.
    offset = written - facts.pop("clock")
    return TraceRecord(
        calls=[_call(entry, offset) for entry in facts.pop("entries")],
        written=written,
        groups={name: tuple(operator.index(rank) for rank in group["ranks"]) for name, group in groups.items()},
        counts={name: group["last"] for name, group in groups.items()},
        open_groups=frozenset(name for name, group in described.items() if group.get("open")),
        errors={name: str(group["error"]) for name, group in described.items() if group.get("error")},
        calls_per_second=float(rates.get("calls", 0.0)),
        bytes_per_second=float(rates.get("nbytes", 0.0)),
        lost={operator.index(rank): str(reason) for rank, reason in content.get("lost", ())},
        heard={operator.index(rank): float(seconds) for rank, seconds in content.get("heard", ())},
        waiting=str(content.get("waiting", "")),
        stacks=[Stack.parse(stack) for stack in content.get("stacks", ())],
        generation=operator.index(content.get("generation", 0)),
        members=tuple(map(operator.index, content.get("members", ()))),
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
    return TracedCall(**fields, **{name: entry[name] for name in _LIVE if name in entry})
