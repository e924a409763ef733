"""Questions about tensors and nodes of autograd. Used by `module`, `reducer` and `direct_gradients`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from asyncdist.errors import GradientError
from asyncdist.kernel import torch_private
from asyncdist.kernel.c10d_private import is_in_distributed_autograd


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in lists, tuples, dictionaries and dataclasses, as torch's DDP finds them in an output."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in dataclasses.fields(value)])


def accumulates(node: Any) -> bool | None:
    """Return whether the backward accumulates a node's gradient into ``grad``; None if `torch.autograd.grad` returns it."""
    # torch raises RuntimeError for leaves inside `torch.autograd.grad`.
    try:
        return torch_private.will_execute_node(node)
    except RuntimeError:
        return None


def refuse_silent_gradients(names: Sequence[str], parameters: Sequence[torch.nn.Parameter], *, hooked: bool) -> None:
    """Raise GradientError if autograd has computed gradients of ``parameters`` of which no hook was told.

    Called when autograd has ended. `torch.autograd.grad` returns gradients instead of accumulating them; if it keeps the
    graph, that is meant for a backward later.

    If the parameters have no hooks (``hooked``), gradients that are accumulated are not refused.
    """
    found = [
        (name, accumulates(torch.autograd.graph.get_gradient_edge(each).node))
        for name, each in zip(names, parameters, strict=True)
        if each.requires_grad
    ]
    lost = [name for name, accumulated in found if accumulated]
    if lost and hooked:
        raise GradientError(
            "the hooks by which ranks average the gradients of {parameters} have been removed, so these are this rank's "
            "own: do not change the hooks of parameters, or wrap the model after all changes",
            lost,
        )
    returned = [name for name, accumulated in found if accumulated is None]
    if returned and not torch_private.keeps_graph():
        raise GradientError(
            "torch.autograd.grad computed gradients of {parameters}, which are this rank's own and not averages: call "
            "backward(), and read the averages from grad; for this rank's own gradients pass retain_graph=True, or "
            "differentiate the output of model.module",
            returned,
        )


def refuse_distributed_autograd(names: Sequence[str]) -> None:
    """Raise GradientError inside a context of `torch.distributed.autograd`, whose backward accumulates no gradients."""
    if not is_in_distributed_autograd():
        return
    raise GradientError(
        "this forward runs inside torch.distributed.autograd.context(), whose backward returns the gradients of "
        "{parameters} instead of accumulating them, so the ranks would not average them: run it outside the context and "
        "call backward(), or use torch's DistributedDataParallel on the back end of asyncdist.torch_backend",
        names,
    )


def first_leaf(node: Any) -> Any:
    """Return the node of a leaf from which ``node`` was computed; None if it was computed from no leaf."""
    seen, left = set(), [node]
    while left:
        each = left.pop()
        if hasattr(each, "variable"):
            return each
        if each not in seen:
            seen.add(each)
            left += [edge for edge, _ in each.next_functions if edge is not None]
    return None
