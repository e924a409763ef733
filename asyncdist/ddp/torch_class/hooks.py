"""Hooks that torch's class takes by private methods, or makes itself. Used by `names` and `module`."""

from __future__ import annotations

from typing import Any

import torch

from asyncdist.base.callables import AnyFunction
from asyncdist.ddp.hooks import casts
from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.ddp.hooks.running import AwaitedHook
from asyncdist.errors import UsageError
from asyncdist.groups import Group
from asyncdist.kernel import torch_private


class BufferHook:
    """What a forward calls instead of broadcasting buffers; `location` is "PRE_FORWARD" or "POST_FORWARD"."""

    def __init__(self, state: object, hook: AnyFunction, location: Any) -> None:
        self.location = getattr(location, "name", location)
        if not callable(hook):
            raise UsageError(f"a buffer hook is a function of (state, buffers by name), not {hook!r}")
        if self.location not in ("PRE_FORWARD", "POST_FORWARD"):
            raise UsageError(f"comm_hook_location is 'PRE_FORWARD' or 'POST_FORWARD', not {location!r}")
        self._state, self._hook = state, hook

    def call(self, buffers: dict[str, torch.Tensor]) -> list[Any]:
        """Call the hook, and return the futures for which the end of backward waits."""
        # The backward of an earlier forward must not raise because the hook has changed a buffer.
        unchanged = torch_private.preserve_versions(tuple(buffers.values()))
        with torch.no_grad(), unchanged:
            return list(self._hook(self._state, buffers) or ())


def builtin_hook(kind: Any) -> AwaitedHook:
    """Return the hook for torch's ``BuiltinCommHookType``."""
    hooks: dict[str, AwaitedHook] = {"ALLREDUCE": casts.average, "FP16_COMPRESS": casts.fp16}
    found = hooks.get(getattr(kind, "name", str(kind)))
    if found is None:
        raise UsageError(f"{kind!r} is not a built-in communication hook: pass ALLREDUCE or FP16_COMPRESS")
    return found


def fused_step(kind: type, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AwaitedHook:
    """Return a hook that averages a bucket and then steps a functional optimizer for each of its parameters.

    Raises:
        UsageError: torch has no functional form of the optimizer.
    """
    from torch.distributed.optim import as_functional_optim

    try:
        optimizer: Any = as_functional_optim(kind, *args, **kwargs)
    except ValueError as error:
        raise UsageError(
            f"{kind.__name__} cannot step in backward: {error}; call its step() after backward()"
        ) from error
    chosen = None if wanted is None else set(wanted)

    async def average_and_step(bucket: GradientBucket, group: Group) -> torch.Tensor:
        averages = await casts.average(bucket, group)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if chosen is None or parameter in chosen:
                optimizer.step_param(parameter, gradient)
        return averages

    return average_and_step
