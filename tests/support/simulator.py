"""Run schedules over numpy arrays: in lock step, which counts their cost, or in an order drawn from a seed.

`lock_step` runs in rounds and delivers a message when both ranks have reached it, without buffers. A schedule that
completes there needs no buffering, and its cost can be compared with the documented one. `adversary` buffers every message,
lets ranks run ahead of or behind each other, overwrites memory that waits for a message, and swaps the operands of
`Reduce`. A schedule with the same result there relies only on what the rules guarantee.

Both check the rules of `asyncdist.kernel.algorithms.schedule` and describe a violation::

    tensors = [numpy.full(10, rank) for rank in range(3)]
    trace = lock_step([ring.all_reduce(rank, 3, ArrayBlocks(tensors[rank], 3)) for rank in range(3)])
    assert trace.cost.rounds == 4 and all((tensor == 3).all() for tensor in tensors)

Places are C-contiguous arrays; the arrays of different ranks must not share memory.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncdist.base.callables import Callback
from asyncdist.kernel.algorithms.cost import Cost
from asyncdist.kernel.algorithms.schedule import Action, Combine, Recv, Reduce, Schedule, Send, Step

Array = NDArray[Any]
Fold = Callable[[Array, Array], Array]


class ScheduleError(AssertionError):
    """A schedule broke a rule. Base class."""


class UnsafeStepError(ScheduleError):
    """Two places that a rank uses at the same time overlap, or an action names a rank that is not a peer."""


class SizeMismatchError(ScheduleError):
    """The size of a message differs from the size of its receiver's place."""


class DeadlockError(ScheduleError):
    """No schedule can continue. ``waiting`` maps each rank to the peers that it waits for."""

    def __init__(self, waiting: dict[int, list[int]], report: str) -> None:
        super().__init__(report)
        self.waiting = waiting


