"""Lets `asyncio.create_task` and `asyncio.TaskGroup` accept works, in the event loops in which worlds are open.

`asyncio.create_task` accepts an object for which `asyncio.iscoroutine` returns True, and `asyncio.wait` refuses such
objects. No object suits both, in any version from 3.11 to 3.14. A `Work` therefore has the methods of a future that
`asyncio.wait` calls, and a task factory of the loop, which asyncio and uvloop call before the check, wraps it in a
coroutine. `World` installs and removes the factory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from asyncdist.base import lifecycle
from asyncdist.base.callables import AnyFunction
from asyncdist.groups.dropped_works import TrackedWork
from asyncdist.kernel.engine.work import Work

_lock = threading.Lock()
lifecycle.renew_in_children(globals(), "_lock", threading.Lock)


class WorkTaskFactory:
    """A task factory that makes tasks of works, and leaves everything else to the loop's former factory.

    Args:
        previous: The loop's former task factory; None for the default one.
    """

    def __init__(self, previous: AnyFunction | None) -> None:
        self.previous = previous
        self.num_worlds = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        """Return a task of a coroutine or of a work; asyncio and uvloop call this in ``loop.create_task``."""
        if isinstance(coroutine, Work):
            if isinstance(coroutine, TrackedWork):
                # A task that is cancelled before its first step does not await the work.
                coroutine.mark_used()
            coroutine = _value_of(coroutine)
        if self.previous is None:
            return asyncio.Task(coroutine, loop=loop, **options)
        return self.previous(loop, coroutine, **options)


async def _value_of(work: Work) -> Any:
    return await work


def install(loop: asyncio.AbstractEventLoop) -> WorkTaskFactory:
    """Let the tasks of ``loop`` be made of works too. `remove` takes the returned factory."""
    with _lock:
        factory = loop.get_task_factory()
        if not isinstance(factory, WorkTaskFactory):
            factory = WorkTaskFactory(factory)
            loop.set_task_factory(factory)
        factory.num_worlds += 1
    return factory


def remove(loop: asyncio.AbstractEventLoop, factory: WorkTaskFactory) -> None:
    """Give the loop its former task factory when the last world is closed, unless the program has set another one."""
    with _lock:
        factory.num_worlds -= 1
        if factory.num_worlds == 0 and loop.get_task_factory() is factory:
            # A loop that another thread has closed needs no factory.
            with contextlib.suppress(RuntimeError):
                loop.set_task_factory(factory.previous)
