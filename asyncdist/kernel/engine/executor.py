"""Runs schedules: posts the transfers of each step, and resumes the generator when they are complete.

The executor never waits. A transfer reports its completion to its task; the last one makes the task runnable again.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from asyncdist.base.callables import Callback
from asyncdist.base.timers import TimerTable
from asyncdist.config import Config
from asyncdist.errors import GroupError
from asyncdist.kernel.algorithms.schedule import Combine, Recv, Reduce, Schedule, Send
from asyncdist.kernel.engine.operation import (
    AnyReceive,
    Begun,
    Channel,
    FoldingReceive,
    Operation,
    RecvAny,
    Task,
    awaited,
    done_nbytes,
    local_failure,
    senders,
)
from asyncdist.kernel.engine.transport_selector import TransportSelector
from asyncdist.kernel.memory.buffers import Scratch
from asyncdist.kernel.tracing.recorder import Entry, Recorder
from asyncdist.kernel.transport.base import Link, MatchingQueue, Outgoing, Receive
from asyncdist.net.process_identity import Neighbours

_PAUSE_EACH = 10e-6
"""Seconds for each pending operation between two looks at all of them, so that these take little of the time."""

_MOST_HELD = 16
"""The number of schedules of a group that a turn polls of those that wait for earlier ones. Thousands may be pending. No
call waits for a later call of its group, so the first of them go on in the end."""


class EngineHost(Protocol):
    """The endpoint, as the parts of the engine see it: each of them reaches the others through it."""

    rank: int
    config: Config
    recorder: Recorder
    timers: TimerTable
    transport_selector: TransportSelector
    links: dict[int, Link]
    """The links that `link` has made."""
    inboxes: dict[int, MatchingQueue]
    lost_peers: dict[int, GroupError]
    processes: Neighbours
    """The processes of this machine."""
    operations: dict[bytes, Operation]
    """The pending operations, by key."""

    def assert_held(self) -> None:
        """Check that the calling thread holds the lock of the world's `Progress`."""

    def call_later(self, callback: Callback) -> None:
        """Let a driver call a function without the lock, before the callbacks of operations that fail later."""

    def link(self, peer: int) -> Link: ...

    def inbox(self, peer: int) -> MatchingQueue: ...

    def send_unordered(self, peer: int, kind: int, key: bytes, body: bytes) -> None: ...

    def read_arrived(self, peer: int) -> None: ...

    def watch(self, peer: int) -> None: ...

    def gone(self, peer: int) -> GroupError | None:
        """Return the error of a peer that is lost or has left the world; else None."""

    def has_ended(self, peer: int) -> bool: ...

    def hears(self, peer: int) -> bool: ...

    def silence_of(self, peer: int) -> float | None:
        """Return the seconds since a peer was last heard; None if it is not watched."""

    def connectivity_problem(self, peers: Iterable[int]) -> str:
        """Describe why peers cannot be reached."""

    def fail(self, channel: Channel, error: GroupError) -> None: ...

    def discard(self, prefix: bytes) -> None: ...

    def query_peers(self, operation: Operation, peers: Collection[int]) -> None:
        """Tell the senders of missing messages which collective waits, over a connection whose end tells of theirs."""

    def probe_waits(self, operation: Operation) -> None: ...

    def pending_for(self, key: bytes) -> tuple[Operation | None, bool]: ...

    def timeout_error(self, operation: Operation) -> GroupError: ...


