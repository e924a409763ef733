"""Optimizers that torch's ``_apply_optimizer_in_backward`` attaches to parameters: they step after the averages.

torch registers a hook that steps as soon as a gradient is accumulated, which is before it is averaged. `reducer` removes
that hook, as torch's DistributedDataParallel does, and steps when the averages are complete.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def take_over(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Remove the hooks with which optimizers step before the gradients of ``parameters`` are averaged."""
    module = sys.modules.get(_MODULE)
    handles = getattr(module, "param_to_optim_hook_handle_map", None)
    if handles:
        for parameter in parameters:
            for handle in handles.get(parameter, ()):
                handle.remove()


def step_in_backward(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Step the optimizers that are attached to ``parameters``, and clear the gradients that they have used."""
    if _MODULE in sys.modules:
        for parameter in parameters:
            optimizers: Iterable[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
            for optimizer in optimizers:
                optimizer.step()
            if optimizers:
                parameter.grad = None
