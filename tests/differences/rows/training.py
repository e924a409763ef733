"""Rows on data-parallel training."""

from __future__ import annotations

import torch

from tests.differences.rows.row import Side, raised, row

TRAINING = "Data-parallel training"


def _linear() -> torch.nn.Linear:
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    return linear


def _averaged(side: Side, gradient: torch.Tensor, average: float) -> str:
    return "averages" if abs(gradient.item() - average) < 1e-6 else "each rank keeps its own gradient"


@row(TRAINING, "`model.module.double()` after wrapping")
def double_after_wrapping(side: Side) -> str:
    model = side.ddp(_linear())
    model.module.double()
    model(torch.tensor([[side.rank + 1.0]], dtype=torch.float64)).sum().backward()
    return _averaged(side, model.module.weight.grad, 1.5)


@row(TRAINING, "a parameter replaced after wrapping")
def replaced_parameter(side: Side) -> str:
    model = side.ddp(_linear())
    model.module.weight = torch.nn.Parameter(torch.ones(1, 1))
    words = raised(lambda: model(torch.tensor([[side.rank + 1.0]])).sum().backward())
    return _averaged(side, model.module.weight.grad, 1.5) if words == "carried" else f"{words} names the parameter"


@row(TRAINING, "two forwards, then two backwards")
def two_forwards(side: Side) -> str:
    model = side.ddp(_linear())
    losses = [model(torch.tensor([[side.rank + 1.0 + number]])).sum() for number in range(2)]
    found = []
    for loss in losses:
        model.module.weight.grad = None
        loss.backward()
        found.append(model.module.weight.grad.item())
    return "averages both" if found == [1.5, 2.5] else "the second backward is not averaged"


class _Branches(torch.nn.Module):
    """Two layers, of which it uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = _linear(), _linear()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.used(value)


@row(TRAINING, "a step that does not use one of two layers")
def unused_layer(side: Side) -> str:
    model = side.ddp(_Branches())

    def step() -> None:
        model(torch.tensor([[side.rank + 1.0]])).sum().backward()

    words = raised(step)
    if words != "carried":
        return f"{words} names the parameter"
    return f"{_averaged(side, model.module.used.weight.grad, 1.5)}; the next forward: {raised(step)}"


def _answered(answer: torch.Tensor | Exception) -> torch.futures.Future[torch.Tensor]:
    """Return a future that has a result, or has failed."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


def _step_with_hook(side: Side, answer: torch.Tensor | Exception) -> tuple[str, torch.Tensor | None]:
    """Run a step; return what it raises, and the gradient."""
    model = side.ddp(_linear())
    model.register_comm_hook(None, lambda state, bucket: _answered(answer))
    words = raised(lambda: model(torch.tensor([[side.rank + 1.0]])).sum().backward())
    return words, model.module.weight.grad


@row(TRAINING, "the future of a communication hook fails with `OSError`", spoils_ranks=True)
def failed_hook(side: Side) -> str:
    words, _ = _step_with_hook(side, OSError("no route"))
    return f"{words} in backward"


@row(TRAINING, "a communication hook answers one gradient with three numbers")
def hook_of_another_size(side: Side) -> str:
    words, gradient = _step_with_hook(side, torch.tensor([7.0, 8.0, 9.0]))
    return f"the gradient is the first, {gradient.item():g}" if words == "carried" else f"{words} in backward"
