"""`torch.distributed.ProcessGroup` as a thin wrapper of `Group`.

torch calls one method per operation, with an options object and with ranks of the group. Each method here passes the
operation of `Group`, its output tensors and its arguments to `ProcessGroup._run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as torch_distributed

from asyncdist.base.background_loop import background_loop
from asyncdist.base.deadline import Timeout
from asyncdist.devices.work import DeviceWork
from asyncdist.engine import work as started
from asyncdist.errors import GroupError, OperationTimeoutError, SharedMemoryError, UnsupportedError
from asyncdist.groups.default_world import SAME_RANKS
from asyncdist.groups.group import Group
from asyncdist.groups.world import World
from asyncdist.memory.torch_compile import excluded_from_compile
from asyncdist.torch_backend import gloo_words
from asyncdist.torch_backend.memory_pool import MemoryPool
from asyncdist.torch_backend.reduce_ops import reduction_of
from asyncdist.torch_backend.torch_work import DONE, Work

NAME = "asyncdist"

T = TypeVar("T")
Tensors = list[torch.Tensor]

_NO_TIME = timedelta(0)
"""torch passes a negative timeout where the group's own timeout applies."""
_UNSET: Any = SimpleNamespace(
    asyncOp=True,
    timeout=timedelta(milliseconds=-1),
    reduceOp=torch_distributed.ReduceOp(torch_distributed.ReduceOp.SUM),
)


