"""The parts of a model that members exchange one at a time, with their outer parameters and the outer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from asyncdist.ddp.compression import ErrorFeedback
from asyncdist.errors import UsageError

Named = tuple[str, nn.Parameter]


class Fragment:
    """Some parameters of a model, and their outer values, which are equal on all members.

    Args:
        members: Names and parameters, of one device.

    Attributes:
        outer: The outer values of all parameters, one after the other: float32, or float64 if a parameter is. Those of a
            complex parameter are pairs of real numbers.
        feedback: The error of compression of this fragment's pseudo-gradients.
        exchanged_at: The number of inner steps at the last exchange.
    """

    def __init__(self, members: Sequence[Named]) -> None:
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        devices = {parameter.device for parameter in self.parameters}
        if len(devices) > 1:
            raise UsageError(
                f"a fragment has parameters on {', '.join(sorted(map(str, devices)))}: pass fragments=[...] with one "
                "device each"
            )
        wide = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in self.parameters)
        self._dtype = torch.float64 if wide else torch.float32
        self.feedback = ErrorFeedback()
        self.exchanged_at = 0
        self.reset_outer()

    @property
    def gradient_nbytes(self) -> int:
        """The bytes of the gradients of the parameters."""
        return sum(parameter.nbytes for parameter in self.parameters)

    def reset_outer(self) -> None:
        """Take the parameters as the outer values."""
        self.outer = self._flat()

    def _flat(self) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([_reals(parameter).reshape(-1).to(self._dtype) for parameter in self.parameters])

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with its part of ``flat``, in the shape of its real numbers; see `_reals`."""
        reals = [_reals(parameter) for parameter in self.parameters]
        parts = flat.split([each.numel() for each in reals])
        for parameter, each, part in zip(self.parameters, reals, parts, strict=True):
            yield parameter, part.view(each.shape)

    def outer_values(self) -> dict[str, torch.Tensor]:
        """Return the outer values by the names of the parameters, as views; complex ones as pairs of real numbers."""
        return {name: view for name, (_, view) in zip(self.names, self._views(self.outer), strict=True)}

    def pseudo_gradient(self) -> torch.Tensor:
        """Return the outer values minus the parameters, in a new tensor."""
        own = self._flat()
        return torch.sub(self.outer, own, out=own)

    def take_outer_step(self, optimizer: Optimizer, average: torch.Tensor, keep: float) -> None:
        """Step the outer values by the average of the pseudo-gradients, and set the parameters to them.

        Only the parameters of this fragment have gradients while the outer ``optimizer`` steps. ``keep`` is the
        share of its own value that each parameter keeps, from 0 to 1.
        """
        own = self._flat() if keep else None
        everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [(parameter, parameter.grad) for parameter in everything]
        try:
            with torch.no_grad():
                for parameter in everything:
                    parameter.grad = None
                self.use_outer_values()
                for parameter, part in self._views(average):
                    parameter.grad = torch.empty_like(parameter)
                    _reals(parameter.grad).copy_(part)
            optimizer.step()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
        self.reset_outer()
        if own is not None:
            with torch.no_grad():
                for parameter, part in self._views(own):
                    reals = _reals(parameter)
                    reals.lerp_(part.to(reals.dtype), keep)

    def use_outer_values(self) -> None:
        """Set the parameters to the outer values."""
        with torch.no_grad():
            for parameter, part in self._views(self.outer):
                _reals(parameter).copy_(part)


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as real numbers: with a further dimension of two if it is complex."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def fragments_of(model: nn.Module, wanted: int | Sequence[nn.Module | Iterable[nn.Parameter]]) -> list[Fragment]:
    """Divide the trained parameters of a model.

    Args:
        model: The model.
        wanted: A number: that many fragments of consecutive parameters, of about equal size. Or a sequence of modules, or
            of iterables of parameters: one fragment each, which together hold every trained parameter once.

    Raises:
        UsageError: There are fewer parameters than fragments, or a parameter is in no fragment or in two.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError("no parameter of the model requires a gradient: there is nothing to train")
    if isinstance(wanted, int):
        if not 1 <= wanted <= len(trained):
            raise UsageError(
                f"fragments={wanted}: pass a number from 1 to {len(trained)}, the number of trained parameters"
            )
        return [Fragment(part) for part in _balanced(trained, wanted)]
    names = {parameter: name for name, parameter in trained}
    made, taken = [], dict[nn.Parameter, int]()
    for place, part in enumerate(wanted):
        found = [each for each in (part.parameters() if isinstance(part, nn.Module) else part) if each.requires_grad]
        for parameter in found:
            if parameter not in names:
                raise UsageError(
                    f"fragment {place} holds a parameter of shape {tuple(parameter.shape)} of another model"
                )
            if parameter in taken:
                raise UsageError(f"parameter {names[parameter]!r} is in fragments {taken[parameter]} and {place}")
            taken[parameter] = place
        if not found:
            raise UsageError(f"fragment {place} has no parameter that requires a gradient")
        made.append(Fragment([(names[parameter], parameter) for parameter in found]))
    missing = [name for name, parameter in trained if parameter not in taken]
    if missing:
        raise UsageError(f"parameter {missing[0]!r} is in none of the {len(made)} fragments")
    return made


def _balanced(members: Sequence[Named], count: int) -> list[list[Named]]:
    """Cut a sequence into parts of about equal numbers of elements, none of which is empty."""
    total = sum(parameter.numel() for _, parameter in members)
    parts: list[list[Named]] = [[]]
    seen = 0
    for place, (name, parameter) in enumerate(members):
        left, open_parts = len(members) - place, count - len(parts)
        middle = seen + parameter.numel() / 2
        if parts[-1] and open_parts and (left == open_parts or middle > total * len(parts) / count):
            parts.append([])
        parts[-1].append((name, parameter))
        seen += parameter.numel()
    return parts
