"""The hooks by which autograd tells a reducer of gradients. Used by `reducer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class GradientHooks:
    """One hook for each parameter, which autograd calls when it has accumulated a gradient."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self._hooks_of_parameters: list[Any] = []

    def install(self, hook_of: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        """Replace the hooks by those that ``hook_of`` returns for the numbers of the parameters."""
        self.remove()
        self._handles = [
            each.register_post_accumulate_grad_hook(hook_of(index)) for index, each in enumerate(self._parameters)
        ]
        self._hooks_of_parameters = [each._post_accumulate_grad_hooks for each in self._parameters]

    def remove(self) -> None:
        """Remove the hooks: later backwards call nothing."""
        while self._handles:
            self._handles.pop().remove()

    def keep_last(self) -> None:
        """Let hooks of the user's that were registered later run earlier, as in torch: they may change the gradient."""
        if sum(map(len, self._hooks_of_parameters)) > len(self._handles):
            for hooks, handle in zip(self._hooks_of_parameters, self._handles, strict=False):
                # Not `move_to_end`: torch calls the hooks in the order of their insertion.
                hooks[handle.id] = hooks.pop(handle.id)
