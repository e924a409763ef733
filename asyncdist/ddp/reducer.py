"""The machine behind DistributedDataParallel: gradients fill buckets, full buckets go onto the wire, backward goes on.

A gradient that is large enough to travel alone is averaged where autograd has put it: it needs no bucket's memory, and
no copy. Only where something else lies in that memory too is it copied like the others.

One backward, as autograd drives it:

    the output's gradient is known   begin()      forget the last step; ask to be called when backward ends
    a parameter's gradient is ready  _ready()     put it into its bucket; send every full bucket whose turn it is
    backward ends                    _finish()    send the rest, wait for all; `loss.backward()` returns

Buckets are sent strictly in their order, also where gradients come in another, so that all ranks issue the same
all-reduces. After the first backward they are dealt again by the order in which gradients came to rank 0.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from asyncdist.ddp import buckets
from asyncdist.errors import GradientError, SharedMemoryError, UnsupportedError
from asyncdist.group import Group
from asyncdist.ops import ReduceOp
from asyncdist.registered import empty
from asyncdist.work import Work


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
    """Gradients of one dtype and device that are averaged together, as views of one flat tensor; or a large one alone."""

    def __init__(self, index: int, members: Sequence[int], parameters: Sequence[torch.Tensor], *, alone: bool) -> None:
        self.index = index
        self.members = members
        self.alone = alone
        self.pending = len(members)
        self.flat: torch.Tensor | None = None
        self.views: dict[int, torch.Tensor] = {}
        self.sent: torch.Tensor | None = None
        """What is averaged in this backward: ``flat``, or the memory of a gradient that travels alone."""
        self.nbytes = sum(parameters[member].nbytes for member in members)

    def view(self, member: int, parameters: Sequence[torch.Tensor], *, shared: bool) -> torch.Tensor:
        """Return the place of a gradient, which is to be sent from there.

        Memory is made when first asked for, so that buckets of an earlier layout are gone first where nobody holds them.
        With ``shared``, what lies on the processor is registered as long as there is room: then nothing is staged.
        """
        if self.flat is None:
            self._allocate(parameters, shared=shared)
        self.sent = self.flat
        return self.views[member]

    def _allocate(self, parameters: Sequence[torch.Tensor], *, shared: bool) -> None:
        like = parameters[self.members[0]]
        count = sum(parameters[member].numel() for member in self.members)
        if shared and like.is_cpu:
            with contextlib.suppress(SharedMemoryError):  # slower is better than not at all
                self.flat = empty(count, dtype=like.dtype)
        if self.flat is None:
            self.flat = torch.empty(count, dtype=like.dtype, device=like.device)
        offset = 0
        for member in self.members:
            parameter = parameters[member]
            part = self.flat[offset : offset + parameter.numel()]
            self.views[member] = part.as_strided(parameter.shape, _strides(parameter))
            offset += parameter.numel()


def has_free_cores(ranks: int) -> bool:
    """Say whether a core is left on this machine when each of its ranks computes.

    Over shared memory an all-reduce is the processor's work. Where it has to take a core from backward, nothing is won
    by doing both at once, and the threads get in each other's way.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > ranks * torch.get_num_threads()


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return how a gradient is laid out: like its parameter where that has no holes, as autograd does it."""
    dense = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    return dense if dense == parameter.stride() else torch.empty(parameter.shape, device="meta").stride()


def _owners(tensor: torch.Tensor) -> int:
    """Return how many hold a tensor's memory, as torch counts them; 0 if this version does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else count(tensor.untyped_storage()._cdata)


_ONE_OWNER = _owners(torch.empty(1))


