"""Whoever holds connections learns of the two things that may happen to its process: it ends, or it is forked.

At the end of the process peers are to hear goodbye. In a forked child the connections are still the parent's: not a byte
may be written to them, nor may they be shut down.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from asyncdist import errands, runtime  # imported first, and so ended last: goodbyes may need the loop, and end a wait


class Holder(Protocol):
    """One who holds connections."""

    def end_with_process(self) -> None:
        """Say goodbye for a program that ends without closing us. Must not wait."""

    def leave_to_parent(self) -> None:
        """Touch the connections no more: this is a forked child. No other thread runs, and locks may be held for ever."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def watch(holder: Holder) -> None:
    """Have a holder told until `unwatch`, or until it is collected."""
    _holders.add(holder)


def unwatch(holder: Holder) -> None:
    """Tell it no more: it has closed."""
    _holders.discard(holder)


def _at_exit() -> None:
    runtime.process_ends()
    for holder in list(_holders):
        holder.end_with_process()


def _in_child() -> None:
    for holder in list(_holders):
        holder.leave_to_parent()
    _holders.clear()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

__all__ = ["Holder", "errands", "runtime", "unwatch", "watch"]
