"""The end of a process group in releases of torch (2.6) that end NCCL's groups only, and forget the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d

from asyncdist.torch_backend.process_group import ProcessGroup

c10d: Any = distributed_c10d
_OURS: dict[str, Callable[[ProcessGroup], None]] = {
    "_shutdown_backend": ProcessGroup.shutdown,
    "_abort_backend": ProcessGroup.abort,
}


def register() -> None:
    """Have torch's functions that end a group end ours too. Idempotent; later releases call the group itself."""
    for name, end in _OURS.items():
        theirs = getattr(c10d, name, None)
        if theirs is not None and theirs.__module__ != __name__:
            setattr(c10d, name, _ending(end, theirs))


def _ending(ours: Callable[[ProcessGroup], None], theirs: Callable[[Any], None]) -> Callable[[Any], None]:
    def end(group: Any) -> None:
        if isinstance(group, ProcessGroup):
            ours(group)
        else:
            theirs(group)

    return end
