"""The bucket that a communication hook receives, and the calls of hooks of both interfaces. Used by `reducer`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from asyncdist.base.background_loop import new_loop
from asyncdist.base.daemon_threads import DaemonThreadPool
from asyncdist.ddp.backward.bucket_set import Bucket
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.groups import Group
from asyncdist.kernel import torch_private


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


AwaitedHook = Callable[[GradientBucket, Group], Awaitable[torch.Tensor]]
TorchHook = Callable[[Any, GradientBucket], torch.futures.Future[torch.Tensor]]


class HookResult:
    """The result of one call of a hook, which its future is to hold."""

    def __init__(
        self, name: str, bucket: GradientBucket, future: torch.futures.Future[Any] | concurrent.futures.Future[Any]
    ) -> None:
        self._name, self._bucket, self._flat, self._future = name, bucket, bucket.memory, future

    def wait(self) -> None:
        """Wait for the hook's tensor, and copy it into the bucket unless it is the bucket's own."""
        future = self._future
        value = future.result() if isinstance(future, concurrent.futures.Future) else future.wait()
        # torch's own hooks may return the list that a work's future contains.
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != self._flat.numel():
            found = f"a tensor of {value.numel()} elements" if isinstance(value, torch.Tensor) else repr(value)
            raise UsageError(
                f"communication hook {self._name!r} returned {found} for bucket {self._bucket.index()}: return a tensor "
                f"of {self._flat.numel()} elements, as bucket.buffer() has"
            )
        if value.data_ptr() != self._flat.data_ptr() or value.dtype is not self._flat.dtype:
            self._flat.copy_(value.detach().view(self._flat.shape))


class TorchHookCaller:
    """Calls ``hook(state, bucket)``, which returns a `torch.futures.Future`, in the thread of backward."""

    def __init__(self, state: object, hook: TorchHook) -> None:
        check_torch_hook(hook)
        self.name = getattr(hook, "__qualname__", repr(hook))
        self._state, self._hook = state, hook

    def start(self, bucket: GradientBucket) -> HookResult:
        """Call the hook in this thread."""
        future = self._hook(self._state, bucket)
        if not isinstance(future, torch_private.AnyFuture):
            raise UsageError(
                f"communication hook {self.name!r} returned {future!r}: return a torch.futures.Future of one tensor, such "
                "as work.get_future(); a coroutine function belongs into register_async_comm_hook()"
            )
        return HookResult(self.name, bucket, future)


def check_torch_hook(hook: object) -> None:
    """Raise UsageError unless ``hook`` can be called as torch calls communication hooks."""
    if not callable(hook):
        raise UsageError(f"a communication hook is a function of (state, bucket), not {hook!r}")
    if inspect.iscoroutinefunction(hook):
        raise UsageError(
            "register_comm_hook() takes torch's hooks; pass a coroutine function to register_async_comm_hook()"
        )
    signature = inspect.signature(hook)
    if len([each for each in signature.parameters.values() if each.default is each.empty]) != 2:
        raise UsageError(f"a communication hook takes two arguments, state and bucket, not {signature}")
    annotation = getattr(signature.parameters.get("bucket"), "annotation", inspect.Parameter.empty)
    if annotation not in (inspect.Parameter.empty, GradientBucket) and "GradBucket" not in str(annotation):
        raise UsageError(f"the hook's bucket is a torch.distributed.GradBucket, but its annotation is {annotation!r}")
    if signature.return_annotation is not inspect.Signature.empty and "Future" not in str(signature.return_annotation):
        raise UsageError(
            "a communication hook returns torch.futures.Future[torch.Tensor], but its annotation is "
            f"{signature.return_annotation!r}"
        )
    distributed = sys.modules.get("torch.distributed")
    of_torch = str(getattr(inspect.unwrap(hook), "__module__", "")).startswith("torch.distributed.")
    if of_torch and not (distributed is not None and distributed.is_available() and distributed.is_initialized()):
        raise UsageError(
            f"{getattr(hook, '__qualname__', hook)!r} communicates over torch.distributed, which has no process group: "
            'import asyncdist.torch_backend and call torch.distributed.init_process_group("asyncdist"), or use a hook of '
            "asyncdist.ddp.hooks"
        )


_hooks_of: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()
"""The number of awaited hooks that each group has had. All ranks register their hooks in the same order."""


class AwaitedHookCaller:
    """Runs ``await hook(bucket, group)`` for one bucket after the other, on an event loop in a thread of its own.

    The hooks of two buckets never run at the same time, so every rank issues their collectives in the same order. The
    group is a sibling of the model's, so collectives of other threads may go on.
    """

    def __init__(self, hook: AwaitedHook, group: Group) -> None:
        if not callable(hook):
            raise UsageError(f"an awaited communication hook is a coroutine function of (bucket, group), not {hook!r}")
        self.name = getattr(hook, "__qualname__", type(hook).__qualname__)
        number = _hooks_of[group] = _hooks_of.get(group, 0) + 1
        self._hook, self._group = hook, group._sibling(f"communication hook {number}")
        self._thread = DaemonThreadPool("asyncdist-comm-hook", 1, idle_timeout=1.0)
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def start(self, bucket: GradientBucket) -> HookResult:
        """Run the hook after those of earlier buckets."""
        return HookResult(self.name, bucket, self._thread.submit(self._run, bucket))

    def _run(self, bucket: GradientBucket) -> torch.Tensor:
        with torch.no_grad(), asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(self._call(bucket))

    async def _call(self, bucket: GradientBucket) -> torch.Tensor:
        return await self._hook(bucket, self._group)


HookCaller = TorchHookCaller | AwaitedHookCaller
"""Calls a user's hook for each full bucket, in the order of the buckets."""