class ArrayBlocks:
    """An array cut into ``count`` blocks of nearly equal size, or at the given ``bounds``; each block is a view."""

    def __init__(self, array: Array, count: int, bounds: Sequence[int] | None = None) -> None:
        self._flat = array.reshape(-1)
        self._bounds = [array.size * block // count for block in range(count + 1)] if bounds is None else list(bounds)
        if len(self._bounds) != count + 1:
            raise ValueError(f"{count} blocks have {count + 1} bounds, not {len(self._bounds)}")

    def __getitem__(self, which: int | slice, /) -> Array:
        first, last = (which.start, which.stop) if isinstance(which, slice) else (which, which + 1)
        if not 0 <= first <= last < len(self._bounds):
            raise IndexError(f"blocks {first}:{last} of {len(self._bounds) - 1}")
        return self._flat[self._bounds[first] : self._bounds[last]]


class Trace(NamedTuple):
    """The cost of a run in lock step, and the messages and bytes that each rank sent."""

    cost: Cost
    sent_messages: list[int]
    sent_nbytes: list[int]


def lock_step(
    schedules: Sequence[Schedule | Sequence[Schedule]], *, fold: Fold = np.add, ports: int | None = None
) -> Trace:
    """Run the schedules in rounds and return their cost.

    A round delivers all messages that both ranks have reached when it begins.

    Args:
        schedules: For each rank, one schedule or several concurrent ones.
        fold: Reduces two arrays.
        ports: The most messages that a rank can send and can receive in a round, those of its first schedules first;
            None for any number.

    Raises:
        ScheduleError: A schedule breaks a rule, or no schedule can continue.
    """
    world = _World(schedules, fold)
    for task in world.tasks:
        world.resume(task)
    costs = [world.close_round()]
    while not world.finished():
        messages = list(world.ready_messages(ports))
        if not messages:
            raise world.deadlock()
        for send, receive in messages:
            world.deliver(receive, send.bytes())
            world.complete(send)
        for task in dict.fromkeys(end.task for message in messages for end in message):
            world.resume(task)
        costs.append(world.close_round())
    # Steps before the first message are not a round.
    cost = sum(costs, Cost(rounds=-1))
    return Trace(cost, world.sent_messages, world.sent_nbytes)


def adversary(schedules: Sequence[Schedule | Sequence[Schedule]], *, seed: int, fold: Fold = np.add) -> None:
    """Run the schedules in an order drawn from ``seed``. Messages between the same two schedules stay in order.

    Args:
        schedules: For each rank, one schedule or several concurrent ones.
        seed: Determines the order.
        fold: Reduces two arrays.

    Raises:
        ScheduleError: A schedule breaks a rule, or no schedule can continue.
    """
    choices = random.Random(seed)
    world = _World(schedules, fold, choices)
    sent: dict[_Channel, deque[bytes]] = {}
    speeds = [choices.choice((0.01, 1.0, 1.0)) for _ in schedules]

    def send(channel: _Channel) -> None:
        end = world.sends[channel].popleft()
        sent.setdefault(channel, deque()).append(end.bytes())
        world.complete(end)

    def receive(channel: _Channel) -> None:
        world.deliver(world.receives[channel].popleft(), sent[channel].popleft())

    while True:
        events: list[tuple[int, Callback]] = []
        events += [(task.rank, partial(world.resume, task)) for task in world.tasks if not task.done and not task.open]
        events += [(channel.source, partial(send, channel)) for channel, sends in world.sends.items() if sends]
        events += [(c.target, partial(receive, c)) for c, data in sent.items() if data and world.receives.get(c)]
        if not events:
            break
        _, event = choices.choices(events, [speeds[rank] for rank, _ in events])[0]
        event()
    if not world.finished():
        raise world.deadlock()
    for channel, data in sent.items():
        if data:
            raise ScheduleError(f"rank {channel.target} has not received a message that rank {channel.source} sent")


# -- tasks and messages ---------------------------------------------------------------------------


class _Channel(NamedTuple):
    """Messages from one schedule to another, which stay in order. ``part`` is the index of the schedules on their ranks."""

    part: int
    source: int
    target: int


@dataclass(eq=False)
class _Task:
    """One schedule of one rank: its current step, and the actions of the step that wait for their messages."""

    rank: int
    part: int
    schedule: Schedule
    step: Step = ()
    open: list[Action] = field(default_factory=list)
    steps: int = 0
    done: bool = False


class _SimulatedEnd(NamedTuple):
    """One end of a message: the action of a schedule."""

    task: _Task
    action: Send | Recv | Reduce

    def bytes(self) -> bytes:
        return bytes(self.action.place.tobytes())


class _World:
    def __init__(
        self, schedules: Sequence[Schedule | Sequence[Schedule]], fold: Fold, choices: random.Random | None = None
    ) -> None:
        self.size = len(schedules)
        self.fold = fold
        self.choices = choices
        self.tasks = [
            _Task(rank, part, schedule)
            for rank, given in enumerate(schedules)
            for part, schedule in enumerate(given if isinstance(given, Sequence) else [given])
        ]
        self.sends: dict[_Channel, deque[_SimulatedEnd]] = {}
        self.receives: dict[_Channel, deque[_SimulatedEnd]] = {}
        self.sent_messages = [0] * self.size
        self.sent_nbytes = [0] * self.size
        self._clear_round()

    def resume(self, task: _Task) -> None:
        """Resume a schedule until it ends or waits for a message."""
        while not task.done and not task.open:
            task.step = ()
            try:
                step = next(task.schedule)
            except StopIteration:
                task.done = True
                return
            if isinstance(step, int):
                raise AssertionError("a schedule that moves data itself cannot be simulated")
            task.steps += 1
            self._check(task, step)
            task.step = step
            for action in step:
                self._post(task, action)

    def _post(self, task: _Task, action: Action) -> None:
        if isinstance(action, Combine):
            operands = (action.other, action.place) if action.swapped else (action.place, action.other)
            action.place[...] = self.fold(*operands)
            self._reduced[task.rank] += action.place.nbytes
            return
        task.open.append(action)
        end = _SimulatedEnd(task, action)
        if isinstance(action, Send):
            self.sends.setdefault(_Channel(task.part, task.rank, action.peer), deque()).append(end)
            return
        self.receives.setdefault(_Channel(task.part, action.peer, task.rank), deque()).append(end)
        if isinstance(action, Recv) and self.choices is not None:
            action.place.reshape(-1).view(np.uint8)[...] = self.choices.randrange(256)

    def ready_messages(self, ports: int | None) -> Iterator[tuple[_SimulatedEnd, _SimulatedEnd]]:
        """Remove the messages of a round from the channels, and yield the two ends of each."""
        sending, receiving = [0] * self.size, [0] * self.size
        for channel in sorted(self.sends):
            sends, receives = self.sends[channel], self.receives.get(channel, deque())
            while sends and receives:
                if ports is not None and max(sending[channel.source], receiving[channel.target]) >= ports:
                    break
                sending[channel.source] += 1
                receiving[channel.target] += 1
                yield sends.popleft(), receives.popleft()

    def deliver(self, receive: _SimulatedEnd, data: bytes) -> None:
        """Copy a message into its receiver's place and complete the receive."""
        action, target = receive.action, receive.task.rank
        if len(data) != action.place.nbytes:
            raise SizeMismatchError(
                f"rank {target}, step {receive.task.steps}: {_phrase(action)}, but {len(data)} bytes came"
            )
        incoming = np.frombuffer(data, action.place.dtype).reshape(action.place.shape)
        if isinstance(action, Recv):
            action.place[...] = incoming
        else:
            swapped = self.choices is not None and self.choices.random() < 0.5
            action.place[...] = self.fold(incoming, action.place) if swapped else self.fold(action.place, incoming)
            self._reduced[target] += len(data)
        self._received[target] += 1, len(data)
        self.complete(receive)

    def complete(self, end: _SimulatedEnd) -> None:
        """Complete one end of a message."""
        if isinstance(end.action, Send):
            self._sent[end.task.rank] += 1, end.action.place.nbytes
            self.sent_messages[end.task.rank] += 1
            self.sent_nbytes[end.task.rank] += end.action.place.nbytes
        # list.remove would compare arrays, which have no single truth value.
        del end.task.open[[action is end.action for action in end.task.open].index(True)]

    def close_round(self) -> Cost:
        """Return the cost of the busiest rank since the last call."""
        messages, nbytes = np.maximum(self._sent, self._received).max(axis=0, initial=0)
        cost = Cost(1, int(messages), int(nbytes), max(self._reduced.tolist(), default=0))
        self._clear_round()
        return cost

    def _clear_round(self) -> None:
        self._sent = np.zeros((self.size, 2), np.int64)  # messages, bytes
        self._received = np.zeros((self.size, 2), np.int64)
        self._reduced = np.zeros(self.size, np.int64)

    def finished(self) -> bool:
        return all(task.done for task in self.tasks)

    def deadlock(self) -> DeadlockError:
        """Return the error that says which ranks wait for which peers."""
        waiting: dict[int, list[int]] = {}
        lines = ["no schedule can continue:"]
        for task in self.tasks:
            if task.done:
                lines.append(f"  rank {task.rank} is done after {task.steps} steps")
            else:
                peers = [action.peer for action in task.open if not isinstance(action, Combine)]
                waiting.setdefault(task.rank, []).extend(peers)
                lines.append(f"  rank {task.rank}, step {task.steps}: {'; '.join(map(_phrase, task.open))}")
        return DeadlockError(waiting, "\n".join(lines))

    def _check(self, task: _Task, step: Step) -> None:
        where = f"rank {task.rank}, step {task.steps}"
        if not step:
            raise UnsafeStepError(f"{where} is empty")
        in_use = [use for other in self.tasks if other.rank == task.rank for use in _uses(other.step)]
        for use in _uses(step):
            peer = getattr(use.action, "peer", None)
            if peer is not None and (peer == task.rank or not 0 <= peer < self.size):
                raise UnsafeStepError(f"{where}: {_phrase(use.action)}, which is not a peer among {self.size} ranks")
            for other in in_use:
                if use.overlaps(other):
                    raise UnsafeStepError(
                        f"{where}: '{_phrase(use.action)}' overlaps the memory of '{_phrase(other.action)}'"
                    )
            in_use.append(use)


class _Use(NamedTuple):
    """The addresses that an action uses."""

    start: int
    stop: int
    action: Action

    def overlaps(self, other: _Use) -> bool:
        both_read = isinstance(self.action, Send) and isinstance(other.action, Send)
        return max(self.start, other.start) < min(self.stop, other.stop) and not both_read


def _uses(step: Step) -> Iterator[_Use]:
    for action in step:
        for place in (action.place, action.other) if isinstance(action, Combine) else (action.place,):
            if not isinstance(place, np.ndarray) or not place.flags.c_contiguous:
                raise TypeError(f"a simulated place must be a C-contiguous array, not {place!r}")
            start = place.__array_interface__["data"][0]
            yield _Use(start, start + place.nbytes, action)


def _phrase(action: Action) -> str:
    if isinstance(action, Combine):
        return f"combine {action.other.nbytes} bytes with others"
    if isinstance(action, Send):
        return f"send {action.place.nbytes} bytes to rank {action.peer}"
    what = "receive" if isinstance(action, Recv) else "reduce"
    return f"{what} {action.place.nbytes} bytes from rank {action.peer}"
