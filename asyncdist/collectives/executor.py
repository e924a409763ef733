"""Makes schedules so: posts what each step asks for, and resumes the generator when the step is over.

A *plan* is what a group wants done: one or several schedules (parts) and the arithmetic between them. An *operation* is
a plan that was issued, a *task* one of its generators. The executor never waits: transfers report back when they are
over, and a task whose step has no transfer left is run on.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol

from asyncdist.buffers import Memory, Scratch
from asyncdist.collectives.schedule import Combine, Recv, Reduce, Schedule, Send
from asyncdist.errors import AsyncdistError, GroupError, OperationTimeoutError, ranks
from asyncdist.framing import pack_key
from asyncdist.observe.recorder import Entry
from asyncdist.reduce import Fold
from asyncdist.transport import Inbox, Link, Outgoing, Receive
from asyncdist.work import Work


class RecvAny(NamedTuple):
    """Receive into ``place`` from whichever member sends first; the generator is sent that member's world rank."""

    place: Memory


@dataclass(slots=True)
class Plan:
    """What is to be done: the schedules of the parts, and what to do around them.

    ``fold`` does the arithmetic of Reduce and Combine. At most ``window`` parts go on at once. ``finish`` is called when
    all are over and gives the operation's value.
    """

    parts: Iterator[Schedule] | Sequence[Schedule]
    fingerprint: int = 0
    fold: Fold | None = None
    finish: Callable[[], Any] | None = None
    window: int = 4
    nbytes: int = 0


class Channel:
    """What the executor knows of a group: its members by group rank, and whether it has failed."""

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
        self.operations: dict[bytes, Operation] = {}


class Peers(Protocol):
    """What the executor needs of the mesh."""

    def link(self, peer: int) -> Link: ...

    def inbox(self, peer: int) -> Inbox: ...

    def gone(self, peer: int) -> GroupError | None: ...

    def fail(self, channel: Channel, error: GroupError) -> None: ...

    def wake_later(self, work: Work) -> None: ...


_tickets = itertools.count()


class Operation:
    """A plan that was issued on a channel, and how far it has come.

    ``key`` are the first 12 bytes of its messages' keys and its name in tables. A point-to-point operation has no number
    of its own, its sequence is a tag that many share: a ticket behind the key makes its name unique.
    """

    __slots__ = (
        "channel", "deadline", "entry", "issued", "key", "name", "over", "parts", "plan", "sequence", "tasks", "timeout", "work",
    )  # fmt: skip

    def __init__(
        self, channel: Channel, name: str, sequence: int, plan: Plan, work: Work, timeout: float, entry: Entry
    ) -> None:
        self.channel = channel
        self.name = name
        self.sequence = sequence
        self.plan = plan
        self.work = work
        self.timeout = timeout
        self.over = False
        self.issued = now = monotonic()
        self.deadline = now + timeout
        self.entry = entry
        self.parts = enumerate(plan.parts)
        self.tasks: list[Task] = []
        self.key = channel.prefix + sequence.to_bytes(4, "little")
        if channel.point_to_point:
            self.key += next(_tickets).to_bytes(8, "little")

    def failure(self, error: GroupError) -> GroupError:
        """Return a channel's failure as this operation met it."""
        channel = self.channel
        return error.during(
            group=channel.name,
            rank=channel.world_rank,
            op=self.name,
            seq=self.sequence,
            elapsed=monotonic() - self.issued,
        )


class Task:
    """One generator of an operation, and what its present step still waits for."""

    __slots__ = ("_runnable", "generator", "key", "operation", "outstanding", "reply", "scratch", "transfers")

    def __init__(self, operation: Operation, part: int, generator: Schedule, runnable: deque[Task]) -> None:
        self.operation = operation
        self.generator = generator
        self.key = operation.key[:12] + part.to_bytes(4, "little")
        self.outstanding = 0
        self.transfers: list[Outgoing | Receive] = []
        self.scratch: list[Memory] = []
        self.reply: Any = None
        self._runnable = runnable

    def transferred(self) -> None:
        self.outstanding -= 1
        if not self.outstanding:
            self._runnable.append(self)


