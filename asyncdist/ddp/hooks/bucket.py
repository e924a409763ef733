"""The bucket that a communication hook receives. `reducer` makes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncdist.ddp.backward.bucket_set import Bucket
from asyncdist.errors import UnsupportedError


class GradientBucket:
    """One full bucket of gradients of this rank, with the methods of `torch.distributed.GradBucket`.

    Torch's class cannot be made in Python, so ``isinstance(bucket, torch.distributed.GradBucket)`` is false.

    Example:
        >>> async def average(bucket, group):
        ...     await group.all_reduce(bucket.buffer(), ReduceOp.AVG)
        ...     return bucket.buffer()
    """

    def __init__(
        self, bucket: Bucket, flat: torch.Tensor, parameters: Sequence[torch.nn.Parameter], *, is_last: bool
    ) -> None:
        self._bucket, self._flat, self._all, self._is_last = bucket, flat, parameters, is_last
        self.memory = flat
        """The bucket's own tensor, which receives the result; `set_buffer` does not replace it."""

    def index(self) -> int:
        """Return the place of the bucket in the order of the hooks' calls."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return the gradients of this rank as one flat tensor, not divided by the number of ranks."""
        return self._flat

    def real_buffer(self) -> torch.Tensor:
        """Return `buffer`, for a hook that sends fewer bits of real numbers.

        Raises:
            UnsupportedError: The gradients are complex.
        """
        if self._flat.is_complex():
            raise UnsupportedError("the hook cannot compress complex gradients: use hooks.average or hooks.PowerSGD")
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        """Return views of `buffer`, one for each parameter, with the parameter's shape."""
        return self._bucket.gradients_in(self._flat)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in the order of `gradients`."""
        return [self._all[member] for member in self._bucket.members]

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def key(self) -> tuple[int, ...]:
        """Return the numbers of the parameters, for what a hook keeps from step to step.

        Parameters are assigned to buckets again after the first step, so an index does not identify a bucket.
        """
        return tuple(self._bucket.members)

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor that `buffer` returns, for example by one of another dtype, for a hook that is wrapped."""
        self._flat = buffer
