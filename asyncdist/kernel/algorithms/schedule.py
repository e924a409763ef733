"""The language of collective algorithms: send from a place, receive into one, fold one into another.

The modules of `algorithms` write schedules; the engine's executor runs them. A schedule is a generator without I/O and
tensors. It yields *steps*, and the executor completes each step before it resumes the generator. A step is a tuple of
actions that run concurrently; it is complete when all of them are.

A *place* is a piece of memory, opaque to the schedule. *Blocks* are places numbered like ranks: ``blocks[i]`` is one block.
If the schedule requires contiguous blocks, ``blocks[lo:hi]`` is a run of them as one place. Peers are group ranks. Between
two ranks, messages of one generator are matched in the order in which both yield them.

A native schedule (`asyncdist.kernel.transport.native`) moves data itself. It yields steps without actions: ``()`` after a
part of its work, or the group rank for which it waits. The executor resumes it to check again. A direct schedule
(`asyncdist.kernel.engine.direct_calls`) may also yield `END_ATTEMPT`: only an operation can continue it.

A step must satisfy these rules, which `tests/support/simulator.py` checks:

* no place of a step overlaps another place of it, except that several ``Send`` may have the same place;
* every ``Send`` has its ``Recv`` or ``Reduce`` of equal size at the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

Place = Any

CROWD = 32
"""The most ranks of a host that may all synchronize with each other, however few cores they share."""


class Send(NamedTuple):
    """Send ``place`` to ``peer``; complete when the memory may be written again."""

    peer: int
    place: Place


class Recv(NamedTuple):
    """Receive from ``peer`` into ``place``."""

    peer: int
    place: Place


class Reduce(NamedTuple):
    """Receive from ``peer`` and fold the data into ``place``, piece by piece as it arrives."""

    peer: int
    place: Place


class Combine(NamedTuple):
    """Fold ``other`` into ``place``, both local; ``swapped`` makes ``other`` the first operand.

    Floating-point reductions commute except for signed zeros and NaN payloads. Two ranks that compute the same result
    name the lower rank's operand first, and so agree bit for bit.
    """

    place: Place
    other: Place
    swapped: bool


Action = Send | Recv | Reduce | Combine
Step = tuple[Action, ...]
Wait = int
"""The group rank for which a native schedule waits."""

Schedule = Generator[Step | Wait, None, Any]

ScheduleOf = Callable[..., Schedule]
"""Makes a schedule, as the functions of this folder do."""

END_ATTEMPT: Any = None
"""Ends the attempt to run a direct schedule without an operation."""


class Blocks(Protocol):
    """Places by number; runs of them if the memory is contiguous."""

    def __getitem__(self, which: int | slice, /) -> Place: ...
