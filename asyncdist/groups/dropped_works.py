"""Reports works that a program dropped without waiting: it may read its tensors before the operation has written them.

A world that was opened in asyncio's debug mode, or with ``ASYNCDIST_DEBUG=1``, has groups of the class `DebugGroup`, whose
works are of a class that records their use. Other worlds have neither, and pay nothing for this.
"""

# The base classes document the overridden methods.
# ruff: noqa: D102

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any, Unpack

from asyncdist.base.call_site import call_site
from asyncdist.base.callables import AnyFunction
from asyncdist.groups.group import Group
from asyncdist.kernel.collectives.call_plan import CallPlan, Prepare, Result
from asyncdist.kernel.collectives.collective_ops import CallOptions
from asyncdist.kernel.engine.operation import PlanOf
from asyncdist.kernel.engine.work import Work
from asyncdist.kernel.memory.torch_compile import excluded_from_compile


def _use(name: str, *, if_true: bool = False) -> AnyFunction:
    """Return the method of `Work` of a name that also records the use; with ``if_true`` only where it returns True."""

    @functools.wraps(getattr(Work, name))
    def method(self: TrackedWork, *args: Any, **options: Any) -> Any:
        self._used = self._used or not if_true
        outcome = getattr(super(TrackedWork, self), name)(*args, **options)
        self._used = self._used or outcome
        return outcome

    return method


@excluded_from_compile
class TrackedWork(Work):
    """A work that warns when it is deleted and the program has neither waited for it nor looked at its outcome."""

    _used = False
    _call: tuple[str, int, str] = ("", 0, "")
    """The file and the line of the call, and the operation with its group and rank."""

    def mark_used(self) -> None:
        """Record that the program waits for the work, or knows that it is complete."""
        self._used = True

    __await__, wait, synchronize = _use("__await__"), _use("wait"), _use("synchronize")
    result, exception, get_future = _use("result"), _use("exception"), _use("get_future")
    add_done_callback = _use("add_done_callback")
    is_completed, is_success = _use("is_completed", if_true=True), _use("is_success", if_true=True)

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            file_name, line, operation = self._call
            message = (
                f"the Work of {operation} was dropped, and nothing waited for it, so the program may use its tensors "
                "before the operation has read or written them: await the call, or keep its Work and wait for that"
            )
            warnings.warn_explicit(message, RuntimeWarning, file_name, line)


@functools.cache
def _tracked_class(kind: Any) -> Any:
    """Return a class that derives from `TrackedWork` and from ``kind``, such as a device's work."""
    return TrackedWork if kind is Work else type(f"Tracked{kind.__name__}", (TrackedWork, kind), {})


@excluded_from_compile
class DebugGroup(Group):
    """A group that reports dropped works of calls that return before the operation is complete."""

    def _tracked(self, work: Work, name: str, options: CallOptions) -> Work:
        if options.get("background", True) and not isinstance(work, TrackedWork):
            kind: Any = type(work)
            work.__class__ = _tracked_class(kind)
            assert isinstance(work, TrackedWork)
            work._call = (*call_site(), f"{name} on group {self.name!r}, rank {self.endpoint.rank},")
        return work

    def _call(
        self,
        name: str,
        prepare: Prepare,
        tensors: tuple[Any, ...],
        options: CallOptions,
        arguments: tuple[Any, ...] = (),
        *,
        writes: bool = True,
    ) -> Work:
        work = super()._call(name, prepare, tensors, options, arguments, writes=writes)
        return self._tracked(work, name, options)

    def _run(
        self, name: str, plan: CallPlan, tensors: Sequence[Any], result: Result, options: CallOptions, work: bool = True
    ) -> Work:
        # A persistent collective comes here without `_call`. Each of its calls has a work of its own.
        return self._tracked(super()._run(name, plan, tensors, result, options), name, options)

    def _run_plan(
        self, name: str, make: PlanOf, arguments: tuple[Any, ...], options: CallOptions, tag: int | None = None
    ) -> Work:
        return self._tracked(super()._run_plan(name, make, arguments, options, tag), name, options)

    def send(self, tensor: Any, dst: int, tag: int = 0, **options: Unpack[CallOptions]) -> Work[None]:
        # A device's part of the group may have started the message.
        return self._tracked(super().send(tensor, dst, tag, **options), "send", options)

    def recv(self, tensor: Any, src: int | None = None, tag: int = 0, **options: Unpack[CallOptions]) -> Work[int]:
        return self._tracked(super().recv(tensor, src, tag, **options), "recv", options)
