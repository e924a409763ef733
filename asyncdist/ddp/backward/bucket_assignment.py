"""Assigns parameters to buckets by what the ranks agree on after each step. Used by `reducer`.

After the first backward, parameters are assigned in the order in which rank 0's gradients arrived. With
``bucket_cap_mb="auto"``, the size of the buckets follows what the ranks have measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.ddp import buckets
from asyncdist.ddp.backward.bucket_set import BucketSet, ReducerOptions
from asyncdist.ddp.backward.bucket_tuning import BucketTuning
from asyncdist.ddp.backward.step_times import StepTimes
from asyncdist.groups import Group

log = logging.getLogger("asyncdist")


class BucketAssignment:
    """Decides which parameters the buckets of the next step hold.

    Attributes:
        follows_arrival: Whether the buckets follow the order of the gradients in the first backward.
        tuning: With ``bucket_cap_mb="auto"``, the sizes that are tried; else None.
    """

    def __init__(self, group: Group, bucket_set: BucketSet, options: ReducerOptions, nbytes: int, count: int) -> None:
        self.follows_arrival = False
        self.tuning = BucketTuning(nbytes, tries=group.size() > 1) if options.tunes_buckets else None
        self._group, self._bucket_set, self._options, self._parameter_count = group, bucket_set, options, count

    def follow(self, arrived: Iterable[int], used: frozenset[int] | None, step: StepTimes | None) -> None:
        """Assign the buckets of the next step. All ranks call it after each step.

        Args:
            arrived: The parameters that got a gradient, in that order.
            used: The parameters that a rank has used; None if all are.
            step: The times of this rank's step; None if it has computed nothing.
        """
        if not self.follows_arrival:
            self._follow_arrival(arrived, used)
        elif self.tuning is not None and self.tuning.chosen is None:
            seconds = 0.0 if step is None else max(each.finished for each in step.buckets) - step.backward_started
            self._tune(self.tuning, seconds)

    def _follow_arrival(self, arrived: Iterable[int], used: frozenset[int] | None) -> None:
        order = torch.tensor(buckets.arrival_order(arrived, self._parameter_count), device="cpu")
        self._group.broadcast(order, 0, background=False).wait()
        if self._options.skip_all_reduce_unused_params and used is not None:
            self._bucket_set.skipped = frozenset(range(self._parameter_count)) - used
        if self.tuning is not None:
            self._options.limits = self.tuning.limits
        self._bucket_set.assign(order.tolist())
        self.follows_arrival = True

    def _tune(self, tuning: BucketTuning, seconds: float) -> None:
        if tuning.record(seconds):
            medians = torch.tensor(tuning.medians, dtype=torch.float64, device="cpu")
            self._group.all_reduce(medians, ReduceOp.MAX, background=False).wait()
            if tuning.decide(medians.tolist()) and self._group.rank() == 0:
                log.info("DistributedDataParallel uses %s", tuning)
        if tuning.limits != self._options.limits:
            self._options.limits = tuning.limits
            self._bucket_set.assign()
