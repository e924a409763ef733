"""A back end of torch.distributed that does nothing, to measure torch's own part of a call. Used by `contenders`."""

from __future__ import annotations

from typing import Any

from asyncdist.torch_backend import registration
from asyncdist.torch_backend.process_group import ProcessGroup
from asyncdist.torch_backend.torch_work import DONE, Work

NAME = "asyncdist_idle"


class NullWorkBackend(ProcessGroup):
    """A process group whose collectives complete at once and leave every tensor unchanged."""


def _nothing(group: NullWorkBackend, *args: Any, **opts: Any) -> Work:
    return DONE


# The methods that torch.distributed calls for the measured collectives.
for _name in ("allreduce", "broadcast", "barrier", "all_gather_single", "reduce_scatter_single", "all_to_all_single"):
    setattr(NullWorkBackend, _name, _nothing)


def register_null_backend() -> None:
    """Register `NAME` as a back end of torch.distributed. Idempotent."""
    registration.add_backend(NAME, _make, ["cpu"])


def _make(opts: Any, pg_options: object = None) -> Any:
    made = registration.make_backend(opts)
    made.__class__ = NullWorkBackend
    return made
