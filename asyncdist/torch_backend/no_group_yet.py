"""The stand-in for the group of a process group that torch has made with ``enable_reconfigure=True``."""

from __future__ import annotations

from typing import Any

from asyncdist.base.deadline import Timeout, seconds
from asyncdist.errors import NotInitializedError
from asyncdist.kernel import Hook


class NoGroupYet:
    """Takes the place of the group before the first call of `TorchGroup.reconfigure`. Its operations raise.

    Rank and size are those that torch was given; ``timeout`` is that of the group to come, in seconds.
    """

    error = None
    _aborted = shares_memory = False

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._rank, self._size = rank, size
        self.timeout = timeout

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def set_timeout(self, timeout: Timeout) -> None:
        self.timeout = seconds(timeout)

    def register_hook(self, **functions: Any) -> Hook:
        hook = Hook(None, None, None, None)
        hook.remove()
        return hook

    def abort(self, reason: str) -> None:
        """Do nothing: no operation is pending."""

    def close(self) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotInitializedError(
            "the process group was made with enable_reconfigure=True and has no members yet: exchange the handles of "
            "torch.distributed._get_reconfigure_handle(), then call torch.distributed._reconfigure() on every member"
        )
