"""What a collective algorithm says: send this place, receive that one, fold one into another.

A schedule is a generator. It does no I/O and knows no tensor: it yields *steps*, and a driver makes each step so before
it resumes the generator. A step is a tuple of actions that go on at once; it is over when all of them are.

A *place* is a piece of memory, opaque to the schedule: a driver's business. *Blocks* are places numbered like ranks:
``blocks[i]`` is one, and where a schedule says so ``blocks[lo:hi]`` is the run of them as one place. Peers are ranks in
the group. Between two ranks, messages of one generator are matched in the order in which both yield them.

A schedule that moves data itself (`asyncdist.transport.native`) yields steps without actions: ``()`` when it has done a piece of its
work and would go on, or the number of the member for whom it waits. It is resumed to look again.

The rules that make a step safe, which the simulator in `asyncdist.testing` checks:

* no place of a step overlaps another one of it, except that several ``Send`` may share theirs;
* every ``Send`` has its ``Recv`` or ``ReduceTraffic`` of equal size at the peer.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

Place = Any


class Send(NamedTuple):
    """Send ``place`` to ``peer``; done when the memory may be written again."""

    peer: int
    place: Place


class Recv(NamedTuple):
    """Receive from ``peer`` into ``place``."""

    peer: int
    place: Place


class Reduce(NamedTuple):
    """Receive from ``peer`` and fold what comes into ``place``, piece by piece as it arrives."""

    peer: int
    place: Place


class Combine(NamedTuple):
    """Fold ``other`` into ``place``, both ours; ``swapped`` puts ``other`` first.

    Floating-point reductions are commutative but for signed zeros and NaN payloads; two ranks that compute the same
    result name the lower rank's operand first, and so agree bit for bit.
    """

    place: Place
    other: Place
    swapped: bool


Action = Send | Recv | Reduce | Combine
Step = tuple[Action, ...]
Wait = int
"""The member for whom a schedule that moves data itself waits."""

Schedule = Generator[Step | Wait, None, Any]


class Blocks(Protocol):
    """Places by number; runs of them where the memory is contiguous."""

    def __getitem__(self, which: int | slice, /) -> Place: ...
