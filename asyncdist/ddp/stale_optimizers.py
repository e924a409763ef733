"""The warning that the state of an optimizer is older on a rank that ran out of inputs. Used by `uneven_inputs`.

Inside ``join()`` such a rank makes fewer steps, so its momentum or moments differ from those of the other ranks. The
parameters are equal after the block, and the first step after it makes them differ.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_watches: list[OptimizerWatch] = []
_is_hooked = False


class OptimizerWatch:
    """The optimizers that step the parameters of one model on this rank, from the construction to `close`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        global _is_hooked
        self.stands_in = False
        """Whether this rank has run out of inputs."""
        self._parameters = set(map(id, parameters))
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _watches.append(self)
        # Never removed: torch iterates over these hooks while another thread steps.
        if not _is_hooked:
            _is_hooked = True
            register_optimizer_step_post_hook(_note_step)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer, of this model or not, has made a step."""
        # Torch's Join lets a ZeroRedundancyOptimizer follow the steps of the other ranks.
        if self.stands_in:
            self._stepped.discard(optimizer)
        elif any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"]):
            self._stepped.add(optimizer)

    def close(self) -> None:
        """Stop looking at steps. Idempotent."""
        with contextlib.suppress(ValueError):
            _watches.remove(self)

    def warn_at_next_steps(self, source: int) -> None:
        """Warn at the next step of each optimizer if its state is what it is now; global rank ``source`` has the newest."""
        for optimizer in self._stepped:
            state = _first_state(optimizer)
            if state is not None:
                _warn_at_next_step(optimizer, state, source)


def _note_step(optimizer: Optimizer, *_: Any) -> None:
    for watch in tuple(_watches):
        watch.note_step(optimizer)


def _first_state(optimizer: Optimizer) -> torch.Tensor | None:
    """Return a tensor of the state that depends on gradients, such as a momentum buffer; None without one."""
    states = (each for state in optimizer.state.values() for each in state.values())
    return next((each for each in states if isinstance(each, torch.Tensor) and each.dim() > 0), None)


def _warn_at_next_step(optimizer: Optimizer, state: torch.Tensor, source: int) -> None:
    before = state.detach().clone()

    def check(*_: Any) -> None:
        hook.remove()
        now = _first_state(optimizer)
        if now is not None and now.shape == before.shape and torch.equal(now, before):
            warnings.warn(
                f"the state of this {type(optimizer).__name__} is older than that of rank {source}, because this rank ran "
                "out of inputs before it in join(): from this step on, the parameters of the ranks drift apart. After each "
                f"join() broadcast the tensors in optimizer.state from rank {source} on all ranks, or use an optimizer "
                "without state",
                stacklevel=3,
            )

    hook = optimizer.register_step_pre_hook(check)
