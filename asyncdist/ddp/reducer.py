"""Average gradients during backward: hooks of autograd fill buckets, and each full bucket is all-reduced.

Called by `module`. In one backward autograd calls:

    the output's gradient is known   begin()      forget the last step; register `_end_backward` with autograd
    a parameter's gradient is ready  _ready()     put it into its bucket; start the all-reduces of full buckets
    backward ends                    _end_backward()  start the remaining all-reduces
                                     _finalize()  wait for all of them, and raise what any rank found wrong

The all-reduces start in the order of the buckets, whatever the order of the gradients, so that all ranks start the same
ones. After the first backward, parameters are assigned to buckets in the order in which rank 0's gradients arrived.

Elements after the gradients of the last bucket, its *flags*, tell all ranks whether a rank found a fault, and which
parameters were used where some may be unused. They cost no message of their own.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from asyncdist.base.cores import has_free_cores
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.ddp import buckets
from asyncdist.ddp.backward.arrivals import Arrivals
from asyncdist.ddp.backward.bucket_set import BucketSet, ReducerOptions
from asyncdist.ddp.backward.bucket_tuning import BucketTuning
from asyncdist.ddp.backward.faults import Fault, Faults
from asyncdist.ddp.backward.graph import accumulates, refuse_returned_gradients
from asyncdist.ddp.backward.optimizers import step_in_backward, take_over
from asyncdist.ddp.backward.step_times import BucketTimes, StepTimes
from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.ddp.hooks.running import HookCaller, HookResult
from asyncdist.ddp.uneven_inputs import Joining
from asyncdist.engine.work import Work
from asyncdist.errors import GradientError, UsageError
from asyncdist.groups.group import Group

log = logging.getLogger("asyncdist")

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
"""All reducers. One whose group has ended in the middle of a backward would see the gradients of later ones."""


class Reducer:
    """Averages the gradients of parameters over ``group`` in each backward after `begin` or while it is `armed`.

    A forward arms it for the next backward, as in torch, because a forward may return objects in which no tensor is found.
    """

    def __init__(self, group: Group, named: Sequence[tuple[str, torch.nn.Parameter]], options: ReducerOptions) -> None:
        self.armed = False
        self.joining: Joining | None = None
        self.last_step: StepTimes | None = None
        self.tuning: BucketTuning | None = None
        self.manual = False
        """Whether the caller, instead of the end of backward, calls `finalize`."""
        self.futures: list[Any] = []
        """Futures of torch, of a buffer hook, for which the next backward waits."""
        self._group = group
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._options = options
        self._set = BucketSet(named, options, shares_memory=group.shares_memory, is_alone=group.size() == 1)
        if options.tunes_buckets:
            total = sum(parameter.nbytes for parameter in self._parameters)
            self.tuning = BucketTuning(total, tries=group.size() > 1)
        self._overlaps = not group.shares_memory or has_free_cores(group.size(), torch.get_num_threads())
        self._hook: HookCaller | None = None
        # A model on several devices has one backward thread per device.
        self._lock = threading.Lock()
        self._step: StepTimes | None = None
        self._forward_started = 0.0
        # Returns None if no backward is running, or if it has raised.
        self._running: Callable[[], object] = lambda: None
        # How many gradients each parameter got in this backward, in the order in which the first ones arrived.
        self._seen: dict[int, int] = {}
        # With a static graph or skipped parameters: those whose last gradient has arrived.
        self._filled: set[int] = set()
        # Parameters that got a gradient since the last averages; kept only where parameters may be unused.
        self._used: set[int] = set()
        # With static_graph, what `_seen` was in the first backward.
        self._expected: dict[int, int] | None = None
        self._faults = Faults(group, self._names)
        self._uses_leaves = False
        # Parameters for which `bucket_memory` has returned memory in this backward.
        self._placed: set[int] = set()
        # The all-reduces that this backward has started.
        self._works: list[Work | HookResult] = []
        self._reduction: Reduction = ReduceOp.AVG
        self._follows_arrival = False
        for other in [
            each for each in _reducers if each.has_ended and not each._numbers.keys().isdisjoint(self._numbers)
        ]:
            other.remove_hooks()
        _reducers.add(self)
        self._arrivals = Arrivals(self._parameters)
        # autograd refers to the recorded parameters in a way that the garbage collector does not see.
        weakref.finalize(self, self._arrivals.clear)
        self._hooks: list[Any] = []
        self._install_hooks()

    @property
    def limits(self) -> Sequence[int]:
        """The caps of the buckets in bytes, as `buckets.assign` takes them."""
        return self._options.limits

    @property
    def has_ended(self) -> bool:
        """Whether the group has failed or was destroyed, so that another reducer may take over the parameters."""
        return self._group.error is not None

    @property
    def may_lack_gradients(self) -> bool:
        """Whether a parameter may get no gradient in a backward."""
        return self._set.allows_unused

    @property
    def has_rebuilt_buckets(self) -> bool:
        """Whether buckets follow the order of the gradients in the first backward."""
        return self._follows_arrival

    @property
    def hook_name(self) -> str | None:
        """The name of the communication hook; None without one."""
        return None if self._hook is None else self._hook.name

    def _install_hooks(self) -> None:
        """Let autograd call `_ready` for each gradient, or only record gradients that need no further work."""
        self.remove_hooks()
        only_records = self._set.is_alone and not self._set.allows_unused
        self._hooks = [
            each.register_post_accumulate_grad_hook(
                self._arrivals.record if only_records else _hook(weakref.ref(self), index)
            )
            for index, each in enumerate(self._parameters)
        ]
        self._hooks_of_parameters: list[Any] = [each._post_accumulate_grad_hooks for each in self._parameters]

    def remove_hooks(self) -> None:
        """Remove the hooks of autograd: later backwards average nothing."""
        while self._hooks:
            self._hooks.pop().remove()

    def set_hook(self, hook: HookCaller) -> None:
        """Call ``hook`` for each bucket instead of an all-reduce.

        Raises:
            UsageError: There is a hook already, or a backward has averaged gradients.
        """
        if self._hook is not None:
            raise UsageError(
                f"this model has the communication hook {self._hook.name!r} already: register one hook only"
            )
        if self.last_step is not None or self._step is not None:
            raise UsageError(
                "a backward has averaged gradients already: register the communication hook before the first"
            )
        if self.tuning is not None:
            raise UsageError(
                "bucket_cap_mb='auto' measures all-reduces, which a communication hook replaces: pass a number of MiB"
            )
        self._hook = hook
        self._set.has_hook, self._set.is_alone = True, False
        self._set.assign()
        self._install_hooks()

    def set_static_graph(self) -> None:
        """Treat the graph as static from the next backward on."""
        self._options.static_graph = True
        self._set.assign()
        self._install_hooks()

    # -- buckets ------------------------------------------------------------------------------

    @property
    def layout(self) -> list[list[str]]:
        """The names of the parameters by bucket, in the order in which buckets are all-reduced."""
        return [[self._names[member] for member in bucket.members] for bucket in self._set.buckets]

    # -- one backward -------------------------------------------------------------------------

    def check(self) -> None:
        """Prepare for a forward; raise GradientError if the last backward ended early, so that other ranks may wait."""
        # Inside a backward: a checkpoint repeats its forward.
        if torch._C._current_graph_task_id() >= 0:
            return
        self._forward_started = perf_counter()
        self._placed.clear()
        if self._step is not None and self._has_gradients():
            if self.manual and self._step.backward_finished:
                raise UsageError(
                    "the last backward was not finalized: call finalize_backward() before the next forward"
                )
            sent, total = len(self._works), len(self._set.buckets)
            raise GradientError(
                f"the last backward did not finish: it had sent {sent} of {total} buckets, and other ranks may wait "
                "for the rest; find what it raised, destroy the process group and start again from a checkpoint"
            )
        self._step = None
        # Those of backwards that average nothing.
        self._arrivals.clear()
        self._set.follow_casts()
        take_over(self._parameters)
        # A hook of the user's that was registered later must run earlier, as in torch: it may change the gradient.
        if sum(map(len, self._hooks_of_parameters)) > len(self._hooks):
            for hooks, handle in zip(self._hooks_of_parameters, self._hooks, strict=False):
                # Not `move_to_end`: torch calls the hooks in the order of their insertion.
                hooks[handle.id] = hooks.pop(handle.id)

    def begin(self, leaf: Any = None) -> None:
        """Start a backward. Called when autograd computes the gradient of the module's output.

        Args:
            leaf: With unused parameters, the node of a leaf from which the output was computed. It tells a backward
                from `torch.autograd.grad` where no parameter gets a gradient.
        """
        with self._lock:
            if not (self._step and self._has_gradients()):
                self._begin()
            if leaf is not None and accumulates(leaf):
                self._uses_leaves = True

    def _begin(self) -> None:
        self._step = StepTimes(perf_counter(), forward_started=self._forward_started)
        self._step.buckets = [BucketTimes(bucket.index, bucket.nbytes) for bucket in self._set.buckets]
        self._seen, self._works = {}, []
        self._filled.clear()
        self._arrivals.clear()
        self._uses_leaves = False
        self._faults.clear()
        expected = self._expected
        for bucket in self._set.buckets:
            members = bucket.members
            bucket.pending = len(members) if expected is None else sum(member in expected for member in members)
            bucket.unfilled.clear()
        # Only the running graph task keeps this object, so it is freed with the task, also if the task raises.
        # The inner backward of a re-entrant checkpoint is a task of its own.
        finish = functools.partial(self._end_backward)
        self._running = weakref.ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _has_gradients(self) -> bool:
        return bool(self._seen or self._arrivals)

    def _has_begun(self) -> bool:
        """Return whether a backward has begun and has not raised before its first gradient."""
        return self._step is not None and (bool(self._seen) or self._running() is not None)

    def _ready(self, index: int) -> None:
        with self._lock:
            if self._set.allows_unused:
                self._used.add(index)
            if not (self._step is not None and self._seen) and not self._has_begun():
                if not self.armed:
                    return
                self._begin()
            if index not in self._seen and not self._set.is_special:
                self._seen[index] = 1
                self._count(index)
            else:
                count = self._seen[index] = self._seen.get(index, 0) + 1
                self._ready_specially(index, count)

    def _ready_specially(self, index: int, count: int) -> None:
        """Treat a gradient of a static graph, of a skipped parameter, or after the first one."""
        if index in self._set.skipped:
            self._faults.add(index, Fault.skipped)
        elif not self._options.static_graph:
            if count == 1:
                self._count_specially(index)
            else:
                self._faults.add(index, Fault.repeated)
        elif self._expected is not None:
            if count == self._expected.get(index, 0):
                self._count_specially(index)
            elif count > self._expected.get(index, 0):
                self._faults.add(index, Fault.changed)

    def bucket_memory(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the memory in its bucket for a parameter's gradient; None if backward must not write it there.

        Called by `direct_gradients`.
        """
        with self._lock:
            index = self._numbers.get(parameter)
            if index is None or index in self._placed or index in self._set.skipped or parameter.grad is not None:
                return None
            if not self.armed and not self._has_begun():
                return None
            self._placed.add(index)
            # A new tensor object: autograd copies a gradient to which there are other references.
            return self._set.view(index).detach()

    def _count_specially(self, index: int) -> None:
        self._filled.add(index)
        self._count(index)

    def _count(self, index: int) -> None:
        """Count one more gradient in its bucket; if that is full, start the all-reduces of full buckets, in order."""
        bucket = self._set.bucket_of[index]
        bucket.pending -= 1
        bucket.unfilled.append(index)
        # A large gradient is copied while it is in the cache, small ones together.
        if not bucket.pending or index in self._set.large:
            self._set.fill(bucket, self._faults)
        if bucket.pending:
            return
        assert self._step is not None
        self._step.buckets[bucket.index].ready = perf_counter()
        if self._overlaps or self._hook is not None:
            # `_end_backward` starts the last one: nothing is computed after it, so no background thread needs to
            # drive it.
            while len(self._works) < len(self._set.buckets) - 1 and not self._set.buckets[len(self._works)].pending:
                self._send(background=True)

    def _send(self, *, background: bool) -> None:
        assert self._step is not None
        if not self._works:
            self._reduction = ReduceOp.AVG if self.joining is None else self.joining.reduction()
        bucket = self._set.buckets[len(self._works)]
        flat = torch.empty(0) if self._set.is_alone else self._set.flat(bucket)
        if not self._set.is_alone and (bucket.pending or self._set.is_special):
            arrived = self._filled if self._set.is_special else self._seen
            for member in bucket.members:
                if member not in arrived:
                    self._set.fill_unused(member)
        times = self._step.buckets[bucket.index]
        times.started = perf_counter()
        if self._hook is not None:
            is_last = bucket is self._set.buckets[-1]
            self._works.append(self._hook.start(GradientBucket(bucket, flat, self._parameters, is_last=is_last)))
            return
        work = self._group.all_reduce(flat, self._reduction, background=background)
        self._works.append(work)
        work.add_done_callback(times.stop)

    # -- the end of a backward ----------------------------------------------------------------

    def _end_backward(self) -> None:
        """Start the remaining all-reduces. Autograd calls this in the thread of backward's caller."""
        step = self._step
        self._placed.clear()
        if step is None or step.backward_finished:
            return
        # torch.autograd.grad() accumulates no gradient.
        if not self._has_gradients() and not self._uses_leaves:
            self._step = None
            refuse_returned_gradients(self._names, self._parameters)
            return
        self.armed = False
        step.backward_finished = perf_counter()
        self._take_arrivals(step)
        self._find_faults()
        for bucket in self._set.buckets:
            self._set.fill(bucket, self._faults)
        with _RetrievedErrors(self._works):
            if not self._set.flags_apart:
                self._write_flags(self._set.flags())
            while len(self._works) < len(self._set.buckets):
                self._send(background=self.manual)
        if not self.manual:
            self._finalize()

    def _take_arrivals(self, step: StepTimes) -> None:
        """Count the gradients that hooks have only recorded."""
        arrived = self._arrivals.take()
        counts = dict.fromkeys(arrived, 1)
        if len(counts) < len(arrived) or self._seen:
            for index in arrived:
                self._ready(index)
            return
        self._seen, is_complete = counts, len(counts) == len(self._parameters)
        for bucket, times in zip(self._set.buckets, step.buckets, strict=True):
            bucket.unfilled = (
                [*bucket.members] if is_complete else [member for member in bucket.members if member in counts]
            )
            bucket.pending -= len(bucket.unfilled)
            times.ready = step.backward_finished

    def _find_faults(self) -> None:
        if self._options.static_graph and self._expected is None:
            for index in self._seen:
                self._count_specially(index)
            self._expected = dict(self._seen)
        elif self._expected is not None:
            for index, count in self._expected.items():
                if self._seen.get(index, 0) < count:
                    self._faults.add(index, Fault.changed)
        elif not self._set.allows_unused and len(self._seen) < len(self._parameters):
            for index in range(len(self._parameters)):
                if index not in self._seen:
                    self._faults.add(index, Fault.missing)

    def _write_flags(self, flags: torch.Tensor) -> None:
        flags.zero_()
        if self._faults:
            flags[0] = 1
        if self._set.allows_unused and self._used:
            flags[[1 + index for index in self._used]] = 1

    def _reduced_flags(self) -> torch.Tensor:
        if not self._set.flags_apart:
            return self._set.flags()
        flags = torch.zeros(self._set.flags_count, dtype=torch.float32, device="cpu")
        self._write_flags(flags)
        # After the results of the hooks, which may issue collectives of this group from other threads.
        self._group.all_reduce(flags, ReduceOp.SUM, background=False).wait()
        return flags

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
        with _RetrievedErrors(self._works):
            for work, times in zip(self._works, step.buckets, strict=True):
                work.wait()
                times.finished = times.finished or perf_counter()
            flags = self._reduced_flags()
            for future in self.futures:
                future.wait()
        self.futures.clear()
        has_faults, used = bool(flags[0]), self._used_anywhere(flags)
        self._set.write_back(used)
        self._used.clear()
        if not self._follows_arrival:
            self._assign_by_arrival(used)
        elif self.tuning is not None:
            self._tune(self.tuning, max(each.finished for each in step.buckets) - step.backward_started)
        step.finished = perf_counter()
        self.last_step, self._step = step, None
        if has_faults:
            self._faults.raise_on_all_ranks()
        step_in_backward(self._parameters)
        if self._options.lazy_bucket_allocation and not self._options.gradient_as_bucket_view:
            for bucket in self._set.buckets:
                bucket.release()

    def _used_anywhere(self, flags: torch.Tensor) -> frozenset[int] | None:
        """Return the parameters that a rank has used; None if all are."""
        if not self._set.allows_unused:
            return None
        return frozenset(flags[1:].nonzero().flatten().tolist())

    def stand_in(self, reduction: Reduction) -> None:
        """Contribute zeros to one backward of the other ranks; this rank's own gradients do not change."""
        self._set.follow_casts()
        self._faults.clear()
        self._seen = {}
        self._used.clear()
        results = []
        for bucket in self._set.buckets:
            flat = bucket.zeros(self._parameters)
            if self._hook is None:
                self._group.all_reduce(flat, reduction, background=False).wait()
            else:
                is_last = bucket is self._set.buckets[-1]
                results.append(self._hook.start(GradientBucket(bucket, flat, self._parameters, is_last=is_last)))
        for result in results:
            result.wait()
        flags = self._reduced_flags() if self._set.flags_apart else self._set.buckets[-1].flags_of(flat)
        if not self._follows_arrival:
            self._assign_by_arrival(self._used_anywhere(flags))
        elif self.tuning is not None:
            self._tune(self.tuning, 0.0)
        if bool(flags[0]):
            self._faults.raise_on_all_ranks()

    def _assign_by_arrival(self, used: frozenset[int] | None) -> None:
        order = torch.tensor(buckets.arrival_order(self._seen, len(self._parameters)), device="cpu")
        self._group.broadcast(order, 0, background=False).wait()
        if self._options.skip_all_reduce_unused_params and used is not None:
            self._set.skipped = frozenset(range(len(self._parameters))) - used
        if self.tuning is not None:
            self._options.limits = self.tuning.limits
        self._set.assign(order.tolist())
        self._follows_arrival = True

    def _tune(self, tuning: BucketTuning, seconds: float) -> None:
        """Count a step for ``bucket_cap_mb="auto"``, and assign the buckets of the next one. All ranks call it."""
        if tuning.chosen is not None:
            return
        if tuning.record(seconds):
            medians = torch.tensor(tuning.medians, dtype=torch.float64, device="cpu")
            self._group.all_reduce(medians, ReduceOp.MAX, background=False).wait()
            if tuning.decide(medians.tolist()) and self._group.rank() == 0:
                log.info("DistributedDataParallel uses %s", tuning)
        if tuning.limits != self._options.limits:
            self._options.limits = tuning.limits
            self._set.assign()


class _RetrievedErrors:
    """A context that, if it raises, retrieves the exceptions of all works, so that none is logged."""

    def __init__(self, works: Sequence[Work | HookResult]) -> None:
        self._works = works

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for work in self._works:
                work.exception()


def _hook(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    # Weak, because the garbage collector does not see references inside autograd.
    def ready(_: torch.Tensor) -> None:
        target = reducer()
        if target is not None:
            target._ready(index)

    return ready
