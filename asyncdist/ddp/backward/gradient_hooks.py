"""The hooks by which autograd tells a reducer of gradients, and optimizers that step in backward. Used by `reducer`."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from asyncdist.base.callables import Callback

GradientHook = Callable[[torch.Tensor], None]
"""What autograd calls with a parameter that has got its gradient."""

_attributes: Callable[[torch.Tensor], dict[str, Any]] = attrgetter("__dict__")


class GradientHooks:
    """One hook for each parameter, which autograd calls when it has accumulated a gradient.

    `torch.utils.swap_tensors`, which `torch.nn.Module.load_state_dict` and ``to`` may use, exchanges what two tensors refer
    to. Then autograd calls the hooks of a parameter for the other tensor. The dictionaries of attributes are exchanged too,
    by which `restore` notices it.

    Attributes:
        is_installed: Whether the hooks were installed, and not removed.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._hooks: Sequence[GradientHook] = ()
        self._hooks_of_parameters: list[Any] = []
        self._attributes: list[dict[str, Any]] = []
        self._is_complete = False
        self.is_installed = False

    def install(self, hooks: Sequence[GradientHook]) -> None:
        """Replace the hooks; there is one for each parameter."""
        self.remove()
        for each, attributes in zip(self._parameters, self._attributes, strict=False):
            # torch adds a hook to the dictionary that the object has, which after a swap autograd does not know.
            if each.__dict__ is not attributes:
                each._post_accumulate_grad_hooks = OrderedDict(each._post_accumulate_grad_hooks or {})
        self._hooks, self.is_installed = hooks, True
        self._attributes = [each.__dict__ for each in self._parameters]
        for each, hook in zip(self._parameters, hooks, strict=True):
            # torch refuses a hook of a parameter that requires no gradient now. `restore` adds it later.
            if each.requires_grad:
                self._handles.append(each.register_post_accumulate_grad_hook(hook))
                self._hooks_of_parameters.append(each._post_accumulate_grad_hooks)
        self._is_complete = len(self._handles) == len(self._parameters)

    def install_once(self, hook: GradientHook) -> None:
        """Replace the hooks by one that autograd calls until the next change: it goes with the graph of the next forward.

        A parameter that has had a hook costs each backward as much as one that has. These are hooks of autograd's nodes.
        """
        self.remove()
        for each in self._parameters:
            if each.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(each).node
                self._nodes.append(node)
                self._handles.append(node.register_hook(_of_node(hook, each)))

    def restore(self) -> None:
        """Add hooks that parameters lack, because they were swapped with other tensors or required no gradient before."""
        if self._is_complete and all(map(is_, map(_attributes, self._parameters), self._attributes)):
            return
        if self.is_installed:
            self.install(self._hooks)

    def remove(self) -> None:
        """Remove the hooks: later backwards call nothing."""
        self.is_installed = self._is_complete = False
        self._hooks_of_parameters.clear()
        self._nodes.clear()
        while self._handles:
            self._handles.pop().remove()

    def keep_last(self) -> None:
        """Let hooks of the user's that were registered later run earlier, as in torch: they may change the gradient."""
        if sum(map(len, self._hooks_of_parameters)) > len(self._handles):
            for hooks, handle in zip(self._hooks_of_parameters, self._handles, strict=True):
                # Not `move_to_end`: torch calls the hooks in the order of their insertion.
                hooks[handle.id] = hooks.pop(handle.id)


def _of_node(hook: GradientHook, parameter: torch.Tensor) -> Callable[..., None]:
    return lambda *_: hook(parameter)


class Arrivals:
    """The parameters that got a gradient, in that order; after too many, the first ones are forgotten.

    autograd calls a hook for each parameter. A function in Python costs 2 to 3 microseconds a call, most of the bookkeeping
    of a model with many small parameters. `record` is a method in C, so the call runs no Python code, and costs 0.7.

    Args:
        parameters: All parameters, by number.

    Attributes:
        record: The hook of autograd: takes a parameter, and returns None.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        # A backward that gives no parameter two gradients records one each. With a limit, a program whose backwards are
        # never averaged does not fill the memory.
        self._recorded: deque[torch.Tensor] = deque(maxlen=len(parameters) + 1)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self.record: Callable[[torch.Tensor], None] = self._recorded.append
        self.clear: Callback = self._recorded.clear

    def __bool__(self) -> bool:
        return bool(self._recorded)

    def take(self) -> list[int]:
        """Return the numbers of the recorded parameters, and forget them. Other threads may record more."""
        number_of, first = self._numbers.get, self._recorded.popleft
        numbers = [number_of(id(first())) for _ in range(len(self._recorded))]
        # A parameter that was swapped after its forward is another tensor here, and lacks its gradient.
        return [number for number in numbers if number is not None]


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
