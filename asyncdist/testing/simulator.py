"""Runs schedules over numpy arrays: in lock step, which counts their cost, or in an order drawn from a seed.

`lock_step` moves in rounds and hands a message over when both ends have reached it, without buffers. A schedule that
completes here needs no buffering, and its cost can be compared with its author's claim. `adversary` buffers every message,
lets ranks run ahead of or behind each other, overwrites memory that waits for a message, and swaps the operands of
`Reduce`. A schedule with the same result there relies on nothing that the rules do not guarantee.

Both check the rules of `asyncdist.algorithms.schedule` and describe a violation::

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

from asyncdist.algorithms.cost import Cost
from asyncdist.algorithms.schedule import Action, Combine, Recv, Reduce, Schedule, Send, Step

Array = NDArray[Any]
Fold = Callable[[Array, Array], Array]


class ScheduleError(AssertionError):
    """A schedule broke a rule. Base class."""


class UnsafeStepError(ScheduleError):
    """Two places that a rank uses at the same time overlap, or an action names a rank that is not a peer."""


class SizeMismatchError(ScheduleError):
    """A message has another size than its receiver's place."""


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
    """Run the schedules, one or several at once per rank, in rounds; return what they took.

    A round hands over all messages whose two ends are there when it begins; with ``ports``, at most that many out of
    and into each rank, those of a rank's first schedules first. Raises `ScheduleError`.
    """
    world = _World(schedules, fold)
    for task in world.tasks:
        world.begin(task)
    busiest = [world.close_round()]
    while not world.finished():
        messages = list(world.meetings(ports))
        if not messages:
            raise world.deadlock()
        for send, receive in messages:
            world.hand_over(send, receive, send.bytes())
        for task in {end.task.key: end.task for message in messages for end in message}.values():
            if not task.open:
                world.begin(task)
        busiest.append(world.close_round())
    # Steps before the first message are not a round.
    cost = sum(busiest, Cost(rounds=-1))
    return Trace(cost, world.sent_messages, world.sent_nbytes)


def adversary(schedules: Sequence[Schedule | Sequence[Schedule]], *, seed: int, fold: Fold = np.add) -> None:
    """Run the schedules in an order drawn from ``seed``; messages between the same two ends stay in order.

    Raises `ScheduleError`.
    """
    chance = random.Random(seed)
    world = _World(schedules, fold, chance)
    wires: dict[_Channel, deque[bytes]] = {}
    haste = [chance.choice((0.01, 1.0, 1.0)) for _ in schedules]

    def depart(channel: _Channel) -> None:
        end = world.sends[channel].popleft()
        wires.setdefault(channel, deque()).append(end.bytes())
        world.close(end)

    def arrive(channel: _Channel) -> None:
        world.hand_over(None, world.receives[channel].popleft(), wires[channel].popleft())

    while True:
        events: list[tuple[int, Callable[[], None]]] = []
        events += [(task.rank, partial(world.begin, task)) for task in world.tasks if not task.done and not task.open]
        events += [(channel.source, partial(depart, channel)) for channel, sends in world.sends.items() if sends]
        events += [(c.target, partial(arrive, c)) for c, wire in wires.items() if wire and world.receives.get(c)]
        if not events:
            break
        _, happen = chance.choices(events, [haste[rank] for rank, _ in events])[0]
        happen()
    if not world.finished():
        raise world.deadlock()
    for channel, wire in wires.items():
        if wire:
            raise ScheduleError(f"rank {channel.target} never received what rank {channel.source} sent it")


# -- the machine ----------------------------------------------------------------------------------


class _Channel(NamedTuple):
    """A pair of ranks whose messages stay in order. ``part`` is the index of the schedule on its rank."""

    part: int
    source: int
    target: int


@dataclass(eq=False)
class _Task:
    """One schedule of one rank: its current step and the step's open messages."""

    rank: int
    part: int
    schedule: Schedule
    step: Step = ()
    open: list[Action] = field(default_factory=list)
    steps: int = 0
    done: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.part


class _SimulatedEnd(NamedTuple):
    """One end of a message: an open action and its schedule."""

    task: _Task
    action: Send | Recv | Reduce

    def bytes(self) -> bytes:
        return bytes(self.action.place.tobytes())


