"""Average gradients during backward: hooks of autograd fill buckets, and each full bucket is all-reduced.

Called by `module`. In one backward autograd calls:

    the output's gradient is known   _entered()   forget the last step; register `_end_backward` with autograd
    a parameter's gradient is ready  `Arrivals.record`, or, if it should be the last one of its bucket,
                                     _ready()     put those that have arrived into buckets; start all-reduces of full ones
    backward ends                    _end_backward()  start the remaining all-reduces
                                     _finalize()  wait for all of them, and raise what any rank found wrong

The parts are in `backward`: `GradientRecord` counts the gradients, and `BucketExchange` averages the buckets.

Elements after the gradients of the last bucket, its *flags*, tell all ranks whether a rank found a fault, and which
parameters were used where some may be unused. They cost no message of their own.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import repeat
from operator import attrgetter, is_
from time import perf_counter
from typing import Any

import torch

from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.ddp import buckets
from asyncdist.ddp.backward.bucket_exchange import BucketExchange
from asyncdist.ddp.backward.bucket_set import Bucket, BucketSet, ReducerOptions, are_dense
from asyncdist.ddp.backward.faults import Faults
from asyncdist.ddp.backward.gradient_hooks import Arrivals, GradientHook, GradientHooks, step_in_backward, take_over
from asyncdist.ddp.backward.gradient_record import GradientRecord
from asyncdist.ddp.backward.graph import (
    accumulates,
    first_leaf,
    refuse_distributed_autograd,
    refuse_silent_gradients,
    tensors_in,
)
from asyncdist.ddp.buckets import BucketTuning
from asyncdist.ddp.hooks.running import HookCaller
from asyncdist.ddp.model_sync import Verification
from asyncdist.ddp.model_watch import ModelWatch
from asyncdist.ddp.timeline import BucketTimes, StepTimes
from asyncdist.ddp.uneven_inputs import Joining
from asyncdist.errors import GradientError, UsageError
from asyncdist.groups import Group
from asyncdist.kernel import torch_private

log = logging.getLogger("asyncdist")

_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")

_reducers: WeakRegistry[Reducer] = WeakRegistry()
"""All reducers. One whose group has ended in the middle of a backward would see the gradients of later ones."""


class Reducer:
    """Averages the gradients of parameters over ``group`` in each backward of an expected output, or while it is `armed`.

    A forward arms it for the next backward, as in torch, because a forward may return objects in which no tensor is found.

    The ``verification`` compares the models of the ranks before the first exchange. The ``watch``, which is asked when a
    parameter got no gradient, raises if the model now trains other parameters.
    """

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        options: ReducerOptions,
        verification: Verification,
        watch: ModelWatch,
    ) -> None:
        self.armed = False
        self.joining: Joining | None = None
        self.last_step: StepTimes | None = None
        self.manual = False
        """Whether the caller, instead of the end of backward, calls `finalize`."""
        self.has_rebuilt_buckets = False
        """Whether buckets follow the order of the gradients in the first backward."""
        self.futures: list[Any] = []
        """Futures of torch, of a buffer hook, for which the next backward waits."""
        self._group = group
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self.options = options
        self._watch = watch
        # Where parameters may be unused: those with a gradient in the last backward.
        self._used_before: Set[int] = frozenset()
        total = sum(parameter.nbytes for parameter in self._parameters)
        self.tuning = BucketTuning(total, tries=group.size() > 1) if options.tunes_buckets else None
        """With ``bucket_cap_mb="auto"``, the sizes that are tried; else None."""
        self._bucket_set = BucketSet(named, options, shares_memory=group.shares_memory, is_alone=group.size() == 1)
        self._record = GradientRecord(self._bucket_set, options, Faults(group, self._names), len(named))
        self._exchange = BucketExchange(group, self._bucket_set, self._record, self._parameters, verification)
        # A model on several devices has one backward thread per device.
        self._lock = threading.Lock()
        self._step: StepTimes | None = None
        self._forward_started = 0.0
        self._running: weakref.ref[Any] | None = None
        """Refers to what autograd calls at the end of the running backward; to nothing if that has raised."""
        self._uses_leaves = False
        # Parameters for which `bucket_memory` has returned memory in this backward.
        self._placed: set[int] = set()
        self._finds_outputs = True
        """Whether tensors were found in all outputs, so that `_entered` begins each backward."""
        self._looks = self._needs_hooks = False
        """Whether gradients are only looked at, when backwards have ended; and whether that does not suffice."""
        self._is_regular = False
        """Whether a backward had no faults."""
        for other in _reducers.living():
            # One whose group has failed or was destroyed leaves the parameters to this one.
            if other._group.error is not None and not other._numbers.keys().isdisjoint(self._numbers):
                other.remove_hooks()
        _reducers.add(self)
        self._arrivals = Arrivals(self._parameters)
        # autograd refers to the recorded parameters in a way that the garbage collector does not see.
        weakref.finalize(self, self._arrivals.clear)
        self._hooks = GradientHooks(self._parameters)
        self._hook = _hook(weakref.ref(self))
        self._install_hooks()

    @property
    def trains(self) -> bool:
        """Whether a parameter requires a gradient now."""
        return any(map(_requires_grad, self._parameters))

    @property
    def hook_name(self) -> str | None:
        """The name of the communication hook; None without one."""
        hook = self._exchange.hook
        return None if hook is None else hook.name

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters by bucket, in the order in which buckets are all-reduced."""
        return [[self._names[member] for member in bucket.members] for bucket in self._bucket_set.buckets]

    def _install_hooks(self) -> None:
        """Let autograd record gradients, and call `_ready` for those after which a bucket should be full."""
        bucket_set, count = self._bucket_set, len(self._parameters)
        # Nothing is averaged, and the calls of autograd would cost more than the rest.
        self._looks = bucket_set.is_alone and not (bucket_set.allows_unused or self._needs_hooks)
        if self._looks:
            self._hooks.remove()
            return
        marks: Iterable[int] = ()
        if bucket_set.allows_unused or not self._finds_outputs:
            marks = range(count)
        elif not bucket_set.is_alone:
            marks = bucket_set.large.union(bucket.members[-1] for bucket in bucket_set.buckets)
        hooks = [self._arrivals.record] * count
        for index in marks:
            hooks[index] = self._hook
        self._hooks.install(hooks)

    def remove_hooks(self) -> None:
        """Remove the hooks of autograd: later backwards average nothing."""
        self._looks = False
        self._hooks.remove()

    def set_hook(self, hook: HookCaller) -> None:
        """Call ``hook`` for each bucket instead of an all-reduce.

        Raises:
            UsageError: There is a hook already, or a backward has averaged gradients.
        """
        if self._exchange.hook is not None:
            raise UsageError(
                f"this model has the communication hook {self.hook_name!r} already: register one hook only"
            )
        if self.last_step is not None or self._step is not None:
            raise UsageError(
                "a backward has averaged gradients already: register the communication hook before the first"
            )
        if self.tuning is not None:
            raise UsageError(
                "bucket_cap_mb='auto' measures all-reduces, which a communication hook replaces: pass a number of MiB"
            )
        self._exchange.hook = hook
        self._bucket_set.has_hook, self._bucket_set.is_alone = True, False
        self._assign()

    def set_static_graph(self) -> None:
        """Treat the graph as static from the next backward on."""
        self.options.static_graph = True
        self._assign()

    def _follow_casts(self) -> None:
        """Assign buckets again if parameters have been cast or moved: gradients must not be converted in between."""
        if self._bucket_set.are_cast():
            self._assign()

    def _assign(self, order: Sequence[int] | None = None) -> None:
        """Assign the parameters to buckets again; see `BucketSet.assign`."""
        self._bucket_set.assign(order)
        self._install_hooks()

    # -- one backward -------------------------------------------------------------------------

    def check(self) -> None:
        """Prepare for a forward; raise GradientError if the last backward ended early, so that other ranks may wait."""
        # Inside a backward: a checkpoint repeats its forward.
        if torch_private.current_graph_task_id() >= 0:
            return
        self._forward_started = perf_counter()
        self._placed.clear()
        # No other rank waits for those of a world of one.
        if self._step is not None and (self._record.seen or (self._arrivals and not self._bucket_set.is_alone)):
            if self.manual and self._step.backward_finished:
                raise UsageError(
                    "the last backward was not finalized: call finalize_backward() before the next forward"
                )
            raise GradientError(
                f"the last backward did not finish: it had sent {self._exchange.started} of {len(self.layout)} buckets, "
                "and other ranks may wait for the rest; find what it raised, destroy the process group and start "
                "again from a checkpoint"
            )
        refuse_distributed_autograd(self._names)
        self._step = None
        # Those of backwards that average nothing.
        self._arrivals.clear()
        self._follow_casts()
        take_over(self._parameters)
        if self._looks and not self._is_regular:
            self._hooks.install_once(self._arrivals.record)
        elif self._looks and not all(map(is_, map(_gradient_of, self._parameters), repeat(None))):
            # What a backward adds to a gradient that is there is not seen without hooks.
            self._needs_hooks = True
            self._install_hooks()
        self._hooks.restore()
        self._hooks.keep_last()

    def expect_backward_of(self, output: Any) -> None:
        """Begin when autograd computes the gradient of a tensor in ``output``, which a forward has returned."""
        has_found = False
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                has_found = True
                # Without a reference to a node of this graph, which the graph would refer to.
                leaf = first_leaf(tensor.grad_fn) if self._bucket_set.allows_unused else None
                tensor.register_hook(functools.partial(self._entered, leaf=leaf))
        if self._finds_outputs and not has_found:
            # Any gradient may be the one with which the backward begins.
            self._finds_outputs = False
            self._install_hooks()

    def _entered(self, _: torch.Tensor, *, leaf: Any) -> None:
        """Start a backward.

        With unused parameters, the node of a ``leaf`` from which the output was computed tells a backward from
        `torch.autograd.grad` where no parameter gets a gradient.
        """
        with self._lock:
            if not (self._step and self._has_gradients()):
                self._begin()
            if leaf is not None and accumulates(leaf):
                self._uses_leaves = True

    def _begin(self) -> None:
        self._step = StepTimes(perf_counter(), forward_started=self._forward_started)
        self._step.buckets = [BucketTimes(bucket.index, bucket.nbytes) for bucket in self._bucket_set.buckets]
        self._record.begin()
        self._exchange.begin(self._step.buckets, self.joining)
        # Where a forward has armed it, gradients that came before that of the output are this backward's too.
        if self._bucket_set.is_alone or not self.armed:
            self._arrivals.clear()
        self._uses_leaves = False
        # Only the running graph task keeps this object, so it is freed with the task, also if the task raises.
        # The inner backward of a re-entrant checkpoint is a task of its own.
        finish = functools.partial(self._end_backward)
        self._running = weakref.ref(finish)
        torch_private.queue_callback(finish)

    def _has_gradients(self) -> bool:
        return bool(self._record.seen or self._arrivals)

    def _has_begun(self) -> bool:
        """Return whether a backward has begun and has not raised before its first gradient."""
        if self._step is None or self._record.seen:
            return self._step is not None
        return self._running is not None and self._running() is not None

    def _ready(self, parameter: torch.Tensor) -> None:
        """Record a gradient after which a bucket should be full, and start the all-reduces of full buckets."""
        with self._lock:
            self._arrivals.record(parameter)
            if full := self._counted():
                self._exchange.start_full(full)

    def _counted(self) -> list[Bucket]:
        """Count the gradients that were recorded, and return the buckets that are full now."""
        record = self._record
        if self._looks and self._is_regular:
            arrived = [index for index, each in enumerate(self._parameters) if each.grad is not None]
        else:
            arrived = self._arrivals.take()
        if self._bucket_set.allows_unused:
            record.used.update(arrived)
        if arrived and not (self._step is not None and record.seen) and not self._has_begun():
            if not self.armed:
                return []
            self._begin()
        return record.add(arrived)

    def bucket_memory(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the memory in its bucket for a parameter's gradient; None if backward must not write it there.

        Called by `direct_gradients`.
        """
        with self._lock:
            index = self._numbers.get(parameter)
            if (
                index is None
                or index in self._placed
                or index in self._bucket_set.skipped
                or parameter.grad is not None
            ):
                return None
            if not self.armed and not self._has_begun():
                return None
            view = self._bucket_set.view(index)
            if view.shape != parameter.shape:
                return None
            self._placed.add(index)
            # A new tensor object: autograd copies a gradient to which there are other references.
            return view.detach()

    # -- the end of a backward ----------------------------------------------------------------

    def _end_backward(self) -> None:
        """Start the remaining all-reduces. Autograd calls this in the thread of backward's caller."""
        step = self._step
        self._placed.clear()
        if step is None or step.backward_finished:
            return
        is_complete = self._looks and self._is_regular and are_dense(self._parameters)
        full = [] if is_complete else self._counted()
        # torch.autograd.grad() accumulates no gradient.
        if not (is_complete or self._record.seen or self._uses_leaves):
            self._step = None
            refuse_silent_gradients(self._names, self._parameters, hooked=self._hooks.is_installed)
            self._watch.check_again()
            return
        self.armed = False
        step.backward_finished = perf_counter()
        full = self._bucket_set.buckets if is_complete else [*full, *self._record.end()]
        for bucket in full:
            step.buckets[bucket.index].ready = step.backward_finished
        self._exchange.start_rest(background=self.manual)
        if not self.manual:
            self._finalize()

    def finalize(self) -> None:
        """Finish a backward whose caller waits for the averages, after `manual` was set."""
        if not self.manual:
            raise UsageError("require_manual_backward_finalization is False: backward() has finished by itself")
        if self._step is None or not self._step.backward_finished:
            raise UsageError(
                "no backward waits for finalize_backward(): call it once after each backward that averages"
            )
        self._finalize()

    def _finalize(self) -> None:
        """Wait for the averages; raise the faults of any rank on all ranks."""
        step = self._step
        assert step is not None
        flags = self._exchange.wait(self.futures)
        self.futures.clear()
        has_faults, used = bool(flags[0]), self._used_anywhere(flags)
        self._bucket_set.write_back(used)
        self._record.used.clear()
        self._follow(self._record.seen, used, step)
        step.finished = perf_counter()
        self.last_step, self._step = step, None
        if has_faults:
            self._record.faults.raise_on_all_ranks()
        if self._looks and not self._is_regular:
            self._hooks.remove()
        self._is_regular = True
        if self._bucket_set.allows_unused:
            before, self._used_before = self._used_before, self._record.seen.keys()
            if not before <= self._used_before:
                self._watch.check_again()
        step_in_backward(self._parameters)
        if self.options.lazy_bucket_allocation and not self.options.gradient_as_bucket_view:
            for bucket in self._bucket_set.buckets:
                bucket.release()

    def _used_anywhere(self, flags: torch.Tensor) -> frozenset[int] | None:
        """Return the parameters that a rank has used; None if all are."""
        if not self._bucket_set.allows_unused:
            return None
        return frozenset(flags[1:].nonzero().flatten().tolist())

    def stand_in(self, reduction: Reduction) -> None:
        """Contribute zeros to one backward of the other ranks; this rank's own gradients do not change."""
        self._follow_casts()
        self._record.begin()
        self._record.used.clear()
        flags = self._exchange.average_zeros(reduction)
        self._follow((), self._used_anywhere(flags), None)
        if bool(flags[0]):
            self._record.faults.raise_on_all_ranks()

    # -- the buckets of the next step ---------------------------------------------------------

    def _follow(self, arrived: Iterable[int], used: frozenset[int] | None, step: StepTimes | None) -> None:
        """Assign the buckets of the next step by what the ranks agree on. All ranks call it after each step.

        The gradients of this rank have ``arrived`` in that order. ``used`` is None if ranks have used all parameters, and
        ``step`` if this rank has computed nothing.
        """
        if not self.has_rebuilt_buckets:
            self._follow_arrival(arrived, used)
        elif self.tuning is not None and self.tuning.chosen is None:
            seconds = 0.0 if step is None else max(each.finished for each in step.buckets) - step.backward_started
            self._tune(self.tuning, seconds)

    def _follow_arrival(self, arrived: Iterable[int], used: frozenset[int] | None) -> None:
        """Assign the parameters in the order in which rank 0's gradients have arrived."""
        count = len(self._parameters)
        order = torch.tensor(buckets.arrival_order(arrived, count), device="cpu")
        self._group.broadcast(order, 0, background=False).wait()
        if self.options.skip_all_reduce_unused_params and used is not None:
            self._bucket_set.skipped = frozenset(range(count)) - used
        if self.tuning is not None:
            self.options.limits = self.tuning.limits
        self._assign(order.tolist())
        self.has_rebuilt_buckets = True

    def _tune(self, tuning: BucketTuning, seconds: float) -> None:
        if tuning.record(seconds):
            medians = torch.tensor(tuning.medians, dtype=torch.float64, device="cpu")
            self._group.all_reduce(medians, ReduceOp.MAX, background=False).wait()
            if tuning.decide(medians.tolist()) and self._group.rank() == 0:
                log.info("DistributedDataParallel uses %s", tuning)
        if tuning.limits != self.options.limits:
            self.options.limits = tuning.limits
            self._assign()


def _hook(reducer: weakref.ref[Reducer]) -> GradientHook:
    # Weak, because the garbage collector does not see references inside autograd.
    def ready(parameter: torch.Tensor) -> None:
        target = reducer()
        if target is not None:
            target._ready(parameter)

    return ready
