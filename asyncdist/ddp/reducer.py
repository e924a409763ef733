"""The machine behind DistributedDataParallel: gradients fill buckets, full buckets go onto the wire, backward goes on.

One backward, as autograd drives it:

    the output's gradient is known   begin()      forget the last step; ask to be called when backward ends
    a parameter's gradient is ready  _ready()     put it into its bucket; send every full bucket whose turn it is
    backward ends                    _finish()    send the rest, wait for all; `loss.backward()` returns

Buckets are sent strictly in their order, also where gradients come in another, so that all ranks issue the same
all-reduces. After the first backward they are dealt again by the order in which gradients came to rank 0.
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
_LINE_NBYTES = 64  # where gradients begin: a product that is written across lines takes half as long again


@dataclass(slots=True)
class BucketTimes:
    """When one bucket's gradients were complete, its all-reduce started, and its all-reduce was over (perf_counter)."""

    index: int
    nbytes: int
    ready: float = 0.0
    started: float = 0.0
    finished: float = 0.0

    def stop(self, _: object) -> None:
        self.finished = perf_counter()


@dataclass(slots=True)
class StepTimes:
    """One synchronised backward, on the clock of `time.perf_counter` (seconds).

    From ``backward_started`` to ``backward_finished`` autograd computed; until ``finished`` the caller waited for the
    all-reduces that were still under way.
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
        """Make the memory; late, so that buckets of an earlier layout are gone first where nobody holds them.

        With ``shared``, what lies on the processor is registered as long as there is room: then nothing is staged.
        """
        like = parameters[self.members[0]]
        if shared and like.is_cpu:
            with contextlib.suppress(SharedMemoryError):  # slower is better than not at all
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
    """Return the part of ``flat`` that holds a gradient, laid out like its parameter where that has no holes."""
    part = flat[offset : offset + parameter.numel()]
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    if dense == parameter.stride() and not parameter.is_contiguous():
        return part.as_strided(parameter.shape, parameter.stride())
    return part.view(parameter.shape)


class Reducer:
    """Average the gradients of ``parameters`` over ``group`` in each backward that was begun, or for which it is `armed`.

    A forward arms it for the next backward, as torch's does, for it may return what has no tensors to begin at.
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
        self._lock = threading.Lock()  # models spread over devices have a backward thread for each
        self._step: StepTimes | None = None
        self._under_way: Callable[[], object] = lambda: None  # None also where a backward has raised
        self._arrived: list[int] = []  # parameters of this backward in the order in which their gradients came
        self._came = bytearray()
        self._placed: set[int] = set()  # parameters whose places have been given out in this backward
        self._works: list[Work] = []  # of the buckets sent so far
        self._reduction: Reduction = ReduceOp.AVG
        self._copied_gradients: list[torch.Tensor] = []
        self._copied_nbytes = 0
        self._dealt_by_arrival = False
        self._deal(buckets.definition_order(len(named)))
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))

    def _deal(self, order: Sequence[int]) -> None:
        self._order, self._kinds = order, self._kinds_now()
        layout = buckets.assign([p.nbytes for p in self._parameters], self._kinds, order, self._limits)
        self._buckets = [Bucket(index, members, self._parameters) for index, members in enumerate(layout)]
        self._bucket_of = {member: bucket for bucket in self._buckets for member in bucket.members}

    def _kinds_now(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(parameter.dtype, parameter.device) for parameter in self._parameters]

    def _follow(self) -> None:
        """Deal the buckets again if parameters have been cast or moved: gradients must not pass through another dtype."""
        if self._kinds != self._kinds_now():
            self._deal(self._order)

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters, bucket by bucket, in the order in which buckets are sent."""
        return [[self._names[member] for member in bucket.members] for bucket in self._buckets]

    # -- one backward -------------------------------------------------------------------------

    def check(self) -> None:
        """Make ready for a forward; GradientError if the last backward stopped half-way, and others wait for the rest."""
        if torch._C._current_graph_task_id() >= 0:  # a checkpoint runs it again, in a backward that goes on
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
        self._follow()

    def begin(self) -> None:
        """Start a backward's bookkeeping; called where autograd enters the module, or else by the first gradient."""
        with self._lock:
            if not (self._step and self._arrived):
                self._begin()

    def _begin(self) -> None:
        self._step = StepTimes(perf_counter(), buckets=[BucketTimes(b.index, b.nbytes) for b in self._buckets])
        self._arrived = []
        self._came = bytearray(len(self._parameters))
        self._works = []
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)
        # Kept by the graph task that runs now; the inner backward of a re-entrant checkpoint has one of its own.
        finish = functools.partial(self._finish)  # an object that is gone when that task is, called or not
        self._under_way = weakref.ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _has_begun(self) -> bool:
        """Return whether a backward has, and has not raised before its first gradient."""
        return self._step is not None and (bool(self._arrived) or self._under_way() is not None)

    def _ready(self, index: int) -> None:
        with self._lock:
            if not self._has_begun():
                if not self.armed:
                    return
                self._begin()
            if self._came[index]:
                raise GradientError(
                    "{parameters} got a second gradient in one backward, when its average was under way; re-entrant "
                    "checkpoints do this to parameters that several of them share: pass use_reentrant=False",
                    [self._names[index]],
                )
            self._came[index] = 1
            self._arrived.append(index)
            self._fill(index)
            self._count(self._bucket_of[index])

    def place(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return where this backward may write a parameter's gradient, so that it need not be copied: see `in_place`."""
        with self._lock:
            index = self._numbers.get(parameter)
            averages = self.armed or self._has_begun()
            if index is None or index in self._placed or parameter.grad is not None or not averages:
                return None
            self._placed.add(index)
            return self._view(index).detach()  # a tensor of its own, or autograd would copy it

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
        """Keep a gradient that has been copied until the next forward, as programs without us keep theirs.

        Freed between one gradient and the next, its pages go back to the system, and making new ones for the next
        gradient costs more than the copy.
        """
        if gradient.is_cpu and self._copied_nbytes + gradient.nbytes <= _COPIED_NBYTES:
            self._copied_gradients.append(gradient)
            self._copied_nbytes += gradient.nbytes

    def _count(self, bucket: Bucket) -> None:
        """Note one more gradient in ``bucket``; when it is full, send every full bucket whose turn it is."""
        bucket.pending -= 1
        if bucket.pending:
            return
        assert self._step is not None
        self._step.buckets[bucket.index].ready = perf_counter()
        if self._overlaps:
            # The last one is left to `_finish`: nothing is computed meanwhile, so it need not wake a background thread.
            while len(self._works) < len(self._buckets) - 1 and not self._buckets[len(self._works)].pending:
                self._send(background=True)

    def _send(self, *, background: bool) -> None:
        assert self._step is not None
        if not self._works:
            self._reduction = ReduceOp.AVG if self.joining is None else self.joining.reduction()
        bucket = self._buckets[len(self._works)]
        times = self._step.buckets[bucket.index]
        times.started = perf_counter()
        work = self._group.all_reduce(bucket.flat, self._reduction, background=background)
        self._works.append(work)
        work.add_done_callback(times.stop)

    def _finish(self) -> None:
        """Wait for the averages; autograd calls this in the thread of backward's caller, who gets what it raises."""
        step = self._step
        self._placed.clear()
        if step is None:
            return
        if not self._arrived:  # torch.autograd.grad() accumulates nothing, so there is nothing to average
            self._step = None
            return
        self.armed = False
        step.backward_finished = perf_counter()
        missing = [index for index, came in enumerate(self._came) if not came]
        for index in missing:
            self._fill_with_zeros(index)
        self._wait()
        if not self._as_view:
            self._copy_back()
        if not self._dealt_by_arrival:
            self._deal_by_arrival()
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
            # Looked at, all of them: what ended one ended the rest, and is raised once.
            for work in self._works:
                work.exception()
            raise

    def _fill_with_zeros(self, index: int) -> None:
        """Stand in for a gradient that did not come, so that no other rank waits for this one until its timeout."""
        self._view(index).zero_()
        self._count(self._bucket_of[index])

    def _copy_back(self) -> None:
        for bucket in self._buckets:
            for member, view in bucket.views.items():
                gradient = self._parameters[member].grad
                if gradient is not None:
                    gradient.detach().copy_(view)

    def stand_in(self, reduction: Reduction) -> None:
        """Take part in one backward of the other ranks with zeros; this rank's own gradients stay as they are."""
        self._follow()
        for bucket in self._buckets:
            self._group.all_reduce(bucket.zeros(self._parameters), reduction, background=False).wait()
        if not self._dealt_by_arrival:
            self._deal_by_arrival()

    def _deal_by_arrival(self) -> None:
        order = torch.tensor(buckets.arrival_order(self._arrived, len(self._parameters)), device="cpu")
        self._group.broadcast(order, 0, background=False).wait()
        self._deal(order.tolist())
        self._dealt_by_arrival = True


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    # Weak: the cycle reducer, parameter, hook passes through autograd, where the garbage collector does not see it.
    def ready(_: torch.Tensor) -> None:
        target = reducer()
        if target is not None:
            target._ready(index)

    return ready