class Executor:
    """Runs the operations of one rank. Called under the lock of the world's `Progress`.

    Args:
        piece_nbytes: Bytes of a message that are received and reduced at a time.

    Attributes:
        next_deadline: The monotonic time at which `expire` has something to do; infinity for never.
        operations: The pending operations, by key.
        acting: Those that do more than receive a message.
        any_source: The receives that take a message from any rank, by key.
    """

    def __init__(self, peers: EngineHost, scratch: Scratch, piece_nbytes: int) -> None:
        self._peers = peers
        self._scratch = scratch
        self._piece_nbytes = max(64, piece_nbytes)
        self._runnable: deque[Task] = deque()
        self._polled: list[Task] = []
        self._held: dict[bytes, list[Task]] = {}
        """The tasks that wait for other tasks of their group on this rank, in the order of the calls, by channel."""
        self.next_deadline = math.inf
        self.operations: dict[bytes, Operation] = {}
        self.acting: dict[bytes, Operation] = {}
        self.any_source: dict[bytes, deque[Receive]] = {}

    # -- operations ----------------------------------------------------------------------------

    def pending(self) -> list[Entry]:
        """Return the records of the pending operations. Any thread may call it."""
        return [operation.entry for operation in list(self.operations.values())]

    def progress(self) -> dict[Entry, dict[str, Any]]:
        """Return, for each pending operation, the ranks that it waits for and what is complete. Any thread may call it."""
        return {
            operation.entry: {"awaits": awaited(operation), "done": done_nbytes(operation)}
            for operation in list(self.operations.values())
        }

    def start(self, operation: Operation) -> None:
        """Begin an operation, unless its channel has failed already."""
        channel = operation.channel
        if channel.error is not None:
            self._end(operation, operation.failure(channel.error))
            return
        channel.operations[operation.key] = self.operations[operation.key] = operation
        if not operation.plan.only_receives:
            self.acting[operation.key] = operation
        self.next_deadline = min(self.next_deadline, operation.due)
        for part, generator in itertools.islice(operation.parts, operation.plan.window):
            self._add_task(operation, part, generator)
        self._run_runnable()
        if not operation.tasks and not operation.over:
            self._complete(operation)

    def run(self) -> bool:
        """Run every runnable task and poll each polled task once; return whether any made progress."""
        moved = self._poll() if self._polled or self._held else False
        return self._run_runnable() or moved

    def _run_runnable(self) -> bool:
        runnable = self._runnable
        moved = bool(runnable)
        while runnable:
            self.resume(runnable.popleft())
        return moved

    def _poll(self) -> bool:
        polled, self._polled = self._polled, []
        moved = False
        for task in polled:
            moved = self.resume(task) or moved
        for prefix, held in list(self._held.items()):
            first, held[:] = held[:_MOST_HELD], held[_MOST_HELD:]
            for task in first:
                moved = self.resume(task) or moved
            if not held:
                self._held.pop(prefix, None)
        return moved

    def _wait_for_peer(self, task: Task) -> None:
        """Poll a task from now on, whose schedule waits for a member; in the order of the calls if that is this rank."""
        channel = task.operation.channel
        if task.awaits != channel.world_rank:
            self._polled.append(task)
        else:
            insort(self._held.setdefault(channel.prefix, []), task, key=_sequence_of)

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
        self.acting.pop(operation.key, None)
        operation.channel.operations.pop(operation.key, None)
        if not self.operations:
            self.next_deadline = math.inf
        has_hooks = operation.entry.finish(error)
        has_callbacks = operation.work.finish(value, error)
        if has_hooks:
            self._peers.call_later(operation.entry.run_hooks)
        if has_callbacks:
            self._peers.call_later(operation.work.run_callbacks)

    def _break(self, operation: Operation, cause: Exception) -> None:
        """Fail the group: this rank failed in the operation, so no other rank can complete it either."""
        self._peers.fail(operation.channel, local_failure(cause, operation.channel.world_rank))

    def abandon(self, channel: Channel, error: GroupError) -> None:
        """Fail every operation of a channel. Afterwards nothing touches the operations' memory."""
        for operation in list(channel.operations.values()):
            for task in operation.tasks:
                # The generator may hold the last reference to the memory from which a transfer copies its rest.
                for transfer in task.transfers:
                    transfer.abandon()
                # In a forked child, a thread of the parent may have been running the generator.
                with contextlib.suppress(ValueError):
                    task.generator.close()
            operation.tasks.clear()
            self._end(operation, operation.failure(error))
        if self._polled:
            self._polled = [task for task in self._polled if not task.operation.over]
        self._held.pop(channel.prefix, None)
        for key in [key for key in self.any_source if key.startswith(channel.prefix)]:
            del self.any_source[key]

    def waits_for(self, channel: Channel, peer: int, *, last: bool) -> bool:
        """Return whether a pending operation needs ``peer``; if it was the ``last`` peer, whether one needs any peer."""
        self.run()  # the peer may have done everything that the operations need
        tasks = [task for operation in channel.operations.values() for task in operation.tasks]
        awaited = {t.peer for task in tasks for t in task.transfers if not t.done} | {task.awaits for task in tasks}
        return peer in awaited or (last and -1 in awaited)

    # -- tasks ---------------------------------------------------------------------------------

    def resume(self, task: Task) -> bool:
        """Resume a task until it waits; return False if it still waits for the same peer."""
        operation, was_polled = task.operation, task.awaits is not None
        if task.operation.over:  # it failed while the task was queued
            return True
        missed: int | None = None
        try:
            while not task.outstanding:
                reply, task.reply = task.reply, None
                step = task.generator.send(reply)
                before, task.awaits = task.awaits, None
                if isinstance(step, int):
                    task.awaits = operation.channel.members[step]
                    gone = self._peers.gone(task.awaits)
                    if gone is None:
                        self._wait_for_peer(task)
                        return not was_polled or task.awaits != before
                    if missed == task.awaits:
                        raise gone
                    # The peer may have done its part after the schedule looked and before it left: look once more.
                    missed = task.awaits
                    continue
                if not step:
                    self._polled.append(task)
                    return True
                if task.scratch:
                    self._give_scratch(task)
                if task.transfers:
                    task.transfers = []
                task.outstanding = 1  # a transfer that completes during `perform` must not make the task runnable
                self.perform(task, step)
                if operation.over:  # one of the transfers did not match
                    return True
                task.outstanding -= 1
        except StopIteration:
            if task.scratch:
                self._give_scratch(task)
            operation.tasks.remove(task)
            for part, generator in itertools.islice(operation.parts, 1):
                self._add_task(operation, part, generator)
            if not operation.tasks:
                self._complete(operation)
        except GroupError as cause:
            # The group keeps the error, and the frames of its traceback would keep the caller's tensors.
            self._break(operation, cause.with_traceback(None))
        except Exception as cause:
            self._break(operation, cause)
        return True

    def perform(self, task: Task, step: Iterable[Any]) -> None:
        """Begin the actions of a step, until the operation fails."""
        operation = task.operation
        channel, plan = operation.channel, operation.plan
        for action in step:
            kind = type(action)
            if kind is Send:
                peer = channel.members[action.peer]
                message = Outgoing(peer, task.key, plan.fingerprint, action.place.view, task)
                task.outstanding += 1
                link = None if peer in self._peers.lost_peers else self._peers.links.get(peer)
                if (link or self._peers.link(peer)).send(message):
                    task.outstanding -= 1
                else:
                    task.transfers.append(message)
            elif kind is Recv:
                peer = channel.members[action.peer]
                self._post(task, Receive(peer, task.key, plan.fingerprint, action.place.view, task))
            elif kind is Reduce:
                self._post(task, self._folding(task, action))
            elif kind is Combine:
                assert plan.fold is not None
                plan.fold(action.place.tensor, action.other.tensor, action.swapped)
            elif kind is Begun:
                message = action.message
                if not message.done:
                    message.owner = task
                    task.outstanding += 1
                    task.transfers.append(message)
            else:
                self._post_any(task, action)
            if operation.over:
                return

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
        if (self._peers.inboxes.get(peer) or self._peers.inbox(peer)).post(receive):
            task.outstanding -= 1
            return
        if receive.done:
            return
        # A peer that is alive opens the connection: this rank does so if it waits for long (`Operation.due`).
        if peer in self._peers.lost_peers or peer not in self._peers.links:
            self._peers.link(peer)  # raises if the peer is lost
        task.transfers.append(receive)

    def _post_any(self, task: Task, action: RecvAny) -> None:
        """Receive a message that has arrived already; else put the receive into `any_source`."""
        operation = task.operation
        receive = AnyReceive(task, operation.plan.fingerprint, action.place.view)
        others = [peer for peer in operation.channel.members if peer != operation.channel.world_rank]
        for peer in others:
            if self._peers.inbox(peer).has_arrived(task.key):
                receive.peer = peer
                self._post(task, receive)
                if receive.done:
                    task.reply = peer
                return
        gone = [error for peer in others if (error := self._peers.gone(peer)) is not None]
        if gone and len(gone) == len(others):  # no rank is left that could send it
            raise gone[-1]
        for peer in others:
            self._peers.inbox(peer).unblock()
        self.any_source.setdefault(task.key, deque()).append(receive)
        task.transfers.append(receive)
        task.outstanding += 1

    def _give_scratch(self, task: Task) -> None:
        while task.scratch:
            self._scratch.give(task.scratch.pop())

    # -- time ----------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Fail the channels of operations whose deadline has passed; query the peers of those that have waited long."""
        for operation in [operation for operation in self.operations.values() if operation.due <= now]:
            if operation.over:
                continue
            if now < operation.probe_at:
                operation.due = operation.probe_at
                self._peers.query_peers(operation, senders(operation))
            elif now < operation.deadline:
                operation.due = operation.deadline
                self._peers.probe_waits(operation)
            else:
                self._peers.fail(operation.channel, self._peers.timeout_error(operation))
        due = min((operation.due for operation in self.operations.values()), default=math.inf)
        self.next_deadline = max(due, now + len(self.operations) * _PAUSE_EACH)


def _sequence_of(task: Task) -> int:
    return task.operation.sequence
