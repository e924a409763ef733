"""Averages buckets over the ranks: all-reduces, or communication hooks in their place. Used by `reducer`.

The all-reduces start in the order of the buckets, whatever the order of the gradients, so that all ranks start the same
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import torch

from asyncdist.base.cores import has_free_cores
from asyncdist.base.ops import ReduceOp, Reduction
from asyncdist.ddp.backward.bucket_set import Bucket, BucketSet
from asyncdist.ddp.backward.gradient_record import GradientRecord
from asyncdist.ddp.hooks.running import GradientBucket, HookCaller, HookResult
from asyncdist.ddp.model_sync import Verification
from asyncdist.ddp.timeline import BucketTimes
from asyncdist.ddp.uneven_inputs import Joining
from asyncdist.groups import Group
from asyncdist.kernel import Work


class BucketExchange:
    """The all-reduces of one backward, or the calls of `hook`, if there is one, in their place."""

    def __init__(
        self,
        group: Group,
        bucket_set: BucketSet,
        record: GradientRecord,
        parameters: Sequence[torch.nn.Parameter],
        verification: Verification,
    ) -> None:
        self.hook: HookCaller | None = None
        self._verification = verification
        self._group, self._bucket_set, self._record, self._parameters = group, bucket_set, record, parameters
        self._overlaps = not group.shares_memory or has_free_cores(group.size(), torch.get_num_threads())
        self._works: list[Work | HookResult] = []
        self._times: Sequence[BucketTimes] = ()
        self._joining: Joining | None = None
        self._reduction: Reduction = ReduceOp.AVG

    @property
    def started(self) -> int:
        """The number of buckets whose all-reduces this backward has started."""
        return len(self._works)

    def begin(self, times: Sequence[BucketTimes], joining: Joining | None) -> None:
        """Forget the last backward. ``times`` receives those of the next one, which may run in a ``join()``."""
        self._works, self._times, self._joining = [], times, joining

    def start_full(self, full: Iterable[Bucket]) -> None:
        """Start the all-reduces of full buckets, in order; those of ``full`` have become so."""
        for bucket in full:
            self._times[bucket.index].ready = perf_counter()
        if self._overlaps or self.hook is not None:
            buckets = self._bucket_set.buckets
            # `start_rest` starts the last one: nothing is computed after it, so no background thread needs to drive it.
            while len(self._works) < len(buckets) - 1 and not buckets[len(self._works)].pending:
                self._start(background=True)

    def start_rest(self, *, background: bool) -> None:
        """Start the remaining all-reduces at the end of backward."""
        try:
            if not self._bucket_set.flags_apart:
                self._record.write_flags(self._bucket_set.flags())
            while len(self._works) < len(self._bucket_set.buckets):
                self._start(background=background)
        except BaseException:
            self._retrieve_errors()
            raise

    def _start(self, *, background: bool) -> None:
        if not self._works:
            self._reduction = ReduceOp.AVG if self._joining is None else self._joining.reduction()
            self._verification.once()
        bucket = self._bucket_set.buckets[len(self._works)]
        flat = self._bucket_set.flags() if self._bucket_set.is_alone else self._bucket_set.flat(bucket)
        if not self._bucket_set.is_alone and (bucket.pending or self._bucket_set.is_special):
            arrived = self._record.arrived
            for member in bucket.members:
                if member not in arrived:
                    self._bucket_set.fill_unused(member)
        times = self._times[bucket.index]
        times.started = perf_counter()
        if self.hook is not None:
            self._works.append(self._start_hook(self.hook, bucket, flat))
            return
        work = self._group.all_reduce(flat, self._reduction, background=background)
        self._works.append(work)
        work.add_done_callback(times.stop)

    def _start_hook(self, hook: HookCaller, bucket: Bucket, flat: torch.Tensor) -> HookResult:
        is_last = bucket is self._bucket_set.buckets[-1]
        return hook.start(GradientBucket(bucket, flat, self._parameters, is_last=is_last))

    def wait(self, futures: Iterable[Any]) -> torch.Tensor:
        """Wait for all averages and then for ``futures``; return the sums of the ranks' flags."""
        try:
            for work, times in zip(self._works, self._times, strict=True):
                work.wait()
                times.finished = times.finished or perf_counter()
            flags = self._reduced_flags()
            for future in futures:
                future.wait()
        except BaseException:
            self._retrieve_errors()
            raise
        return flags

    def average_zeros(self, reduction: Reduction) -> torch.Tensor:
        """Contribute zeros to one backward of the other ranks; return the sums of the ranks' flags."""
        self._verification.once()
        results = []
        for bucket in self._bucket_set.buckets:
            flat = bucket.zeros(self._parameters)
            if self.hook is None:
                self._group.all_reduce(flat, reduction, background=False).wait()
            else:
                results.append(self._start_hook(self.hook, bucket, flat))
        for result in results:
            result.wait()
        return self._reduced_flags() if self._bucket_set.flags_apart else self._bucket_set.buckets[-1].flags_of(flat)

    def _reduced_flags(self) -> torch.Tensor:
        if not self._bucket_set.flags_apart:
            return self._bucket_set.flags()
        flags = torch.zeros(self._bucket_set.flags_count, dtype=torch.float32, device="cpu")
        self._record.write_flags(flags)
        # After the results of the hooks, which may issue collectives of this group from other threads.
        self._group.all_reduce(flags, ReduceOp.SUM, background=False).wait()
        return flags

    def _retrieve_errors(self) -> None:
        """Retrieve the exceptions of all all-reduces, so that none is logged. The futures of hooks log none."""
        for work in self._works:
            if not isinstance(work, HookResult):
                work.exception()