def _whole(gradient: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor | None:
    """Return a gradient as a flat tensor that may be averaged in place; None if it has other strides, or shares its memory.

    Autograd hands out memory twice: to two parameters that were added, say, where one is a view.
    """
    if type(gradient) is not torch.Tensor or gradient.requires_grad or gradient.stride() != strides:
        return None
    if not _ONE_OWNER or _owners(gradient) != _ONE_OWNER:
        return None
    return gradient.as_strided((gradient.numel(),), (1,))


class Reducer:
    """Average the gradients of ``parameters`` over ``group`` in every backward while `enabled` is true."""

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        limits: Sequence[int],
        *,
        gradient_as_bucket_view: bool,
    ) -> None:
        self.enabled = True
        self.last_step: StepTimes | None = None
        self._group = group
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._strides = [_strides(parameter) for parameter in self._parameters]
        self._limits = limits
        self._alone_nbytes = buckets.alone(limits, shares_memory=group.shares_memory)
        self._as_view = gradient_as_bucket_view
        self._overlaps = not group.shares_memory or has_free_cores(group.size())
        self._lock = threading.Lock()  # models spread over devices have a backward thread for each
        self._step: StepTimes | None = None
        self._arrived: list[int] = []  # parameters of this backward in the order in which their gradients came
        self._came = bytearray()
        self._works: list[Work] = []  # of the buckets sent so far
        self._dealt_by_arrival = False
        self._deal(buckets.definition_order(len(named)))
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))

    def _deal(self, order: Sequence[int]) -> None:
        kinds = [(parameter.dtype, parameter.device) for parameter in self._parameters]
        sizes = [parameter.nbytes for parameter in self._parameters]
        layout = buckets.assign(sizes, kinds, order, self._limits, self._alone_nbytes)
        self._buckets = [
            Bucket(index, members, self._parameters, alone=sizes[members[0]] >= self._alone_nbytes)
            for index, members in enumerate(layout)
        ]
        self._bucket_of = [self._buckets[0]] * len(self._parameters)
        for bucket in self._buckets:
            for member in bucket.members:
                self._bucket_of[member] = bucket

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters, bucket by bucket, in the order in which buckets are sent."""
        return [[self._names[member] for member in bucket.members] for bucket in self._buckets]

    # -- one backward -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise GradientError if the last backward stopped half-way, when other ranks wait for what it did not send."""
        if self._step is not None and self._arrived:
            sent, total = len(self._works), len(self._buckets)
            raise GradientError(
                f"the last backward did not finish: it had sent {sent} of {total} buckets, and other ranks may wait "
                "for the rest; find what it raised, destroy the process group and start again from a checkpoint"
            )
        self._step = None

    def begin(self) -> None:
        """Start a backward's bookkeeping; called where autograd enters the module, or else by the first gradient."""
        with self._lock:
            if self.enabled and not (self._step and self._arrived):
                self._begin()

    def _begin(self) -> None:
        self._step = StepTimes(perf_counter(), buckets=[BucketTimes(b.index, b.nbytes) for b in self._buckets])
        self._arrived = []
        self._came = bytearray(len(self._parameters))
        self._works = []
        for bucket in self._buckets:
            bucket.pending = len(bucket.members)
        # Kept by the graph task that runs now; the inner backward of a re-entrant checkpoint has one of its own.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _ready(self, index: int) -> None:
        with self._lock:
            if self._step is None:
                self._begin()
            if self._came[index]:
                raise GradientError(
                    "{parameters} got a second gradient in one backward, when its average was under way; re-entrant "
                    "checkpoints do this to parameters that several of them share: pass use_reentrant=False",
                    [self._names[index]],
                )
            self._came[index] = 1
            self._arrived.append(index)
            self._fill(self._bucket_of[index], index)
            self._count(self._bucket_of[index])

    def _fill(self, bucket: Bucket, index: int) -> None:
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"the gradient of {self._names[index]!r} is not a dense tensor; build its layer with sparse=False"
            )
        if bucket.alone:
            bucket.sent = _whole(gradient, self._strides[index])
            if bucket.sent is not None:
                return
        view = self._view(bucket, index)
        if gradient is not view:
            view.copy_(gradient.detach())
            if self._as_view:
                parameter.grad = view

    def _view(self, bucket: Bucket, index: int) -> torch.Tensor:
        return bucket.view(index, self._parameters, shared=self._group.shares_memory)

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
        bucket = self._buckets[len(self._works)]
        times = self._step.buckets[bucket.index]
        times.started = perf_counter()
        work = self._group.all_reduce(bucket.sent, ReduceOp.AVG, background=background)
        self._works.append(work)
        work.add_done_callback(times.stop)

    def _finish(self) -> None:
        """Wait for the averages; autograd calls this in the thread of backward's caller, who gets what it raises."""
        step = self._step
        if step is None:
            return
        if not self._arrived:  # torch.autograd.grad() accumulates nothing, so there is nothing to average
            self._step = None
            return
        step.backward_finished = perf_counter()
        missing = [index for index, came in enumerate(self._came) if not came]
        for index in missing:
            self._fill_with_zeros(index)
        self._wait()
        if not self._as_view:
            self._copy_back()
        self._let_go()
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
        bucket = self._bucket_of[index]
        self._view(bucket, index).zero_()
        self._count(bucket)

    def _copy_back(self) -> None:
        for bucket in self._buckets:
            for member, view in bucket.views.items() if bucket.sent is bucket.flat else ():
                gradient = self._parameters[member].grad
                if gradient is not None:
                    gradient.detach().copy_(view)

    def _let_go(self) -> None:
        """Hold no gradient that is not in a bucket: the memory of what a user sets to None serves the next backward."""
        self._works = []
        for bucket in self._buckets:
            bucket.sent = None

    def _deal_by_arrival(self) -> None:
        order = torch.tensor(buckets.arrival_order(self._arrived, len(self._parameters)))
        self._group.broadcast(order, 0, background=False).wait()
        self._deal(order.tolist())
        self._dealt_by_arrival = True


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    # Weak: the cycle reducer, parameter, hook passes through autograd, where the garbage collector does not see it.
    def ready(_: torch.Tensor) -> None:
        target = reducer()
        if target is not None and target.enabled:
            target._ready(index)

    return ready