class FoldingReceive(Receive):
    """A receive that folds what comes into an accumulator, a piece at a time while it is still in the cache."""

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


class Executor:
    """Runs the operations of one rank. Called under the lock of the world's `Progress`."""

    def __init__(self, peers: Peers, scratch: Scratch, piece_nbytes: int) -> None:
        self._peers = peers
        self._scratch = scratch
        self._piece_nbytes = max(64, piece_nbytes)
        self._runnable: deque[Task] = deque()
        self._deadline = math.inf
        self.operations: dict[bytes, Operation] = {}
        self.any_source: dict[bytes, deque[Receive]] = {}

    # -- operations ----------------------------------------------------------------------------

    def start(self, operation: Operation) -> None:
        """Begin an operation, unless its channel has failed already."""
        channel = operation.channel
        if channel.error is not None:
            self._end(operation, operation.failure(channel.error))
            return
        channel.operations[operation.key] = self.operations[operation.key] = operation
        self._deadline = min(self._deadline, operation.deadline)
        for part, generator in itertools.islice(operation.parts, operation.plan.window):
            self._add_task(operation, part, generator)
        self.run()
        if not operation.tasks and not operation.over:
            self._complete(operation)

    def run(self) -> bool:
        """Run every task whose step is over; return whether there was one."""
        runnable = self._runnable
        if not runnable:
            return False
        while runnable:
            self._run(runnable.popleft())
        return True

    def _add_task(self, operation: Operation, part: int, generator: Schedule) -> None:
        task = Task(operation, part, generator, self._runnable)
        operation.tasks.append(task)
        self._runnable.append(task)

    def _complete(self, operation: Operation) -> None:
        finish = operation.plan.finish
        try:
            value = finish() if finish is not None else None
        except Exception as cause:
            self._break(operation, cause)
            return
        self._end(operation, None, value)

    def _end(self, operation: Operation, error: GroupError | None, value: Any = None) -> None:
        operation.over = True
        self.operations.pop(operation.key, None)
        operation.channel.operations.pop(operation.key, None)
        if not self.operations:
            self._deadline = math.inf
        entry = operation.entry
        entry.finished = perf_counter()
        if error is not None:
            entry.error = str(error)
        operation.work.finish(value, error)
        self._peers.wake_later(operation.work)

    def _break(self, operation: Operation, cause: Exception) -> None:
        """Something in our own half failed: nobody else can finish this operation either."""
        if isinstance(cause, GroupError):
            error = cause
        else:
            what = str(cause) if isinstance(cause, AsyncdistError) else f"{type(cause).__name__}: {cause}"
            error = GroupError(f"failed on rank {operation.channel.world_rank}: {what}")
            error.__cause__ = cause
        self._peers.fail(operation.channel, error)

    def abandon(self, channel: Channel, error: GroupError) -> None:
        """Fail every operation of a channel; their memory is not touched any more."""
        for operation in list(channel.operations.values()):
            for task in operation.tasks:
                task.generator.close()
                for transfer in task.transfers:
                    transfer.done = True  # what is under way on a wire goes to the bin, or out as it is
            operation.tasks.clear()
            self._end(operation, operation.failure(error))
        for key in [key for key in self.any_source if key.startswith(channel.prefix)]:
            del self.any_source[key]

    # -- tasks ---------------------------------------------------------------------------------

    def _run(self, task: Task) -> None:
        operation = task.operation
        if operation.over:  # it failed while the task stood in the queue
            return
        try:
            while not task.outstanding:
                reply, task.reply = task.reply, None
                step = task.generator.send(reply)
                if task.scratch:
                    self._give_scratch(task)
                if task.transfers:
                    task.transfers = []
                task.outstanding = 1  # for ourselves: what ends while we still post must not put us into the queue
                for action in step:
                    self._do(task, action)
                    if operation.over:  # a mismatch was found on the way
                        return
                task.outstanding -= 1
        except StopIteration:
            self._give_scratch(task)
            operation.tasks.remove(task)
            for part, generator in itertools.islice(operation.parts, 1):
                self._add_task(operation, part, generator)
            if not operation.tasks:
                self._complete(operation)
        except Exception as cause:
            self._break(operation, cause)

    def _do(self, task: Task, action: Any) -> None:
        kind = type(action)
        operation = task.operation
        if kind is Send:
            peer = operation.channel.members[action.peer]
            message = Outgoing(peer, task.key, operation.plan.fingerprint, action.place.view, task)
            task.outstanding += 1
            if self._peers.link(peer).send(message):
                task.outstanding -= 1
            else:
                task.transfers.append(message)
        elif kind is Recv:
            peer = operation.channel.members[action.peer]
            self._post(task, Receive(peer, task.key, operation.plan.fingerprint, action.place.view, task))
        elif kind is Reduce:
            self._post(task, self._folding(task, action))
        elif kind is Combine:
            assert operation.plan.fold is not None
            operation.plan.fold(action.place.tensor, action.other.tensor, action.swapped)
        else:
            self._post_any(task, action)

    def _folding(self, task: Task, action: Reduce) -> Receive:
        operation, target = task.operation, action.place
        peer = operation.channel.members[action.peer]
        assert operation.plan.fold is not None
        wire = target.wire or target.dtype
        scratch = self._scratch.take(min(target.count, self._piece_nbytes // wire.itemsize), wire)
        task.scratch.append(scratch)
        return FoldingReceive(peer, task.key, operation.plan.fingerprint, task, target, scratch, operation.plan.fold)

    def _post(self, task: Task, receive: Receive) -> None:
        peer = receive.peer
        task.outstanding += 1
        if self._peers.inbox(peer).post(receive):
            task.outstanding -= 1
            return
        if receive.done:
            return
        gone = self._peers.gone(peer)
        if gone is not None:
            raise gone
        task.transfers.append(receive)
        self._peers.link(peer).open()

    def _post_any(self, task: Task, action: RecvAny) -> None:
        """Take the message that is there already, else leave the receive where `unclaimed` finds it."""
        operation = task.operation
        receive = _AnyReceive(task, operation.plan.fingerprint, action.place.view)
        for peer in operation.channel.members:
            if peer != operation.channel.world_rank and self._peers.inbox(peer).first_early(task.key) is not None:
                receive.peer = peer
                self._post(task, receive)
                if receive.done:
                    task.reply = peer
                return
        self.any_source.setdefault(task.key, deque()).append(receive)
        task.transfers.append(receive)
        task.outstanding += 1

    def _give_scratch(self, task: Task) -> None:
        while task.scratch:
            self._scratch.give(task.scratch.pop())

    # -- time ----------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        return self._deadline

    def expire(self, now: float) -> None:
        """Fail the channels of all operations whose deadline has passed."""
        for operation in [operation for operation in self.operations.values() if operation.deadline <= now]:
            if operation.over:
                continue
            reason, peers = waiting_for(operation)
            self._peers.fail(
                operation.channel,
                OperationTimeoutError(
                    f"timed out after {operation.timeout:g} s, {reason}", peers=peers, timeout=operation.timeout
                ),
            )
        self._deadline = min((operation.deadline for operation in self.operations.values()), default=math.inf)


class _AnyReceive(Receive):
    """A receive from whichever rank comes first; when it is over, the generator learns which."""

    __slots__ = ()

    def __init__(self, task: Task, fingerprint: int, room: memoryview) -> None:
        super().__init__(-1, task.key, fingerprint, room, task)

    def finish(self) -> None:
        assert isinstance(self.owner, Task)
        self.owner.reply = self.peer
        super().finish()


def waiting_for(operation: Operation) -> tuple[str, list[int]]:
    """Say in words, and as world ranks, whom an operation waits for."""
    pending = [transfer for task in operation.tasks for transfer in task.transfers if not transfer.done]
    sources = sorted({t.peer for t in pending if isinstance(t, Receive)})
    takers = sorted({t.peer for t in pending if isinstance(t, Outgoing)})
    words = []
    if sources == [-1]:
        return "waiting for any rank to send", []
    if sources:
        words.append(f"waiting for data from {_name(sources)}")
    if takers:
        words.append(f"waiting for {_name(takers)} to take data")
    return " and ".join(words) or "with nothing left to wait for", sorted(set(sources + takers))


def _name(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {ranks(numbers)}"
