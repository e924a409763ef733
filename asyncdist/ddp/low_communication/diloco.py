"""`DiLoCo` and `LocalSGD`: ranks train on their own, and combine what they have learned every now and then.

`asyncdist` exports the awaited classes, `asyncdist.sync` the blocking ones under the same names.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from torch import nn
from torch.optim import Optimizer

from asyncdist.base.callables import Closure
from asyncdist.ddp.low_communication.outer_training import OuterTraining, outer_sgd

T = TypeVar("T")


def _ran(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call that waits in this thread, and so never suspends."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("the call of a blocking program has suspended")


class _Blocking(OuterTraining):
    """The calls of a program without an event loop."""

    _blocks = True

    def __enter__(self) -> Self:
        return _ran(self.__aenter__())

    def __exit__(self, *error: Any) -> None:
        _ran(self.__aexit__(*error))

    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Do the same as `DiLoCo.step`. Raises LoopThreadError too, if the calling thread runs an event loop."""
        return _ran(super().step(closure))

    def synchronize(self) -> None:  # type: ignore[override]
        """Do the same as `DiLoCo.synchronize`."""
        _ran(super().synchronize())


class DiLoCo(OuterTraining):
    """Train each member on its own, and every few hundred steps take an outer step with what all have changed.

    Each member takes ``every`` steps of its inner optimizer on its own data. The difference between the outer parameters
    and its own is its pseudo-gradient. The outer optimizer steps with the average of all members' pseudo-gradients, and
    every member goes on from the result. Members send 1 / ``every`` of the bytes of data-parallel training, and fewer with
    ``compress``.

    With ``delay`` the exchange proceeds while the next inner steps compute: in the program's event loop while that is
    free, so compute in a worker thread (``await asyncio.to_thread(...)``). With ``fragments`` the model is exchanged in
    parts at different steps, which needs a fraction of the bandwidth at any time.

    If a member is lost, the survivors agree on who is left (`Group.regroup`), and repeat the exchange with their own
    pseudo-gradients. No inner step is repeated. All members take the same outer steps.

    In a job whose members change, enter each generation: ``async with diloco.on(group):``. Members that lack the outer
    state receive it. `Group.changed` becomes True after an outer step, on all members at the same inner step.

    Args:
        model: The model. At the start rank 0's values overwrite those of the other ranks.
        inner: The optimizer of each step. Its state stays local.
        outer: The optimizer of the outer steps, made of ``model.parameters()``; None means SGD with a learning rate of 0.7
            and Nesterov momentum 0.9.
        every: Inner steps between two exchanges of a fragment.
        fragments: How many parts of about equal size the model is exchanged in; or a sequence of modules or of iterables
            of parameters, one for each part.
        delay: Inner steps during which an exchange may proceed, less than ``every``. Its result is used after exactly as
            many steps on all members, which wait for it if it is late. 0 waits at once.
        alpha: The share of its own value that a parameter keeps when it gets the outer value. With 0, what the ``delay``
            steps have changed is lost.
        compress: How pseudo-gradients travel: ``"bf16"``, ``"int8"``, ``"int4"`` with error feedback, a codec, or None.
        group: The members; None is the default group. Exchanges use channels of their own, so the program may use the
            group for other calls.
        min_size: The fewest members with which to go on after a loss.

    Attributes:
        inner_steps: Steps of the inner optimizer since the beginning of the training.
        outer_steps: Outer steps of fragments since the beginning of the training.
        savings: What was sent, and what data-parallel training would have sent: `CommunicationSavings`. It is logged at
            the end of the block.

    Raises:
        MismatchError: On entering: the ranks have different arguments or models. Every rank raises it.
        UsageError: An argument is out of range, or ``outer`` lacks a parameter. ``step`` raises it if a parameter was
            added, replaced or unfrozen since this object was made: members would not exchange it.
        NoQuorumError: Too few members are left, or others may go on elsewhere. ``step`` raises it.

    Source: Douillard et al., "DiLoCo" (arXiv 2311.08105) and "Streaming DiLoCo" (arXiv 2501.18512).

    Example:
        >>> async with dist.DiLoCo(model, inner, every=100, fragments=4, delay=5, compress="int8") as diloco:
        ...     for batch in batches:
        ...         await asyncio.to_thread(compute_gradients, model, batch)
        ...         await diloco.step()
        ...         inner.zero_grad()
        ...     await diloco.synchronize()
        ...     print(diloco.savings)
    """


class LocalSGD(OuterTraining):
    """Train each member on its own, and average the parameters of all members every few steps.

    It is `DiLoCo` whose outer step takes the average as it is. The other arguments, attributes and errors are the same.

    Args:
        model: The model. At the start rank 0's values overwrite those of the other ranks.
        optimizer: The optimizer of each step. Its state stays local.
        every: Steps between two averages of a fragment.
        options: ``fragments``, ``delay``, ``alpha``, ``compress``, ``group`` and ``min_size`` of `DiLoCo`.

    Source: Stich, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767).

    Example:
        >>> async with dist.LocalSGD(model, optimizer, every=8) as local:
        ...     for batch in batches:
        ...         await asyncio.to_thread(compute_gradients, model, batch)
        ...         await local.step()
        ...         optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, every: int, **options: Any) -> None:
        super().__init__(model, optimizer, outer_sgd(model, lr=1.0), every=every, **options)


class BlockingDiLoCo(_Blocking, DiLoCo):
    """`DiLoCo` for programs without an event loop: ``with``, and calls that block.

    `asyncdist.sync` exports it as DiLoCo. Exchanges with ``delay`` proceed in the thread of the background loop while this
    thread computes. The arguments, attributes and errors are those of `asyncdist.DiLoCo`.

    Example:
        >>> with dist.DiLoCo(model, inner, every=100, fragments=4, delay=5, compress="int8") as diloco:
        ...     for inputs, targets in batches:
        ...         loss_of(model(inputs), targets).backward()
        ...         diloco.step()
        ...         inner.zero_grad()
        ...     diloco.synchronize()
        ...     print(diloco.savings)
    """


class BlockingLocalSGD(_Blocking, LocalSGD):
    """`LocalSGD` for programs without an event loop: ``with``, and calls that block.

    `asyncdist.sync` exports it as LocalSGD. The arguments, attributes and errors are those of `asyncdist.LocalSGD`.

    Example:
        >>> with dist.LocalSGD(model, optimizer, every=8) as local:
        ...     for inputs, targets in batches:
        ...         loss_of(model(inputs), targets).backward()
        ...         local.step()
        ...         optimizer.zero_grad()
    """
