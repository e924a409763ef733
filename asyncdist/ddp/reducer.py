"""Average gradients during backward: hooks of autograd fill buckets, and each full bucket is all-reduced.

Called by `module`. In one backward autograd calls:

    the output's gradient is known   begin()      forget the last step; register `_finish` with autograd
    a parameter's gradient is ready  _ready()     put it into its bucket; start the all-reduces of full buckets
    backward ends                    _finish()    start the remaining all-reduces, wait for all of them

The all-reduces start in the order of the buckets, whatever the order of the gradients, so that all ranks start the same
ones. After the first backward, parameters are assigned to buckets in the order in which rank 0's gradients arrived.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

import torch

from asyncdist.base.cores import has_free_cores
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.ddp import buckets
from asyncdist.ddp.uneven_inputs import Joining
from asyncdist.engine.work import Work
from asyncdist.errors import GradientError, SharedMemoryError, UnsupportedError
from asyncdist.groups.group import Group
from asyncdist.memory.registered import empty

_COPIED_NBYTES = 256 << 20
_LINE_NBYTES = 64
"""Alignment of gradients: a matrix product that is written across cache lines takes half as long again."""


@dataclass(slots=True)
class BucketTimes:
    """Times of one bucket in a step, on the clock of `time.perf_counter` (seconds).

    Attributes:
        index: Place of the bucket in the order of the all-reduces.
        nbytes: Bytes of its gradients.
        ready: When its last gradient arrived.
        started: When its all-reduce started.
        finished: When its all-reduce was complete.
    """

    index: int
    nbytes: int
    ready: float = 0.0
    started: float = 0.0
    finished: float = 0.0

    def stop(self, _: object) -> None:
        """Record the end of the all-reduce."""
        self.finished = perf_counter()


@dataclass(slots=True)
class StepTimes:
    """Times of one backward with communication, on the clock of `time.perf_counter` (seconds).

    Attributes:
        backward_started: When autograd computed the gradient of the module's output.
        backward_finished: When autograd had computed all gradients.
        finished: When all all-reduces were complete and ``backward()`` returned.
        buckets: Times of each bucket, in the order of the all-reduces.
    """

    backward_started: float
    backward_finished: float = 0.0
    finished: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)


class Bucket:
    """Gradients of one dtype and device that are averaged together, as views of one flat tensor."""

    def __init__(self, index: int, members: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        self.index = index
        self.members = members
        self.pending = len(members)
        self.flat: torch.Tensor | None = None
        self.views: dict[int, torch.Tensor] = {}
        self.nbytes = sum(parameters[member].nbytes for member in members)
        room = [-(-parameters[member].nbytes // _LINE_NBYTES) * _LINE_NBYTES for member in members]
        ends = [end // parameters[members[0]].itemsize for end in accumulate(room)]
        self._offsets, self._count = [0, *ends[:-1]], ends[-1]  # in elements

    def allocate(self, parameters: Sequence[torch.Tensor], *, shared: bool) -> None:
        """Allocate the memory; called late, so that buckets of an earlier layout are freed first.

        With ``shared``, memory on the CPU is registered unless registered memory is full.
        """
        like = parameters[self.members[0]]
        if shared and like.is_cpu:
            with contextlib.suppress(SharedMemoryError):
                self.flat = empty(self._count, dtype=like.dtype).zero_()
        if self.flat is None:
            self.flat = self.zeros(parameters)
        for member, offset in zip(self.members, self._offsets, strict=True):
            self.views[member] = _view(self.flat, offset, parameters[member])

    def zeros(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return as many zeros as the bucket has elements, in memory of their own."""
        like = parameters[self.members[0]]
        return torch.zeros(self._count, dtype=like.dtype, device=like.device)


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of ``flat`` that holds a gradient, with the strides of its parameter if these leave no gaps."""
    part = flat[offset : offset + parameter.numel()]
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    if dense == parameter.stride() and not parameter.is_contiguous():
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


class Reducer:
    """Averages the gradients of parameters over ``group`` in each backward after `begin` or while it is `armed`.

    A forward arms it for the next backward, as in torch, because a forward may return objects in which no tensor is found.
    """

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        limits: Sequence[int],
        *,
        gradient_as_bucket_view: bool,
    ) -> None:
        self.armed = False
        self.joining: Joining | None = None
        self.last_step: StepTimes | None = None
        self._group = group
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._limits = limits
        self._as_view = gradient_as_bucket_view
        self._overlaps = not group.shares_memory or has_free_cores(group.size(), torch.get_num_threads())
        # A model on several devices has one backward thread per device.
        self._lock = threading.Lock()
        self._step: StepTimes | None = None
        # Returns None if no backward is running, or if it has raised.
        self._running: Callable[[], object] = lambda: None
        # In the order in which this backward's gradients arrived.
        self._arrived: dict[int, None] = {}
        # Parameters for which `bucket_memory` has returned memory in this backward.
        self._placed: set[int] = set()
        # The all-reduces that this backward has started.
        self._works: list[Work] = []
        self._reduction: Reduction = ReduceOp.AVG
        self._copied_gradients: list[torch.Tensor] = []
        self._copied_nbytes = 0
        self._follows_arrival = False
        self._assign(buckets.definition_order(len(named)))
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))

    def _assign(self, order: Sequence[int]) -> None:
        self._order, self._kinds = order, self._kinds_now()
        layout = buckets.assign([p.nbytes for p in self._parameters], self._kinds, order, self._limits)
        self._buckets = [Bucket(index, members, self._parameters) for index, members in enumerate(layout)]
        self._bucket_of = {member: bucket for bucket in self._buckets for member in bucket.members}

    def _kinds_now(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(parameter.dtype, parameter.device) for parameter in self._parameters]

    def _follow_casts(self) -> None:
        """Assign buckets again if parameters have been cast or moved: gradients must not be converted in between."""
        if self._kinds != self._kinds_now():
            self._assign(self._order)

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters by bucket, in the order in which buckets are all-reduced."""
        return [[self._names[member] for member in bucket.members] for bucket in self._buckets]

    # -- one backward -------------------------------------------------------------------------

    def check(self) -> None:
        """Prepare for a forward; raise GradientError if the last backward ended early, so that other ranks may wait."""
        # Inside a backward: a checkpoint repeats its forward.
        if torch._C._current_graph_task_id() >= 0:
            return
        self._copied_gradients.clear()
        self._copied_nbytes = 0
        self._placed.clear()
        if self._step is not None and self._arrived:
            sent, total = len(self._works), len(self._buckets)
            raise GradientError(
                f"the last backward did not finish: it had sent {sent} of {total} buckets, and other ranks may wait "
                "for the rest; find what it raised, destroy the process group and start again from a checkpoint"
            )
        self._step = None
        self._follow_casts()

    def begin(self) -> None:
        """Start a backward. Called when autograd computes the gradient of the module's output."""
        with self._lock:
            if not (self._step and self._arrived):
                self._begin()

    def _begin(self) -> None:
        self._step = StepTimes(perf_counter(), buckets=[BucketTimes(b.index, b.nbytes) for b in self._buckets])
        self._arrived = {}
        self._works = []
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)
        # Only the running graph task keeps this object, so it is freed with the task, also if the task raises.
        # The inner backward of a re-entrant checkpoint is a task of its own.
        finish = functools.partial(self._finish)
        self._running = weakref.ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _has_begun(self) -> bool:
        """Return whether a backward has begun and has not raised before its first gradient."""
        return self._step is not None and (bool(self._arrived) or self._running() is not None)

    def _ready(self, index: int) -> None:
        with self._lock:
            if not self._has_begun():
                if not self.armed:
                    return
                self._begin()
            if index in self._arrived:
                raise GradientError(
                    "{parameters} got a second gradient in one backward, after its all-reduce had started, as happens if "
                    "several re-entrant checkpoints share a parameter: pass use_reentrant=False",
                    [self._names[index]],
                )
            self._arrived[index] = None
            self._fill(index)
            self._count(self._bucket_of[index])

    def bucket_memory(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the memory in its bucket for a parameter's gradient; None if backward must not write it there.

        Called by `direct_gradients`.
        """
        with self._lock:
            index = self._numbers.get(parameter)
            if index is None or index in self._placed or parameter.grad is not None:
                return None
            if not self.armed and not self._has_begun():
                return None
            self._placed.add(index)
            # A new tensor object: autograd copies a gradient to which there are other references.
            return self._view(index).detach()

    def _view(self, index: int) -> torch.Tensor:
        bucket = self._bucket_of[index]
        if bucket.flat is None:
            bucket.allocate(self._parameters, shared=self._group.shares_memory)
        return bucket.views[index]

    def _fill(self, index: int) -> None:
        parameter, view = self._parameters[index], self._view(index)
        gradient = parameter.grad
        if gradient is view:
            return
        if gradient is None or gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[index]!r} is not a dense tensor; build its layer with sparse=False"
            )
        if gradient.data_ptr() == view.data_ptr():
            return
        view.copy_(gradient.detach())
        if self._as_view:
            parameter.grad = view
            self._keep_until_forward(gradient)

    def _keep_until_forward(self, gradient: torch.Tensor) -> None:
        """Keep a gradient that has been copied until the next forward.

        If it were freed at once, its pages would return to the system, and new pages for the next gradient cost more than
        the copy.
        """
        if gradient.is_cpu and self._copied_nbytes + gradient.nbytes <= _COPIED_NBYTES:
            self._copied_gradients.append(gradient)
            self._copied_nbytes += gradient.nbytes

    def _count(self, bucket: Bucket) -> None:
        """Count one more gradient in ``bucket``; if it is full, start the all-reduces of full buckets, in order."""
        bucket.pending -= 1
        if bucket.pending:
            return
        assert self._step is not None
        self._step.buckets[bucket.index].ready = perf_counter()
        if self._overlaps:
            # `_finish` starts the last one: nothing is computed after it, so no background thread needs to drive it.
            while len(self._works) < len(self._buckets) - 1 and not self._buckets[len(self._works)].pending:
                self._send(background=True)

    def _send(self, *, background: bool) -> None:
        assert self._step is not None
        if not self._works:
            self._reduction = ReduceOp.AVG if self.joining is None else self.joining.reduction()
        bucket = self._buckets[len(self._works)]
        assert bucket.flat is not None
        times = self._step.buckets[bucket.index]
        times.started = perf_counter()
        work = self._group.all_reduce(bucket.flat, self._reduction, background=background)
        self._works.append(work)
        work.add_done_callback(times.stop)

    def _finish(self) -> None:
        """Wait for the averages. Autograd calls this in the thread of backward's caller, to which it raises errors."""
        step = self._step
        self._placed.clear()
        if step is None:
            return
        # torch.autograd.grad() accumulates no gradient.
        if not self._arrived:
            self._step = None
            return
        self.armed = False
        step.backward_finished = perf_counter()
        missing = [index for index in range(len(self._parameters)) if index not in self._arrived]
        for index in missing:
            self._fill_with_zeros(index)
        self._wait()
        if not self._as_view:
            self._copy_back()
        if not self._follows_arrival:
            self._assign_by_arrival()
        step.finished = perf_counter()
        self.last_step, self._step = step, None
        if missing:
            raise GradientError(
                "backward gave no gradient to {parameters} on this rank, so the ranks' averages lack it; use every "
                "parameter in every forward, or freeze it (requires_grad=False) before wrapping the model",
                [self._names[index] for index in missing],
            )

    def _wait(self) -> None:
        try:
            while len(self._works) < len(self._buckets):
                self._send(background=False)
            for work in self._works:
                work.wait()
        except BaseException:
            # They all failed for the same reason: retrieve each exception, so that none is logged, and raise one.
            for work in self._works:
                work.exception()
            raise

    def _fill_with_zeros(self, index: int) -> None:
        """Replace a missing gradient, so that no other rank waits for this one until its timeout."""
        self._view(index).zero_()
        self._count(self._bucket_of[index])

    def _copy_back(self) -> None:
        for bucket in self._buckets:
            for member, view in bucket.views.items():
                gradient = self._parameters[member].grad
                if gradient is not None:
                    gradient.detach().copy_(view)

    def stand_in(self, reduction: Reduction) -> None:
        """Contribute zeros to one backward of the other ranks; this rank's own gradients do not change."""
        self._follow_casts()
        for bucket in self._buckets:
            self._group.all_reduce(bucket.zeros(self._parameters), reduction, background=False).wait()
        if not self._follows_arrival:
            self._assign_by_arrival()

    def _assign_by_arrival(self) -> None:
        order = torch.tensor(buckets.arrival_order(self._arrived, len(self._parameters)), device="cpu")
        self._group.broadcast(order, 0, background=False).wait()
        self._assign(order.tolist())
        self._follows_arrival = True


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    # Weak, because the garbage collector does not see references inside autograd.
    def ready(_: torch.Tensor) -> None:
        target = reducer()
        if target is not None:
            target._ready(index)

    return ready
