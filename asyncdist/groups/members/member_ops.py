"""The calls that the members of a group make together: they agree, go on without lost members, and admit others."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from asyncdist.base import lifecycle
from asyncdist.base.deadline import Timeout
from asyncdist.groups.members.member_watch import MemberWatch, MemberWatches
from asyncdist.groups.members.regrouping import Agreed, MemberAgreement, agreed, survivors
from asyncdist.groups.members.step import GroupStep
from asyncdist.groups.members.training_state import State, adopt
from asyncdist.groups.procedure import Procedure
from asyncdist.kernel.collectives.arguments import whole_number_of
from asyncdist.kernel.engine.agreements import REGROUP
from asyncdist.kernel.engine.endpoint import Endpoint
from asyncdist.kernel.engine.operation import Channel
from asyncdist.kernel.engine.work import Work, completed
from asyncdist.kernel.memory.torch_compile import excluded_from_compile

# Two threads may call `regroup` at the same time.
_regrouping_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_regrouping_lock", threading.Lock)


@excluded_from_compile
class MemberOps(ABC):
    """The operations of a `Group` whose members may be lost, and which processes may join.

    Attributes:
        changed: Whether the members should begin another generation, as a `step` has found.
    """

    endpoint: Endpoint
    channel: Channel
    timeout: float

    def __init__(self, endpoint: Endpoint, member_ids: tuple[int, ...]) -> None:
        self.changed = False
        # Regroups, given `min_size` and the timeout, and admits processes that wait. The session of a job sets it.
        self._regroup_in_job: Callable[[int, Timeout], Work[Self]] | None = None
        # Returns whether this process is sure, at a moment after the call, that the generation of its job is the present
        # one. The session of a job sets it.
        self._show_membership: Callable[[], Work[bool]] = functools.partial(completed, True)
        self._watches = MemberWatches(endpoint, member_ids)
        self._agreements = itertools.count(1)
        self._regrouping: Work[Self] | None = None
        self._regrouping_in_job: Work[Self] | None = None

    @abstractmethod
    def rank(self) -> int:
        """Return the rank of this process in this group."""

    @abstractmethod
    def _limit(self, name: str, background: bool | None, timeout: Timeout) -> float:
        """Return the timeout of a call in seconds; raise if the group is destroyed or the call may not block here."""

    @abstractmethod
    def _successor(self, member_ids: list[int]) -> Self:
        """Make the group of the members that go on, and destroy this one."""

    @abstractmethod
    def abort(self, reason: str = ...) -> None:
        """Fail all pending operations of this group on every rank."""

    def agree(self, flag: bool | int = True, *, background: bool = True, timeout: Timeout = None) -> Work[Agreed]:
        """Agree with all members on the AND of a flag, although members may end during the call.

        Every member calls it, as often as the others. It also works after the group has failed. All members that get a
        result get the same one. A cancelled waiter has voted nevertheless.

        Args:
            flag: This member's flag; or several, as the bits of a whole number.
            background: False returns only when the agreement is complete.
            timeout: Limit in seconds or as a timedelta; None takes the group's.

        Returns:
            A work whose value is an `Agreed`: the flag, and the members that did not take part. The flag is False if one of
            these is alive, because it has called `regroup` or destroyed the group instead.

        Raises:
            OperationTimeoutError: A member that is alive has not called it in time.
            NoQuorumError: This member is cut off from others that may be alive and go on.
            ExcludedError: The others have agreed without this member, which they hold lost.

        Example:
            >>> committed, lost = await group.agree(loss.isfinite().all().item())
        """
        limit = self._limit("agree", background, timeout)
        number = next(self._agreements)
        agreement = MemberAgreement(self.endpoint, self.channel, "agree", number, flag, agreed)
        agreement.start(limit, background=background)
        return agreement.work

    def regroup(self, *, min_size: int = 1, background: bool = True, timeout: Timeout = None) -> Work[Self]:
        """Make the group of the members that are alive, which replaces this one, and destroy this one.

        Every member calls it, usually after an error. If the group has not failed, the first call makes it fail on all
        members, so that they call it too. Connections and registered tensors are kept. A member that ends then is left
        out, or is lost in the new group. Repeated calls return the same work: after a cancelled wait, call it again.

        The group of a job (`join`) also admits the processes that wait, as `JobSession.generations` does, and waits for
        more if it has too few members. All members of the new group then call `adopt`, as newcomers do.

        The new group has the ids of its members in `member_ids`, and a `generation` higher by one. The successor of the
        default group becomes the default group, so its members have new global ranks, from 0 on. Other groups keep their
        ranks.

        Args:
            min_size: The fewest members to go on with. The largest one that a member passes counts.
            background: False returns only when the new group exists.
            timeout: Limit in seconds or as a timedelta; None takes the group's.

        Returns:
            A work whose value is the new group.

        Raises:
            OperationTimeoutError: A member that is alive has not called it in time.
            NoQuorumError: Fewer than ``min_size`` members are left, or others may be alive elsewhere and go on.
            ExcludedError: The others go on without this member, which they hold lost.

        Example:
            >>> try:
            ...     await group.all_reduce(gradients)
            ... except RuntimeError:  # every error of asyncdist is one
            ...     group = await group.regroup(min_size=2)
        """
        if self._regroup_in_job is None:
            return self._regroup_members(min_size=min_size, background=background, timeout=timeout)
        min_size = whole_number_of("min_size", min_size)
        with _regrouping_lock:
            if self._regrouping_in_job is None:
                self._regrouping_in_job = self._regroup_in_job(min_size, timeout)
        if not background:
            self._regrouping_in_job.wait()
        return self._regrouping_in_job

    def _regroup_members(self, *, min_size: int = 1, background: bool = True, timeout: Timeout = None) -> Work[Self]:
        """Do as `regroup`, and admit no process that waits."""
        begun = self._regrouping
        limit = self.timeout if begun is not None else self._limit("regroup", background, timeout)
        min_size = whole_number_of("min_size", min_size)
        with _regrouping_lock:
            begun = self._regrouping
            if begun is None:
                agreement = MemberAgreement(
                    self.endpoint, self.channel, "regroup", REGROUP, min_size,
                    lambda *votes: self._successor(survivors(*votes)),
                )  # fmt: skip
                self._regrouping = agreement.work
        if begun is None:
            agreement.start(limit, background=background)
            return agreement.work
        if not background:
            self.endpoint.progress.refuse_loop_thread("regroup")
            self.endpoint.progress.drive(begun, math.inf)
        return begun

    def step(self) -> GroupStep:
        """Return a context whose block all surviving members complete, or of which nothing counts; see `GroupStep`."""
        return GroupStep(self)

    def adopt(self, state: State) -> Procedure[bool]:
        """Pass the state of a member with the highest step on to every member that lacks it. Every member calls it.

        A member lacks the state if it is new to the job, or if its step differs. At the first call no member has a history,
        and the state of rank 0 becomes that of all. Tensors from 64 KiB on are received in place where they fit.

        Args:
            state: The state of this member.

        Returns:
            A call to await, or to ``wait()`` for: whether this member has received the state. If a member is lost
            during the call, it returns False, and `changed` is True.

        Raises:
            UsageError: The parts of the members' states differ, or a value is not plain data.

        Example:
            >>> await group.adopt(state)
        """
        return Procedure(functools.partial(adopt, self, state), self.endpoint.progress)

    def revoke(self, reason: str = "revoke() was called") -> None:
        """Fail all pending operations of this group on every rank, as `abort` does. Connections stay usable.

        The members then call `regroup`, or `agree` first.
        """
        self.abort(reason)

    def watch_members(self) -> MemberWatch:
        """Return a stream of what happens to members: lost, suspected, recovered; and of who waits to join the job.

        Example:
            >>> async for change in group.watch_members():
            ...     print(f"member {change.member} is {change.change}: {change.reason}")
        """
        return self._watches.begin()
