"""The memory of another process of this host, which the system lets this process read and write."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any

from asyncdist.net.process_identity import has_ended, is_visible


class OutOfReachError(Exception):
    """The memory of the process cannot be reached, or not any more."""


class ProcessMemory:
    """The memory of a process, by an open file of Linux, which stands for no later process of the same number.

    The system allows it to processes that may trace the other one: of the same user, unless Yama or a container forbids it.

    Raises:
        OutOfReachError: The process cannot be seen or traced, or has ended.
    """

    def __init__(self, identity: Mapping[str, Any] | None, own: Mapping[str, Any] | None) -> None:
        if not is_visible(identity, own):
            raise OutOfReachError
        assert identity is not None
        try:
            self._file = os.open(f"/proc/{identity['pid']}/mem", os.O_RDWR | os.O_CLOEXEC)
        except OSError as cause:
            raise OutOfReachError from cause
        weakref.finalize(self, os.close, self._file).atexit = False
        # The file may be that of a later process with the same number.
        if has_ended(identity, own):
            raise OutOfReachError

    def copy(self, address: int, view: memoryview, writes: bool) -> None:
        """Copy between memory of the process and a view. Raises OutOfReachError; part may have been copied then."""
        done = 0
        while done < view.nbytes:
            try:
                part = [view[done:]]
                count = (
                    os.pwritev(self._file, part, address + done)
                    if writes
                    else os.preadv(self._file, part, address + done)
                )
            except OSError as cause:
                raise OutOfReachError from cause
            if not count:
                raise OutOfReachError
            done += count
