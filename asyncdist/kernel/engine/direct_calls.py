"""Runs a collective over links in the calling thread, without an operation.

`PlannedCalls.run` runs a schedule over links as a native call runs (`asyncdist.kernel.transport.native`): it sends the
messages of a step itself, reads those that the step receives straight from the peers' connections, and yields only to
wait. So `Progress.attempt` runs it like a call in shared memory. If the attempt ends before the call is complete, an
operation continues the same generator, which then yields the rest of its step to the executor, and every later step as it
is.

The attempt ends at anything unusual: a peer without a link, a message that does not leave at once, bytes that are not the
expected message, the end of a connection, a failed group, another thread that needs the lock, or time. Nothing is lost
then: bytes that were read are read again, and a message that has left in part is completed by its link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncdist.kernel.algorithms.schedule import END_ATTEMPT, Action, Combine, Recv, Reduce, Schedule, Send
from asyncdist.kernel.engine.call_checker import CollectiveChecker
from asyncdist.kernel.engine.drivers.waiting import Waiting
from asyncdist.kernel.engine.executor import EngineHost
from asyncdist.kernel.engine.operation import NUMBERS, Begun, Channel
from asyncdist.kernel.memory.buffers import NOTHING, Memory, Scratch
from asyncdist.kernel.memory.reduce_kernels import Fold
from asyncdist.kernel.transport.wire_format import DATA, pack_tail

MAX_DIRECT_NBYTES = 64 << 10
"""Bytes of the largest call that is worth an attempt which does not wait for peers, and of scratch that a step keeps."""
MAX_WAITING_NBYTES = 1 << 20
"""Bytes of the largest call that is worth an attempt which does: its messages often fit into the buffers of a link."""
LINK_POLLS = 2
"""Polls of links after which a waiting thread looks at the clock and offers its core; each makes `_TRIES` system calls."""
_TRIES = 4
_FIRST_PART = bytes(4)


class _Message:
    """A message of a step: its action, its peer in the world, its memory, and its header after the operation's key.

    A message that is reduced arrives in scratch first; ``place`` is then the scratch.
    """

    __slots__ = ("action", "fingerprint", "is_reduced", "peer", "place", "tail")

    def __init__(self, action: Send | Recv | Reduce, peer: int, place: Memory, fingerprint: int) -> None:
        self.action, self.peer, self.place, self.fingerprint = action, peer, place, fingerprint
        self.is_reduced = isinstance(action, Reduce)
        self.tail = _FIRST_PART + pack_tail(fingerprint, place.nbytes, DATA)


class DirectStep(tuple[Action, ...]):
    """A step in the form in which `PlannedCalls` performs it. A recorded step is one, which many calls yield in turn.

    Attributes:
        combines: Its local actions.
        sends: Its outgoing messages.
        receives: Its incoming messages; None until `prepare`.
        borrows: Whether it takes scratch in each use, and not once.
    """

    combines: list[Combine]
    sends: list[_Message]
    receives: list[_Message] | None = None
    borrows = False

    def prepare(self, members: Sequence[int], fingerprint: int, scratch: Scratch) -> None:
        """Make the messages of the step. A recorded step keeps small scratch."""
        combines: list[Combine] = []
        sends: list[_Message] = []
        receives: list[_Message] = []
        nbytes = 0
        for action in self:
            if isinstance(action, Combine):
                combines.append(action)
                continue
            place: Memory = action.place
            if isinstance(action, Reduce):
                place = scratch.take(place.count, place.wire or place.dtype)
                nbytes += place.nbytes
            message = _Message(action, members[action.peer], place, fingerprint)
            (sends if isinstance(action, Send) else receives).append(message)
        self.borrows = self.borrows or nbytes > MAX_DIRECT_NBYTES
        # Last: an error, such as exhausted memory, leaves nothing prepared.
        self.combines, self.sends, self.receives = combines, sends, receives

    def take_scratch(self, scratch: Scratch) -> None:
        """Take scratch for another use."""
        for message in self.receives or ():
            if message.is_reduced:
                place = message.action.place
                message.place = scratch.take(place.count, place.wire or place.dtype)

    def give_scratch(self, scratch: Scratch) -> None:
        """Return the scratch of a step that is complete."""
        for message in self.receives or ():
            if message.is_reduced:
                scratch.give(message.place)
                message.place = NOTHING


_Left = tuple[Sequence[_Message], list[Any]]
"""Of a step that is not complete: the messages to wait for, and the actions that only an operation can complete."""
_BegunStep = tuple[DirectStep, _Left]


class DirectCalls:
    """What the direct calls of one rank have in common."""

    def __init__(self, host: EngineHost, checker: CollectiveChecker, scratch: Scratch, waiting: Waiting) -> None:
        self.links, self.inboxes, self.operations = host.links, host.inboxes, host.operations
        self.checker, self.scratch, self.waiting = checker, scratch, waiting

    def planned(self, channel: Channel, fingerprint: int, fold: Fold | None, *, spins: bool) -> PlannedCalls:
        """Return the direct calls of one plan; see `PlannedCalls`."""
        return PlannedCalls(self, channel, fingerprint, fold, spins)


class PlannedCalls:
    """The direct calls of one plan. Called under the lock of the world's `Progress`.

    Args:
        fold: Does the arithmetic of Reduce and Combine.
        spins: Whether the attempt waits for peers without sleeping.
    """

    def __init__(self, calls: DirectCalls, channel: Channel, fingerprint: int, fold: Fold | None, spins: bool) -> None:
        self._links, self._inboxes, self.operations = calls.links, calls.inboxes, calls.operations
        self._checker, self._scratch, self.early_calls = calls.checker, calls.scratch, calls.checker.early_calls
        self._channel, self._fingerprint, self._fold = channel, fingerprint, fold
        self._tries = _TRIES if spins else 1

    def key(self, number: int) -> bytes:
        """Return the first 12 bytes of the keys of a call's messages."""
        return self._channel.prefix + (number & NUMBERS).to_bytes(4, "little")

    def run(self, schedule: Iterable[Any], number: int, begun: _BegunStep | None = None) -> Schedule:
        """Run the only part of a collective directly, or in an operation.

        Args:
            number: The number of the collective.
            begun: The step before those of ``schedule``, and what `perform` has left of it.
        """
        operations, early_calls = self.operations, self.early_calls
        key = self.key(number)
        if begun is not None:
            yield from self._complete(*begun, key)
        elif early_calls and self._differs(key):
            yield END_ATTEMPT
        for step in schedule:
            if key in operations or isinstance(step, int) or not step:
                yield step
                continue
            direct = step
            if type(step) is not DirectStep:
                direct = DirectStep(step)
                direct.borrows = True
            left = self.perform(direct, key)
            if left is not None:
                yield from self._complete(direct, left, key)
        # A peer whose message no step has received may have made another call.
        if early_calls and key not in operations and self._differs(key):
            yield END_ATTEMPT

    def _differs(self, key: bytes) -> bool:
        """Compare a call with those that peers have made before; return whether the group has failed."""
        self._checker.compare(self._channel, key, self._fingerprint)
        return self._channel.error is not None

    def perform(self, step: DirectStep, key: bytes) -> _Left | None:
        """Send the messages of a step, do its arithmetic, and read what has arrived; return what is left, if anything."""
        if step.receives is None:
            step.prepare(self._channel.members, self._fingerprint, self._scratch)
        elif step.borrows:
            step.take_scratch(self._scratch)
        rest: list[Any] = []
        for message in step.sends:
            link = self._links.get(message.peer)
            if link is None or not link.is_direct:
                rest.append(message.action)
            elif (unsent := link.send_now(key + message.tail, message.place.view)) is not None:
                rest.append(Begun(unsent))
        for action in step.combines:
            assert self._fold is not None
            self._fold(action.place.tensor, action.other.tensor, action.swapped)
        waiting = self._receive(step.receives, rest, key) if step.receives else ()
        if waiting or rest:
            return waiting, rest
        if step.borrows:
            step.give_scratch(self._scratch)
        return None

    def _receive(self, messages: Sequence[_Message], rest: list[Any], key: bytes) -> list[_Message]:
        """Read the messages that have arrived; return the others. A receive that needs an operation goes to ``rest``."""
        waiting: list[_Message] = []
        for message in messages:
            # Messages of one peer keep their order.
            if rest or (waiting and any(message.peer == other.peer for other in waiting)):
                waiting.append(message)
                continue
            inbox, room = self._inboxes.get(message.peer), message.place.view
            if inbox is None or inbox.source is None:
                taken: bool | None = False
            elif inbox.aside and (early := key + _FIRST_PART) in inbox.aside:
                taken = inbox.claim(early, message.fingerprint, room)
            else:
                taken = inbox.source.take(key + message.tail, room, self._tries, message.place.frame)
            if taken is None:
                waiting.append(message)
            elif not taken:
                rest.append(message.action)
            elif message.is_reduced:
                assert self._fold is not None
                self._fold(message.action.place.tensor, message.place.tensor, False)
        return waiting

    def _complete(self, step: DirectStep, left: _Left, key: bytes) -> Iterator[Any]:
        """Complete a step: yield to wait for its messages; in an operation, yield what is left of it."""
        waiting, rest = left
        is_long = bool(waiting) and waiting[0].place.nbytes > MAX_DIRECT_NBYTES // 2
        # A rank that gets more of a long message goes on waiting for the rest.
        moved, before = False, self._taken(waiting) if is_long else 0
        while waiting and not rest:
            yield () if moved else waiting[0].action.peer
            if key in self.operations:
                break
            waiting = self._receive(waiting, rest, key)
            if is_long:
                moved, before = (after := self._taken(waiting)) != before, after
        if waiting or rest:
            if key not in self.operations:
                yield END_ATTEMPT
            yield (*rest, *[message.action for message in waiting])
        if step.borrows:
            step.give_scratch(self._scratch)

    def _taken(self, messages: Sequence[_Message]) -> int:
        """Return how many bytes of messages that are incomplete have arrived."""
        sources = [inbox.source for each in messages if (inbox := self._inboxes.get(each.peer)) is not None]
        return sum(source.taken for source in sources if source is not None)
