"""The agreements that a group's members call: what they vote for, and what a decision means."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import msgpack

from asyncdist.errors import GroupAbortedError, GroupError, NoQuorumError
from asyncdist.kernel.engine.agreements import REGROUP
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.operation import Channel, local_failure
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.membership.messages import Decision
from asyncdist.kernel.transport.wire_format import generation_of


class Agreed(NamedTuple):
    """The agreement of the members of a group.

    Attributes:
        flag: The bitwise AND of all members' flags: whether all passed True. False, or 0, too if a member that is alive
            did not take part.
        lost: The ids (`Group.member_ids`) of the members that did not take part.
    """

    flag: bool | int
    lost: tuple[int, ...]


@dataclass(eq=False)
class MemberAgreement:
    """One call of this rank that ends in an agreement: ``agree`` or ``regroup``."""

    endpoint: Endpoint
    channel: Channel
    name: str
    number: int
    vote: Any
    """This member's vote: data that msgpack packs."""
    value_of: Callable[[Decision, list[Any]], Any]
    """Returns the value of the call's work from the decision and all votes; called without locks."""

    def __post_init__(self) -> None:
        self.work: Work[Any] = Work(self.endpoint.progress)
        self._vote: bytes = msgpack.packb(self.vote)

    def start(self, limit: float, *, background: bool) -> None:
        """Vote, with a limit in seconds. Without ``background``, return when the work is complete."""
        self._issued, progress = monotonic(), self.endpoint.progress
        begin = functools.partial(self._begin, limit)
        if background:
            progress.submit(begin)
            if not self.work.is_completed():
                progress.ensure_driven()
        else:
            progress.drive(self.work, math.inf, begin)

    def _begin(self, limit: float) -> None:
        endpoint, channel, rank = self.endpoint, self.channel, self.endpoint.rank
        if self.number == REGROUP and channel.error is None:
            # The others leave their operations, and call it too.
            endpoint.fail(channel, GroupAbortedError(f"rank {rank} called {self.name}(): call it here too", peer=rank))
        endpoint.agreements.begin(channel, self.number, f"{self.name}()", self._vote, limit, self._finish)

    def _finish(self, decision: Decision | None, error: GroupError | None) -> None:
        self.endpoint.call_later(functools.partial(self._complete, decision, error))

    def _complete(self, decision: Decision | None, error: GroupError | None) -> None:
        value = None
        if decision is not None:
            try:
                value = self.value_of(decision, list(map(msgpack.unpackb, decision.votes.values())))
            except Exception as cause:
                error = local_failure(cause, self.endpoint.rank)
        if error is not None:
            number = generation_of(self.channel.prefix) + 1 if self.number == REGROUP else self.number
            error = error.during(
                group=self.channel.name, rank=self.endpoint.rank, op=self.name, seq=number,
                elapsed=monotonic() - self._issued,
            )  # fmt: skip
        if self.work.finish(value, error):
            self.work.run_callbacks()


def agreed(decision: Decision, flags: list[Any]) -> Agreed:
    """Return the value of ``agree``."""
    flag = functools.reduce(operator.and_, flags)
    return Agreed(type(flag)(0) if decision.quitters else flag, tuple(decision.excluded))


def survivors(decision: Decision, min_sizes: list[Any]) -> list[int]:
    """Return the ids of the members of a successor; raise NoQuorumError if they are too few."""
    present = list(decision.votes)
    if len(present) < max(min_sizes):
        size = len(present) + len(decision.excluded)
        reason = f"{len(present)} of {size} members are left, fewer than min_size={max(min_sizes)}"
        raise NoQuorumError(reason, present=present)
    return present