@excluded_from_compile
class ProcessGroup(torch_distributed.ProcessGroup):
    """A `Group` as a process group of torch, made by ``init_process_group("asyncdist")`` and ``new_group``.

    Ranks in arguments are ranks in the group.

    Args:
        group: The group; also an attribute, for features that torch has no name for.
        world: The world to close with this group; None if another group closes it.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False

    def __init__(self, group: Group, world: World | None) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # the form with a store raises
        self.group = group
        self._world = world
        self._coalesced: list[started.Work] | None = None
        self._torch_name = self._torch_description = ""
        self._pool = MemoryPool()

    # -- starting operations -------------------------------------------------------------------

    def _run(self, start: Callable[..., started.Work], outputs: Tensors, opts: Any, *args: Any) -> Work:
        """Start an operation according to torch's options; a synchronous operation is complete on return."""
        timeout = opts.timeout
        limit = None if timeout < _NO_TIME else timeout
        if self._coalesced is not None:
            return self._background(start, outputs, limit, *args)
        if opts.asyncOp:
            return Work(start(*args, timeout=limit), outputs)
        work = start(*args, background=False, timeout=limit)
        if not work.is_success():
            try:
                work.result()
            except OperationTimeoutError as error:
                gloo_words.add_timeout(error)
                raise
        return DONE

    def _background(
        self, start: Callable[..., started.Work], outputs: Tensors, limit: Timeout, *args: Any, **extra: Any
    ) -> Work:
        work = start(*args, timeout=limit)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return Work(work, outputs, **extra)

    # -- reductions ----------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = _UNSET) -> Work:
        outputs = _listed(tensors)
        return self._run(self.group.all_reduce, outputs, opts, _single(outputs), reduction_of(opts.reduceOp))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _UNSET) -> Work:
        op = reduction_of(opts.reduceOp)
        if len({tensor.dtype for tensor in tensors}) == 1:
            return self._run(self.group.all_reduce_coalesced, tensors, opts, tensors, op)
        return self._run(_together(self.group.all_reduce, [(tensor, op) for tensor in tensors]), tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = _UNSET) -> Work:
        op = reduction_of(opts.reduceOp)
        return self._run(self.group.reduce, tensors, opts, _single(tensors), opts.rootRank, op)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = _UNSET) -> Work:
        op = reduction_of(opts.reduceOp)
        return self._run(self.group.reduce_scatter, outputs, opts, _single(outputs), _single(inputs), op)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = _UNSET) -> Work:
        op = reduction_of(opts.reduceOp)
        return self._run(self.group.reduce_scatter_single, [output], opts, output, input, op)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _UNSET) -> Work:
        op = reduction_of(opts.reduceOp)
        calls = [(output, tensor, op) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._run(_together(self.group.reduce_scatter_single, calls), outputs, opts)

    # -- data movement -------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = _UNSET) -> Work:
        return self._run(self.group.broadcast, tensors, opts, _single(tensors), opts.rootRank)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = _UNSET) -> Work:
        return self._run(self.group.all_gather, _single(outputs), opts, _single(outputs), _single(inputs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = _UNSET) -> Work:
        return self._run(self.group.all_gather_single, [output], opts, output, input)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = _UNSET) -> Work:
        calls = list(zip(outputs, inputs, strict=True))
        return self._run(_together(self.group.all_gather_single, calls), outputs, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = _UNSET) -> Work:
        return self._run(self.group.all_gather_coalesced, [t for row in outputs for t in row], opts, outputs, inputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = _UNSET) -> Work:
        into = outputs[0] if outputs else None
        return self._run(self.group.gather, into or [], opts, _single(inputs), into, opts.rootRank)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = _UNSET) -> Work:
        return self._run(self.group.gather_single, [output], opts, input, output, opts.rootRank)

    # torch 2.15 has both names.
    gather_into_tensor = gather_single

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = _UNSET) -> Work:
        source = inputs[0] if inputs else None
        return self._run(self.group.scatter, outputs, opts, _single(outputs), source, opts.rootRank)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _UNSET) -> Work:
        return self._run(self.group.all_to_all, outputs, opts, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = _UNSET,
    ) -> Work:
        splits = output_split_sizes, input_split_sizes
        return self._run(self.group.all_to_all_single, [output], opts, output, input, *splits)

    def barrier(self, opts: Any = _UNSET) -> Work:
        devices = getattr(opts, "device_ids", None) if torch.cuda.is_available() else None
        return self._run(self._barrier_on(devices[0]) if devices else self.group.barrier, [], opts)

    def _barrier_on(self, index: int) -> Callable[..., started.Work]:
        """Return a barrier that a rank enters when its CUDA device has completed the current stream's work."""
        on = self.group.on(torch.device("cuda", index))

        def barrier(background: bool = True, timeout: Timeout = None) -> started.Work:
            work = on.barrier(background=background, timeout=timeout)
            if not background:
                cast(DeviceWork, work).synchronize()
            return work

        return barrier

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; after ``timeout``, rank 0's error names every missing rank.

        ``wait_all_ranks`` concerns gloo's words within the message: they name every missing rank instead of the first.
        """
        try:
            self.group.monitored_barrier(timeout=timeout, background=False).result()
        except GroupError as error:
            gloo_words.add_monitored_barrier(error, self.group.ranks, self.group.rank(), wait_all_ranks)
            raise

    # -- point-to-point ------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return self._background(self.group.send, [], None, _single(tensors), dst, tag)

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> Work:
        start = self.group.recv
        return self._background(start, tensors, None, _single(tensors), src, tag, source=self.group.group_rank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self.recv(tensors, None, tag)

    # -- coalescing ----------------------------------------------------------------------------

    def _start_coalescing(self, device: object = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: object = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return Work(started.joined(works), [])

    # -- properties that torch reads -----------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        types = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [torch.device(each) for each in types]

    def _get_backend(self, device: object) -> ProcessGroup:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` returns memory that all ranks share."""
        return device.type == "cpu" and self.group.shares_memory

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of shape ``(size,)``, in registered memory unless that is full."""
        if size and self.supports_tensor_alloc(device):
            with contextlib.suppress(SharedMemoryError):
                return self._pool.lend(size * dtype.itemsize).view(dtype)
        return torch.empty(size, dtype=dtype, device=device)

    def get_reconfigure_handle(self) -> str:
        """Raise UnsupportedError: torch does not refuse ``enable_reconfigure=True`` before it calls this method."""
        raise UnsupportedError(SAME_RANKS)

    def reconfigure(self, opts: object) -> Work:
        """Raise UnsupportedError, as `get_reconfigure_handle` does."""
        raise UnsupportedError(SAME_RANKS)

    def new_window(self, tensor: torch.Tensor | None = None) -> object:
        """Raise UnsupportedError."""
        raise UnsupportedError(
            "the back end asyncdist has no windows for one-sided access: use send and recv, or collectives"
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return NAME

    name = _get_backend_name = getBackendName

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self.group.rank()

    def getSize(self) -> int:  # noqa: N802 - torch's name
        return self.group.size()

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._torch_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._torch_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        self._torch_description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._torch_description

    def _set_default_timeout(self, timeout: Timeout) -> None:
        self.group.set_timeout(timeout)

    set_timeout = _set_default_timeout

    # -- closing -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Destroy the group, and its world if this group owns one. Idempotent; groups may close in any order."""
        self.group.close()
        world, self._world = self._world, None
        if world is not None:
            world.leave()
            background_loop().run(world.close())

    def abort(self) -> None:
        """Fail every pending operation of this group on every rank, and leave the world with its last group.

        torch never calls `shutdown` on a group that it has aborted.
        """
        self.group.abort("torch.distributed aborted the process group")
        if self._world is not None and all(group.aborted for group in self._world.groups):
            self._world.leave()
            background_loop().submit(self._world.close())

    def __repr__(self) -> str:
        return f"<asyncdist {self.group!r}>"


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    # DDP's join passes a single tensor.
    return tensors if isinstance(tensors, list) else [tensors]


def _single(items: Sequence[T]) -> T:
    """Return the only item; otherwise the list itself, which the operation refuses with its own error."""
    return items[0] if len(items) == 1 else cast(T, items)


def _together(start: Callable[..., started.Work], calls: Sequence[tuple[Any, ...]]) -> Callable[..., started.Work]:
    """Return a function that starts several operations and returns one Work for all of them."""

    def start_all(background: bool = True, timeout: Timeout = None) -> started.Work:
        return started.joined([start(*call, background=background, timeout=timeout) for call in calls])

    return start_all
