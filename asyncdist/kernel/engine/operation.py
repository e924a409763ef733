"""Plans, the operations that they become when issued, the tasks of operations, and the receives of tasks.

`collectives` makes plans; `endpoint` and `executor` run them. A *plan* describes one call: one or several schedules
(parts) and the arithmetic between them. An *operation* is a plan that was issued on a channel. A *task* runs one of its
generators.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from asyncdist.base.descriptors import describe_exhaustion, is_exhausted
from asyncdist.errors import AsyncdistError, GroupError, ranks
from asyncdist.kernel.algorithms.schedule import Schedule
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.buffers import Memory
from asyncdist.kernel.memory.reduce_kernels import Fold
from asyncdist.kernel.tracing.recorder import Entry
from asyncdist.kernel.transport.base import Outgoing, Receive
from asyncdist.kernel.transport.wire_format import pack_key


class RecvAny(NamedTuple):
    """Receive into ``place`` from the member that sends first; the generator receives that member's world rank."""

    place: Memory


class Begun(NamedTuple):
    """Complete when ``message`` has been sent, which a direct call (`engine.direct_calls`) has given to a link."""

    message: Outgoing


@dataclass(slots=True)
class Plan:
    """One planned call: the schedules of its parts, their arithmetic, and how to complete it.

    Attributes:
        parts: The schedules.
        fingerprint: Describes the call; every message carries it.
        fold: Does the arithmetic of Reduce and Combine.
        finish: Called when all parts are complete; returns the operation's value.
        window: The number of parts that may run at the same time.
        nbytes: The size of the payload.
        peer: The other member of a point-to-point message; None for a collective or a receive from any member.
        only_receives: Whether it receives a message and sends nothing, so that no peer waits for its progress.
    """

    parts: Iterable[Schedule] = ()
    fingerprint: int = 0
    fold: Fold | None = None
    finish: Callable[[], Any] | None = None
    window: int = 4
    nbytes: int = 0
    peer: int | None = None
    only_receives: bool = False


PlanOf = Callable[..., Plan]
"""``make(context, *arguments)`` plans a call."""


class Channel:
    """The executor's view of a group: its members by group rank, its error if it failed, and its sequence numbers."""

    def __init__(
        self, number: int, name: str, members: Sequence[int], world_rank: int, *, point_to_point: bool = False
    ) -> None:
        self.point_to_point = point_to_point
        self.number = number
        self.prefix = pack_key(number, 0, 0)[:8]
        self.name = name
        self.members = tuple(members)
        self.world_rank = world_rank
        self.error: GroupError | None = None
        self.sibling: Channel | None = None
        """The group's other channel, which fails with this one."""
        self.followers: weakref.WeakSet[Channel] = weakref.WeakSet()
        """The channels that fail with this one."""
        self.operations: dict[bytes, Operation] = {}
        self.numbers = itertools.count(1)
        self.started = 0
        """The number of started operations."""
        self.highest = 0
        """The highest sequence number of a started collective; 0 before the first."""

    def has_ended(self, key: bytes) -> bool:
        """Return whether the collective of a message's key is complete; False if that is unknown.

        It is unknown while threads that issue at the same time have started their operations out of order.
        """
        if self.point_to_point or self.started != self.highest:
            return False
        return (self.highest - int.from_bytes(key[8:12], "little")) & NUMBERS < NUMBERS // 2


_QUERY_AFTER = 1.0
"""Seconds after which an operation queries the peers that have sent it nothing; half its timeout if that is less."""
_PROBE_BEFORE = 1.0
"""Seconds before its deadline at which an operation probes its peers; a quarter of its timeout if that is less."""
NUMBERS = 0xFFFFFFFF
"""The highest sequence number that fits into a message's key; 0 follows it."""
_tickets = itertools.count()


class Operation:
    """A plan that was issued on a channel, and its progress.

    Attributes:
        key: The first 12 bytes of the keys of its messages; tables of operations use it as their key. The sequence
            number of a point-to-point operation is its tag, which others may share: a ticket makes its key unique.
        due: The time of the executor's next action for this operation: to check that the awaited ranks made the same
            call, to ask them what they wait for, or to fail the operation.
    """

    __slots__ = (
        "channel", "deadline", "due", "entry", "issued", "key", "name", "over", "parts", "plan", "sequence", "tasks",
        "timeout", "work",
    )  # fmt: skip

    def __init__(self, channel: Channel, plan: Plan, work: Work, timeout: float, entry: Entry) -> None:
        self.channel = channel
        self.name = entry.op
        self.sequence = entry.seq
        self.plan = plan
        self.work = work
        self.timeout = timeout
        self.over = False
        self.issued = now = monotonic()
        self.deadline = now + timeout
        self.due = now + min(_QUERY_AFTER, timeout / 2)
        self.entry = entry
        self.parts = enumerate(plan.parts)
        self.tasks: list[Task] = []
        self.key = channel.prefix + (entry.seq & NUMBERS).to_bytes(4, "little")
        if channel.point_to_point:
            self.key += next(_tickets).to_bytes(8, "little")

    @property
    def probe_at(self) -> float:
        """The time at which to ask the awaited ranks what they wait for."""
        return self.deadline - min(_PROBE_BEFORE, self.timeout / 4)

    def failure(self, error: GroupError) -> GroupError:
        """Return the error of the channel with the details of this operation."""
        channel, elapsed = self.channel, monotonic() - self.issued
        return error.during(
            group=channel.name, rank=channel.world_rank, op=self.name, seq=self.sequence, elapsed=elapsed
        )


