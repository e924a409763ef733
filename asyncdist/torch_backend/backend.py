"""`Backend`: a `Group` as a back end of torch's own process groups, which torch 2.14 and later can have in Python.

`process_group` registers one in every `ProcessGroup`, for the callers of torch that are written in C++.
`registration` returns one alone for a part of a process group, such as the CPU in ``"cpu:asyncdist,cuda:nccl"``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout
from asyncdist.errors import UnsupportedError
from asyncdist.groups import Group, NonMember, World, open_world
from asyncdist.kernel import c10d_private, excluded_from_compile
from asyncdist.torch_backend.call_forms import Start
from asyncdist.torch_backend.torch_group import NAME, NoGroupYet, TorchGroup
from asyncdist.torch_backend.torch_work import Work


@excluded_from_compile
class Backend(TorchGroup, c10d_private.Backend):  # type: ignore[misc]
    """A `Group` as a back end. C++ code gets a handle of each operation that can be waited on, and has a future.

    It closes ``world``; None if another back end does.

    Attributes:
        started: The `Work` of the last operation that the current thread has started here, as ``started.work``.
    """

    supports_splitting = True

    def __init__(self, group: Group | NoGroupYet, world: World | None) -> None:
        super().__init__(group.rank(), group.size())
        self._serve(group, world)
        self.started = threading.local()

    @property
    def options(self) -> Any:
        """The options that torch passes to `split` and `merge`, with the name and the timeout of the new group."""
        return c10d_private.Backend.Options(NAME, timeout=timedelta(seconds=self.group.timeout))

    def _run(self, opts: Any, call: Sequence[Any]) -> Work:
        self.started.work = work = super()._run(opts, call)
        return work

    def _background(self, start: Start, outputs: list[torch.Tensor], limit: Timeout, *args: Any, **extra: Any) -> Work:
        self.started.work = work = super()._background(start, outputs, limit, *args, **extra)
        return work

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        super().monitored_barrier(opts.timeout, wait_all_ranks)

    # C++ code registers hooks under these names.
    registerAbortHook = TorchGroup.register_abort_hook  # noqa: N815
    unregisterAbortHook = TorchGroup.unregister_abort_hook  # noqa: N815

    def split(self, store: object, ranks: Sequence[int], opts: Any) -> Backend:
        """Make the group of some ranks of this one, without communication.

        Raises:
            UnsupportedError: This rank is not among them. torch 2.15 crashes when a back end in Python returns None.
        """
        part = self.group.new_group(ranks, opts._timeout, sort_ranks=False)
        if isinstance(part, NonMember):
            raise UnsupportedError(
                f"split_group on rank {self.group.rank()}: no list in split_ranks contains this rank. In a process group "
                "with several back ends, give every rank a list, or call new_group"
            )
        return Backend(part, None)

    def _like(self, group: Group, world: World | None) -> Backend:
        return Backend(group, world)

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> Backend:
        """Meet the ranks of other worlds in ``store``, and make a world of all of them."""
        world = open_through(store, rank, size, opts._timeout)
        return Backend(world.group, world)


def open_through(store: Any, rank: int, world_size: int, timeout: Timeout) -> World:
    """Join the ranks that call this with the same store, and return their world."""
    return background_loop().run(open_world(store=store, rank=rank, world_size=world_size, timeout=timeout))
