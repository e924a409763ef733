"""Which gradients one backward has given this rank, and what is wrong with them. Used by `reducer`."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from asyncdist.ddp.backward.bucket_set import Bucket, BucketSet, ReducerOptions
from asyncdist.ddp.backward.faults import Fault, Faults


class GradientRecord:
    """Counts the gradients of one backward, and copies them into their buckets. Parameters are known by their numbers.

    Attributes:
        seen: How many gradients each parameter got in this backward, in the order in which the first ones arrived.
        used: Parameters that got a gradient since the last averages; kept only where parameters may be unused.
        faults: The faults that this rank has found in this backward.
    """

    def __init__(self, bucket_set: BucketSet, options: ReducerOptions, faults: Faults, count: int) -> None:
        self.seen: dict[int, int] = {}
        self.used: set[int] = set()
        self.faults = faults
        self._bucket_set, self._options, self._parameter_count = bucket_set, options, count
        # With a static graph or skipped parameters: those whose last gradient has arrived.
        self._filled: set[int] = set()
        # With a static graph, what `seen` was in the first backward.
        self._expected: dict[int, int] | None = None

    @property
    def arrived(self) -> Container[int]:
        """The parameters whose gradients are complete."""
        return self._filled if self._bucket_set.is_special else self.seen

    def begin(self) -> None:
        """Forget the last backward, except for `used`."""
        self.seen = {}
        self._filled.clear()
        self.faults.clear()
        expected = self._expected
        for bucket in self._bucket_set.buckets:
            members = bucket.members
            bucket.pending = len(members) if expected is None else sum(member in expected for member in members)
            bucket.unfilled.clear()

    def add(self, arrived: Iterable[int]) -> list[Bucket]:
        """Count the gradients of parameters, and return the buckets that have become full."""
        bucket_set, seen = self._bucket_set, self.seen
        bucket_of, large, is_special = bucket_set.bucket_of, bucket_set.large, bucket_set.is_special
        full: list[Bucket] = []
        for index in arrived:
            if index not in seen and not is_special:
                seen[index] = 1
            elif not self._is_complete(index):
                continue
            bucket = bucket_of[index]
            bucket.pending -= 1
            bucket.unfilled.append(index)
            if not bucket.pending:
                full.append(bucket)
            # A large gradient is copied while it is in the cache, small ones together.
            if not bucket.pending or index in large:
                bucket_set.fill(bucket, self.faults)
        return full

    def _is_complete(self, index: int) -> bool:
        """Count a gradient of a static graph, of a skipped parameter, or after the first one; return if it is the last."""
        count = self.seen[index] = self.seen.get(index, 0) + 1
        expected = 1 if not self._options.static_graph else (self._expected or {}).get(index, 0)
        if index in self._bucket_set.skipped:
            self.faults.add(index, Fault.skipped)
        elif not self._options.static_graph and count > 1:
            self.faults.add(index, Fault.repeated)
        elif self._expected is not None and count > expected:
            self.faults.add(index, Fault.changed)
        elif count == expected:
            self._filled.add(index)
            return True
        return False

    def end(self) -> list[Bucket]:
        """Look for faults after a backward, and copy what is left; return the buckets that became full by this.

        These are the buckets of a static graph in the first backward.
        """
        full: list[Bucket] = []
        if self._options.static_graph and self._expected is None:
            self._expected = dict(self.seen)
            self._filled.update(self.seen)
            for index in self.seen:
                bucket = self._bucket_set.bucket_of[index]
                bucket.pending -= 1
                bucket.unfilled.append(index)
                if not bucket.pending:
                    full.append(bucket)
        elif self._expected is not None:
            for index, count in self._expected.items():
                if self.seen.get(index, 0) < count:
                    self.faults.add(index, Fault.changed)
        elif not self._bucket_set.allows_unused and len(self.seen) < self._parameter_count:
            for index in range(self._parameter_count):
                if index not in self.seen:
                    self.faults.add(index, Fault.missing)
        for bucket in self._bucket_set.buckets:
            self._bucket_set.fill(bucket, self.faults)
        return full

    def write_flags(self, flags: torch.Tensor) -> None:
        """Write what the other ranks must know: whether there are faults, and which parameters were used."""
        flags.zero_()
        if self.faults:
            flags[0] = 1
        if self._bucket_set.allows_unused and self.used:
            flags[[1 + index for index in self.used]] = 1