class Task:
    """One generator of an operation, and the transfers of its current step.

    ``awaits`` is the world rank for which a native schedule waits; None if it waits for none.
    """

    __slots__ = ("_runnable", "awaits", "generator", "key", "operation", "outstanding", "reply", "scratch", "transfers")

    def __init__(self, operation: Operation, part: int, generator: Schedule, runnable: deque[Task]) -> None:
        self.operation = operation
        self.generator = generator
        self.key = operation.key[:12] + part.to_bytes(4, "little")
        self.outstanding = 0
        self.awaits: int | None = None
        self.transfers: list[Outgoing | Receive] = []
        self.scratch: list[Memory] = []
        self.reply: Any = None
        self._runnable = runnable

    def transferred(self) -> None:
        self.outstanding -= 1
        if not self.outstanding:
            self._runnable.append(self)


class FoldingReceive(Receive):
    """A receive that folds the arriving data into an accumulator, piece by piece while a piece is in the cache."""

    __slots__ = ("_at", "_fold", "_piece", "_scratch", "_target")

    def __init__(
        self, peer: int, key: bytes, fingerprint: int, owner: Task, target: Memory, scratch: Memory, fold: Fold
    ) -> None:
        count = min(scratch.count, target.count)
        super().__init__(peer, key, fingerprint, scratch.view[: count * scratch.itemsize], owner)
        self.nbytes = target.count * scratch.itemsize
        self._target, self._scratch, self._fold = target, scratch, fold
        self._at, self._piece = 0, count

    def filled(self) -> memoryview | None:
        at, count = self._at, self._piece
        target, scratch = self._target.tensor, self._scratch.tensor
        if count == target.numel():
            self._fold(target, scratch[:count] if scratch.numel() != count else scratch, False)
            return None
        self._fold(target[at : at + count], scratch[:count], False)
        self._at = at = at + count
        self._piece = count = min(self._scratch.count, target.numel() - at)
        return self._scratch.view[: count * self._scratch.itemsize] if count else None


class AnyReceive(Receive):
    """A receive from the rank that sends first; the generator receives the number of that rank."""

    __slots__ = ()

    def __init__(self, task: Task, fingerprint: int, room: memoryview) -> None:
        super().__init__(-1, task.key, fingerprint, room, task)

    def finish(self) -> None:
        assert isinstance(self.owner, Task)
        self.owner.reply = self.peer
        super().finish()


def local_failure(cause: BaseException, rank: int) -> GroupError:
    """Return the error of a group in which ``cause`` has ended an operation on this rank, ``rank``."""
    if isinstance(cause, GroupError):
        return cause
    if isinstance(cause, OSError) and is_exhausted(cause):
        error = GroupError(f"rank {rank} {describe_exhaustion(cause)}")
        error.advice = "raise the limit on open files (ulimit -n) or close some, then create the process group again"
    else:
        reason = cause.summary if isinstance(cause, AsyncdistError) else f"{type(cause).__name__}: {cause}"
        error = GroupError(f"failed on rank {rank}: {reason}")
    error.__cause__ = cause
    return error


def _pending(operation: Operation, kind: type[Outgoing] | type[Receive]) -> set[int]:
    return {t.peer for task in operation.tasks for t in task.transfers if not t.done and isinstance(t, kind)}


def senders(operation: Operation) -> set[int]:
    """Return the world ranks from which an operation waits for messages."""
    return _pending(operation, Receive)


def awaited(operation: Operation) -> list[int]:
    """Return the world ranks that an operation waits for; -1 stands for any rank."""
    return sorted(senders(operation) | _absent(operation) | _pending(operation, Outgoing))


def _absent(operation: Operation) -> set[int]:
    """Return the ranks for which native schedules wait. A schedule that waits for another one yields its own rank."""
    return {task.awaits for task in operation.tasks if task.awaits is not None} - {operation.channel.world_rank}


def done_nbytes(operation: Operation) -> int | None:
    """Return the payload bytes of the parts of an operation that are complete; None if it has only one part."""
    parts = operation.plan.parts
    total = len(parts) if isinstance(parts, Sized) else 1
    if total < 2:
        return None
    # The number of parts that the iterator has given.
    begun = int(operation.parts.__reduce__()[1][1])
    return operation.plan.nbytes * max(0, begun - len(operation.tasks)) // total


def waiting_for(operation: Operation) -> tuple[str, list[int]]:
    """Return a description of the ranks that an operation waits for, and their world ranks."""
    sources = sorted(senders(operation) | _absent(operation))
    receivers = sorted(_pending(operation, Outgoing))
    words = []
    if sources == [-1]:
        return "waiting for any rank to send", []
    if sources:
        words.append(f"waiting for data from {named(sources)}")
    if receivers:
        words.append(f"waiting for {named(receivers)} to take data")
    return " and ".join(words) or "with nothing left to wait for", sorted(set(sources + receivers))


def named(numbers: Sequence[int]) -> str:
    """Return ranks as words: ``"rank 3"``, ``"ranks 2-3"``."""
    return f"rank{'s' if len(numbers) > 1 else ''} {ranks(numbers)}"
