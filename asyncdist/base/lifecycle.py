"""Calls at the exit and after the fork of a process, in a defined order.

Every module that owns connections, threads or servers registers here. At exit the process notifies its peers. After a
fork the connections belong to the parent: the child neither writes to them nor shuts them down. It closes its copies of
their descriptors, because a peer sees the end of a connection, and a port or a lock becomes free, only when the last copy
is closed. `WeakRegistry` lists the living objects of one kind, and
`ProcessBound` keeps what belongs to a process from being copied and pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util  # noqa: F401 - its exit handler, which joins children, must run after this module's
import os
import weakref
from enum import IntEnum, auto
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from asyncdist.base.callables import Callback
from asyncdist.errors import UsageError

T = TypeVar("T")


class WeakRegistry(Generic[T]):
    """References to objects that do not keep them alive.

    Any thread may call any method at any time. A `weakref.WeakSet` raises RuntimeError if one thread adds an object while
    another iterates, also in ``list(set)``.
    """

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, item: T) -> None:
        self._objects[id(item)] = item

    def discard(self, item: T) -> None:
        self._objects.pop(id(item), None)

    def clear(self) -> None:
        self._objects.clear()

    def living(self) -> list[T]:
        """Return the objects that have not been collected, in the order in which they were added."""
        return [item for reference in self._objects.valuerefs() if (item := reference()) is not None]


class Stage(IntEnum):
    """The steps of a process's exit, in this order, independent of the order of imports.

    Handlers that the program registered with `atexit` after it imported this library run before all steps.
    """

    COMMUNICATORS = auto()
    """Device communicators are aborted, because a peer's notice does not end a call inside one."""
    SERVERS = auto()
    """Stores that this process serves are closed, which needs the background loop."""
    PEERS = auto()
    """Peers are notified, which may need the background loop, and operations that wait for peers fail."""
    THREADS = auto()
    """Blocking calls in daemon threads get a limited time to return; none of them waits for a peer any more."""
    LOOP = auto()
    """The background loop ends."""


class ProcessHooks(Protocol):
    def end_with_process(self) -> None:
        """Notify the peers, because the process ends without closing this object. Must not wait."""

    def after_fork_in_child(self) -> None:
        """Stop using the connections, in a forked child. No other thread runs in it, and a held lock stays held."""


class Descriptor(Protocol):
    """A socket, or any other object with a file descriptor."""

    def fileno(self) -> int:
        """Return the descriptor, or -1 once it is closed."""


class ProcessBound:
    """The base of objects that stand for something of this process alone: a connection, an operation, a membership.

    A copy of such an object is the object itself, also inside a copied model or configuration. A pickle contains none:
    another process could not use it.
    """

    __slots__ = ()
    _elsewhere = ""
    """What another process does instead of unpickling it, for the error."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(f"{self!r} cannot be pickled, because it belongs to this process: {self._elsewhere}")


_at_exit: list[tuple[Stage, Callback]] = []
_after_fork: list[Callback] = []
_locks: list[tuple[dict[str, Any], str, Callback]] = []
_hooked: WeakRegistry[ProcessHooks] = WeakRegistry()
_descriptors: WeakRegistry[Descriptor] = WeakRegistry()
_ending = False


def at_exit(stage: Stage, call: Callback) -> None:
    """Register a call for the exit of the process, made even if others raise. Calls of one stage run in reverse order."""
    _at_exit.append((stage, call))


def after_fork(call: Callback) -> None:
    """Register a call for every forked child, made after the calls registered before, even if these raise."""
    _after_fork.append(call)


def renew_in_children(namespace: dict[str, Any], name: str, make: Callback) -> None:
    """Give every forked child a new lock, before all other calls: another thread may hold the parent's during the fork.

    The lock is ``name`` in the ``globals()`` of its module; ``make`` is `threading.Lock` or `threading.RLock`.
    """
    _locks.append((namespace, name, make))


def ending() -> bool:
    return _ending


def register_hooks(hooked: ProcessHooks) -> None:
    """Call an object's hooks at exit and after a fork, until `unregister_hooks` or until it is collected."""
    _hooked.add(hooked)


def unregister_hooks(hooked: ProcessHooks) -> None:
    """Stop calling an object's hooks: it has closed."""
    _hooked.discard(hooked)


def close_in_children(descriptor: Descriptor) -> None:
    """Close a descriptor in every forked child, without a shutdown of the connection.

    The child calls the object's ``fileno``, until the object is collected or returns -1.
    """
    _descriptors.add(descriptor)


def _renew_locks() -> None:
    for namespace, name, make in _locks:
        namespace[name] = make()


def _close_descriptors() -> None:
    numbers = {number for each in _descriptors.living() if (number := each.fileno()) >= 0}
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
        # Keep the number in use: objects that the child collects later close it a second time.
        os.dup2(null, number, inheritable=False)
    os.close(null)


def _end_with_process() -> None:
    for hooked in _hooked.living():
        hooked.end_with_process()


def _after_fork_in_child() -> None:
    for hooked in _hooked.living():
        hooked.after_fork_in_child()
    _hooked.clear()


def _run_at_exit() -> None:
    global _ending
    _ending = True
    # An ExitStack makes the last call first, and continues after a call that raises.
    with contextlib.ExitStack() as calls:
        for _, call in sorted(_at_exit, key=lambda each: each[0], reverse=True):
            calls.callback(_call_until_interrupted, call)


def _call_until_interrupted(call: Callback) -> None:
    # On Ctrl-C the terminal and torchrun both send SIGINT. The second one arrives during the exit, and ends this call only.
    with contextlib.suppress(KeyboardInterrupt):
        call()


def _run_after_fork() -> None:
    with contextlib.ExitStack() as calls:
        for call in reversed(_after_fork):
            calls.callback(call)


at_exit(Stage.PEERS, _end_with_process)
after_fork(_renew_locks)
after_fork(_close_descriptors)
after_fork(_after_fork_in_child)
atexit.register(_run_at_exit)
os.register_at_fork(after_in_child=_run_after_fork)
