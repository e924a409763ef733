"""The messages of an agreement, and what is agreed on. See `agreement`."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

Ballot = tuple[int, int]
"""The position of the coordinator among the members, and its attempt."""

_LONGEST_REASON = 256
"""The characters of a reason that a message contains."""
_MOST_REASONS = 64
"""The different reasons in one part of a message."""
_ONE_OF_MANY = "one of many different reasons; the logs of the members have it"
MOST_MEMBERS = 1 << 20
"""The members in one part of a message."""


class AgreementKind(enum.IntEnum):
    """The kinds of messages of an agreement."""

    PROMISE = enum.auto()
    PREPARE = enum.auto()
    ACCEPT = enum.auto()
    ACCEPTED = enum.auto()
    DECIDE = enum.auto()
    QUIT = enum.auto()


_PROMISE, _PREPARE, _ACCEPT, _ACCEPTED, _DECIDE, _QUIT = AgreementKind


class MemberEnd(NamedTuple):
    """Why a member takes part no more, and whether it is alive and has quit."""

    reason: str
    has_quit: bool = False


class Decision(NamedTuple):
    """The decision of the members.

    Attributes:
        votes: The votes of the members that go on, by rank in the order of the members.
        excluded: Why the other members do not go on, by rank.
        quitters: The excluded members that were alive and had quit.
    """

    votes: Mapping[int, bytes]
    excluded: Mapping[int, str]
    quitters: Sequence[int] = ()


class AgreementMessage(NamedTuple):
    """A message of an agreement.

    Attributes:
        kind: The kind of the message.
        ballot: The ballot that it belongs to.
        vote: PROMISE: the sender's vote.
        decision: PROMISE: what the sender accepted last, if anything. ACCEPT, DECIDE: the decision.
        accepted_in: PROMISE: the ballot in which the sender accepted it.
        ended: The members that have ended, as far as the sender knows.
        reason: QUIT: why.
        lost: PROMISE, PREPARE: the members that the sender holds lost, and why.
    """

    kind: int
    ballot: Ballot = (0, 0)
    vote: bytes = b""
    decision: Decision | None = None
    accepted_in: Ballot | None = None
    ended: Mapping[int, MemberEnd] = {}
    reason: str = ""
    lost: Mapping[int, str] = {}

    def pack(self) -> bytes:
        """Return the message as bytes, which stay few with thousands of members, because a transport limits them.

        It contains equal values once and shortens reasons.
        """
        ended, lost = dict(sorted(self.ended.items())), dict(sorted(self.lost.items()))
        decided = self.decision
        decision = decided and (_runs(decided.votes), _runs(_shortened(decided.excluded)), decided.quitters)
        short = _shortened({member: end.reason for member, end in ended.items()})
        ends = _runs({member: MemberEnd(short[member], end.has_quit) for member, end in ended.items()})
        reason = self.reason[:_LONGEST_REASON]
        packed: bytes = msgpack.packb(
            (self.kind, self.ballot, self.vote, decision, self.accepted_in, ends, reason, _runs(_shortened(lost)))
        )
        return packed

    @classmethod
    def unpack(cls, body: bytes) -> AgreementMessage:
        """Return the message of `pack`. Raises ValueError for other bytes."""
        try:
            kind, ballot, vote, decision, accepted_in, ended, reason, lost = msgpack.unpackb(body)
            return cls(
                AgreementKind(kind),
                _ballot(ballot),
                bytes(vote),
                None if decision is None else _decision(*decision),
                None if accepted_in is None else _ballot(accepted_in),
                {member: MemberEnd(str(why), bool(has_quit)) for member, (why, has_quit) in _members(*ended)},
                str(reason),
                {member: str(why) for member, why in _members(*lost)},
            )
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as cause:
            raise ValueError("not a message of an agreement") from cause


def _ballot(numbers: Sequence[int]) -> Ballot:
    position, attempt = numbers
    return int(position), int(attempt)


def _decision(votes: Sequence[Any], excluded: Sequence[Any], quitters: Sequence[int]) -> Decision:
    return Decision(
        {member: bytes(vote) for member, vote in _members(*votes)},
        {member: str(reason) for member, reason in _members(*excluded)},
        tuple(map(int, quitters)),
    )


def _shortened(reasons: Mapping[int, str]) -> dict[int, str]:
    """Return the reasons, each not too long, and not too many different ones."""
    kept: set[str] = set()
    short = {}
    for member, reason in reasons.items():
        cut = reason[:_LONGEST_REASON]
        if len(kept) < _MOST_REASONS or cut in kept:
            kept.add(cut)
        else:
            cut = _ONE_OF_MANY
        short[member] = cut
    return short


def _runs(values: Mapping[int, Any]) -> tuple[list[Any], list[int]]:
    """Return the different values, and for each run of consecutive members with one value: its index, the first, their
    number."""
    numbers: dict[Any, int] = {}
    runs: list[int] = []
    for member, value in values.items():
        number = numbers.setdefault(value, len(numbers))
        if runs and number == runs[-3] and member == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (number, member, 1)
    return list(numbers), runs


def _members(values: Sequence[Any], runs: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yield what `_runs` has packed, by member."""
    if sum(runs[2::3]) > MOST_MEMBERS:
        raise ValueError("too many members")
    for number, first, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        for member in range(first, first + count):
            yield member, values[number]