class _World:
    def __init__(
        self, schedules: Sequence[Schedule | Sequence[Schedule]], fold: Fold, chance: random.Random | None = None
    ) -> None:
        self.size = len(schedules)
        self.fold = fold
        self.chance = chance
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

    # a step begins

    def begin(self, task: _Task) -> None:
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
        if isinstance(action, Send):
            self.sends.setdefault(_Channel(task.part, task.rank, action.peer), deque()).append(
                _SimulatedEnd(task, action)
            )
            return
        self.receives.setdefault(_Channel(task.part, action.peer, task.rank), deque()).append(
            _SimulatedEnd(task, action)
        )
        if isinstance(action, Recv) and self.chance is not None:
            action.place.reshape(-1).view(np.uint8)[...] = self.chance.randrange(256)

    # messages

    def meetings(self, ports: int | None) -> Iterator[tuple[_SimulatedEnd, _SimulatedEnd]]:
        """Remove from the channels, and yield, the messages that a round delivers."""
        leaving, coming = [0] * self.size, [0] * self.size
        for channel in sorted(self.sends):
            sends, receives = self.sends[channel], self.receives.get(channel, deque())
            while sends and receives:
                if ports is not None and max(leaving[channel.source], coming[channel.target]) >= ports:
                    break
                leaving[channel.source] += 1
                coming[channel.target] += 1
                yield sends.popleft(), receives.popleft()

    def hand_over(self, send: _SimulatedEnd | None, receive: _SimulatedEnd, data: bytes) -> None:
        """Copy a message into its receiver's place and complete both ends."""
        action, target = receive.action, receive.task.rank
        if len(data) != action.place.nbytes:
            raise SizeMismatchError(
                f"rank {target}, step {receive.task.steps}: {_phrase(action)}, but {len(data)} bytes came"
            )
        incoming = np.frombuffer(data, action.place.dtype).reshape(action.place.shape)
        if isinstance(action, Recv):
            action.place[...] = incoming
        else:
            swapped = self.chance is not None and self.chance.random() < 0.5
            action.place[...] = self.fold(incoming, action.place) if swapped else self.fold(action.place, incoming)
            self._reduced[target] += len(data)
        self._received[target] += 1, len(data)
        self.close(receive)
        if send is not None:
            self.close(send)

    def close(self, end: _SimulatedEnd) -> None:
        """Complete one end of a message."""
        if isinstance(end.action, Send):
            self._sent[end.task.rank] += 1, end.action.place.nbytes
            self.sent_messages[end.task.rank] += 1
            self.sent_nbytes[end.task.rank] += end.action.place.nbytes
        is_it = [action is end.action for action in end.task.open]  # arrays do not compare to one truth
        del end.task.open[is_it.index(True)]

    # books

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
        """Describe who waits for whom."""
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

    # rules

    def _check(self, task: _Task, step: Step) -> None:
        where = f"rank {task.rank}, step {task.steps}"
        if not step:
            raise UnsafeStepError(f"{where} is empty")
        in_use = [use for other in self.tasks if other.rank == task.rank for use in _uses(other.step)]
        for use in _uses(step):
            peer = getattr(use.action, "peer", None)
            if peer is not None and (peer == task.rank or not 0 <= peer < self.size):
                raise UnsafeStepError(f"{where}: {_phrase(use.action)}, which is no peer among {self.size}")
            for other in in_use:
                if use.overlaps(other):
                    raise UnsafeStepError(
                        f"{where}: '{_phrase(use.action)}' overlaps the memory of '{_phrase(other.action)}'"
                    )
            in_use.append(use)


class _Use(NamedTuple):
    """Addresses that an action uses."""

    start: int
    stop: int
    action: Action

    def overlaps(self, other: _Use) -> bool:
        only_read = isinstance(self.action, Send) and isinstance(other.action, Send)
        return max(self.start, other.start) < min(self.stop, other.stop) and not only_read


def _uses(step: Step) -> Iterator[_Use]:
    for action in step:
        for place in (action.place, action.other) if isinstance(action, Combine) else (action.place,):
            if not isinstance(place, np.ndarray) or not place.flags.c_contiguous:
                raise TypeError(f"a place is a C-contiguous array here, not {place!r}")
            start = place.__array_interface__["data"][0]
            yield _Use(start, start + place.nbytes, action)


def _phrase(action: Action) -> str:
    if isinstance(action, Combine):
        return f"fold {action.other.nbytes} bytes into others"
    if isinstance(action, Send):
        return f"send {action.place.nbytes} bytes to rank {action.peer}"
    what = "receive" if isinstance(action, Recv) else "reduce"
    return f"{what} {action.place.nbytes} bytes from rank {action.peer}"
