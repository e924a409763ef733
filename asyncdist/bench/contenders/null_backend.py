"""A back end of torch.distributed that does nothing: what its calls take is torch's own share of every call."""

from __future__ import annotations

from typing import Any

from asyncdist.torch_backend import registration
from asyncdist.torch_backend.process_group import ProcessGroup
from asyncdist.torch_backend.torch_work import DONE, Work

NAME = "asyncdist_idle"


class NullWorkBackend(ProcessGroup):
    """A group as torch sees it, whose collectives are over at once and leave every tensor as it is."""


def _nothing(group: NullWorkBackend, *args: Any, **opts: Any) -> Work:
    return DONE


# The names by which torch, old and new, calls what is measured.
for _name in (
    "allreduce", "broadcast", "barrier", "all_gather_single", "_allgather_base", "reduce_scatter_single",
    "_reduce_scatter_base", "all_to_all_single", "alltoall_base",
):  # fmt: skip
    setattr(NullWorkBackend, _name, _nothing)


def register_null_backend() -> None:
    """Make `NAME` a back end of torch.distributed. Idempotent."""
    registration.add_backend(NAME, _make, ["cpu"])


def _make(opts: Any, pg_options: object = None) -> NullWorkBackend:
    return NullWorkBackend(registration.make_backend(opts).group, None)
