"""A step that all surviving members of a group commit, or none. `Group.step` makes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

from asyncdist.base.background_loop import background_loop
from asyncdist.base.error_text import describe_error
from asyncdist.errors import ExcludedError, GroupError, NoQuorumError
from asyncdist.groups.members.member_watch import MemberWatches
from asyncdist.groups.members.regrouping import Agreed
from asyncdist.kernel.engine.trio_tasks import run_on_background_loop
from asyncdist.kernel.engine.work import Work

T = TypeVar("T")

_SUCCEEDED, _UNCHANGED, _SHOWN, _VOTED = 1, 2, 4, 8
"""The bits of the flag on which the members agree at the end of a step."""


class _Group(Protocol):
    """What a step needs of its `Group`, whose module imports this one."""

    endpoint: Any
    changed: bool
    _watches: MemberWatches
    _show_membership: Callable[[], Work[bool]]

    def rank(self) -> int: ...

    def agree(self, flag: int, /) -> Work[Agreed]: ...

    def revoke(self, reason: str, /) -> None: ...


class GroupStep:
    """A context in which members compute and exchange what one step needs, as gradients.

    At the end of the block the members agree whether all of them have completed it. A `GroupError` inside the block,
    such as that of a lost peer, is part of this answer and is not raised further. Nor is the loss of this member: if
    the others go on without it, or it reaches too few of them, the step is not committed, and `Group.regroup` raises
    the error. Any other exception fails the group, so that no member waits for this one, and is raised on. Change
    what must stay equal on all members after the block, and only if the step is committed.

    In a job (`join`) a step counts only if each member can show, from its lease at the store, that no other part of the
    job may have begun a generation. A member shows it twice: when it votes, and once it has the answer of all. So each
    member that reads ``committed`` as True had, between the answer and this moment, an instant at which its generation
    was the only one. A process that is stopped after this instant may act on this one step late; its next one is not
    committed. Pass `Group.generation` along where a late write outside the job would do harm, and refuse lower ones.

    A task that is cancelled at the end of the block, while it waits for the answer, fails the group as well. It is
    cancelled once it has the answer, so that `committed` is right. A second cancellation ends this wait.

    Attributes:
        committed: Whether every surviving member has completed the block; False until then.
        excluded: Why this member does not know it: the error of a member that the others have lost, or whose lease ended
            before it had their answer. None on the others.
        is_shown: Whether each member of the job could show that its generation was the present one. Equal on all.

    Example:
        >>> async def train(group, optimizer, gradients):
        ...     async with group.step() as step:
        ...         for gradient in gradients:
        ...             await group.all_reduce(gradient)
        ...     if step.committed:
        ...         optimizer.step()
    """

    def __init__(self, group: _Group) -> None:
        self._group = group
        self.committed = False
        self.excluded: ExcludedError | NoQuorumError | None = None
        self.is_shown = True

    async def __aenter__(self) -> GroupStep:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return await self._end(error)

    def __enter__(self) -> GroupStep:
        self._group.endpoint.progress.refuse_loop_thread("the end of a step (write `async with group.step()`)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return background_loop().run(self._end(error))

    async def _end(self, error: BaseException | None) -> bool:
        """Agree with the other members; return whether the block's error is part of the answer."""
        group = self._group
        if error is not None and not isinstance(error, GroupError):
            group.revoke(f"a step ended with {describe_error(error)}")
        # One member decides, because the others may see later who waits.
        unchanged = error is None and not (group.rank() == 0 and any(True for _ in group._watches.candidates()))
        try:
            shown = error is not None or await self._can_show()
        except BaseException:
            await self._outlast(group.agree(0))
            raise
        flags = zip((_SUCCEEDED, _UNCHANGED, _SHOWN, _VOTED), (error is None, unchanged, shown, True), strict=True)
        work = group.agree(sum(flag for flag, is_set in flags if is_set))
        try:
            with contextlib.suppress(GroupError):
                await work
            self._note(work)
            # The answer may be late, because a member was stopped before it voted.
            if self.committed and not await self._can_show():
                self._disown()
        except BaseException:
            await self._outlast(work)
            raise
        return isinstance(error, GroupError)

    async def _can_show(self) -> bool:
        # A completed work is not awaited: the vote would come one iteration of the loop later.
        showing = self._group._show_membership()
        return showing.result() if showing.is_completed() else await showing

    async def _outlast(self, work: Work[Agreed]) -> None:
        """Wait for the answer although the caller is cancelled: the other members act on it, with this one's vote."""
        if not work.is_completed():
            self._group.revoke("the end of a step was cancelled")  # so that no member is long in answering
        with contextlib.suppress(GroupError):
            if asyncio._get_running_loop() is not None:
                await work
            else:
                await run_on_background_loop(_value_of(work), shield=True)
            self._note(work)
            showing = self._group._show_membership()
            if self.committed and not (showing.is_completed() and showing.result()):
                self._disown()

    def _disown(self) -> None:
        """Leave the step to the others: this member cannot show any more that no other part of the job has begun."""
        self.committed, self._group.changed = False, True
        reason = "its lease at the store of the job ended before it knew whether the step is committed"
        self.excluded = ExcludedError(f"this member cannot tell whether its generation goes on: {reason}")
        self._group.revoke(f"a member has lost the store: {reason}")

    def _note(self, work: Work[Agreed]) -> None:
        """Take over the answer of the members."""
        try:
            answer, lost = work.result()
        except (ExcludedError, NoQuorumError) as excluded:
            # Without this member the others may commit the step: it is no survivor, and regroup() says so again.
            self.excluded = excluded
            answer, lost = 0, ()
        # Without the vote of a member that is alive the answer is 0.
        self.is_shown = bool(answer & _SHOWN or not answer & _VOTED)
        self.committed = bool(answer & _SUCCEEDED and answer & _SHOWN)
        self._group.changed = bool(self._group.changed or lost or not answer & _UNCHANGED or not self.is_shown)


async def _value_of(work: Work[T]) -> T:
    return await work
