"""The agreements that a group's members call: what they vote for, and what a decision means."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

import msgpack

from asyncdist.errors import GroupAbortedError, GroupError, NoQuorumError
from asyncdist.kernel.engine.agreements import REGROUP
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.operation import Channel, local_failure
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.membership.agreement import Decision
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


class MemberAgreement:
    """One call of this rank that ends in an agreement: ``agree`` or ``regroup``.

    Args:
        endpoint: The endpoint of this rank.
        channel: The channel of the group.
        name: The name of the call.
        number: The number of the agreement.
        vote: This member's vote: data that msgpack packs.
        value_of: Returns the value of the call's work from the decision and all votes; called without locks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        channel: Channel,
        name: str,
        number: int,
        vote: Any,
        value_of: Callable[[Decision, list[Any]], Any],
    ) -> None:
        self.work: Work[Any] = Work(endpoint.progress)
        self._endpoint, self._channel, self._name, self._number = endpoint, channel, name, number
        self._vote: bytes = msgpack.packb(vote)
        self._value_of = value_of
        self._issued = 0.0

    def start(self, limit: float, *, background: bool) -> None:
        """Vote, with a limit in seconds. Without ``background``, return when the work is complete."""
        self._issued = monotonic()
        begin = functools.partial(self._begin, limit)
        if background:
            self._endpoint.progress.submit(begin)
            if not self.work.is_completed():
                self._endpoint.progress.ensure_driven()
        else:
            self._endpoint.progress.drive(self.work, math.inf, begin)

    def _begin(self, limit: float) -> None:
        endpoint, channel, rank = self._endpoint, self._channel, self._endpoint.rank
        if self._number == REGROUP and channel.error is None:
            # The others leave their operations, and call it too.
            endpoint.fail(channel, GroupAbortedError(f"rank {rank} called {self._name}(): call it here too", peer=rank))
        endpoint.agreements.begin(channel, self._number, f"{self._name}()", self._vote, limit, self._finish)

    def _finish(self, decision: Decision | None, error: GroupError | None) -> None:
        self._endpoint.call_later(functools.partial(self._complete, decision, error))

    def _complete(self, decision: Decision | None, error: GroupError | None) -> None:
        value = None
        if decision is not None:
            try:
                value = self._value_of(decision, list(map(msgpack.unpackb, decision.votes.values())))
            except Exception as cause:
                error = local_failure(cause, self._endpoint.rank)
        if error is not None:
            is_last = self._number == REGROUP
            error = error.during(
                group=self._channel.name,
                rank=self._endpoint.rank,
                op=self._name,
                seq=generation_of(self._channel.prefix) + 1 if is_last else self._number,
                elapsed=monotonic() - self._issued,
            )
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
