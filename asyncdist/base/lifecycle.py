"""The two things that may happen to a process, and who does what about them: it ends, or it is forked.

At the end of the process peers are to hear goodbye. In a forked child the connections are still the parent's: not a byte
may be written to them, nor may they be shut down. The child closes its copies of their descriptors: a peer sees the end of
a connection, and a port or a lock is free again, only when the last copy is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # noqa: F401 - first, and so it joins children last: they may wait for our goodbye
import os
import weakref
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Protocol


class Stage(IntEnum):
    """What a process does at its end, in this order, whoever was imported first.

    What the program itself gives to `atexit` is called before all of it, if that was after the import of ours.
    """

    COMMUNICATORS = auto()
    """Those of devices are aborted: no goodbye ends what waits inside one."""
    SERVERS = auto()
    """Stores that are served from here are closed, which takes the loop."""
    GOODBYES = auto()
    """Peers are told, which may take the loop too, and what waits for them is failed."""
    ERRANDS = auto()
    """Calls that go on get a moment, now that none waits for a peer; they may wait for the loop."""
    LOOP = auto()
    """The background loop is wound down."""


class ProcessHooks(Protocol):
    """One who holds connections."""

    def end_with_process(self) -> None:
        """Say goodbye for a program that ends without closing us. Must not wait."""

    def after_fork_in_child(self) -> None:
        """Touch the connections no more: this is a forked child. No other thread runs, and locks may be held for ever."""


class Descriptor(Protocol):
    """A socket, or any other object that holds a descriptor."""

    def fileno(self) -> int:
        """Return the descriptor, or -1 once it is closed."""


_at_exit: list[tuple[Stage, Callable[[], object]]] = []
_after_fork: list[Callable[[], object]] = []
_holders: weakref.WeakSet[ProcessHooks] = weakref.WeakSet()
_descriptors: weakref.WeakSet[Descriptor] = weakref.WeakSet()
_ending = False


def at_exit(stage: Stage, call: Callable[[], object]) -> None:
    """Have a call made when the process ends, whatever those before it raise. Of one stage the last comes first."""
    _at_exit.append((stage, call))


def after_fork(call: Callable[[], object]) -> None:
    """Have a call made in every forked child, after those named before, whatever these raise."""
    _after_fork.append(call)


def ending() -> bool:
    """Return whether the process has come to its end."""
    return _ending


def register_hooks(holder: ProcessHooks) -> None:
    """Have a holder told until `unregister_hooks`, or until it is collected."""
    _holders.add(holder)


def unregister_hooks(holder: ProcessHooks) -> None:
    """Tell it no more: it has closed."""
    _holders.discard(holder)


def close_in_children(descriptor: Descriptor) -> None:
    """Have every forked child close its copy of a descriptor, without a shutdown of the connection.

    Args:
        descriptor: An object that can be referenced weakly. Its ``fileno`` is called in the child, until the object is
            collected or returns -1.
    """
    _descriptors.add(descriptor)


def _close_descriptors() -> None:
    numbers = {number for each in list(_descriptors) if (number := each.fileno()) >= 0}
    _descriptors.clear()
    if not numbers:
        return
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        for number in numbers:
            os.close(number)
        return
    for number in numbers:
        # The number stays taken: objects that the child collects later close it once more.
        os.dup2(null, number, inheritable=False)
    os.close(null)


def _say_goodbye() -> None:
    for holder in list(_holders):
        holder.end_with_process()


def _leave_to_parent() -> None:
    for holder in list(_holders):
        holder.after_fork_in_child()
    _holders.clear()


def _end() -> None:
    global _ending
    _ending = True
    with contextlib.ExitStack() as calls:  # which makes the last one first
        for _, call in sorted(_at_exit, key=lambda each: each[0], reverse=True):
            calls.callback(call)


def _start_anew() -> None:
    with contextlib.ExitStack() as calls:
        for call in reversed(_after_fork):
            calls.callback(call)


at_exit(Stage.GOODBYES, _say_goodbye)
after_fork(_close_descriptors)
after_fork(_leave_to_parent)
atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
