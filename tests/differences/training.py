"""The model of a program of data-parallel steps, its steps, and their gradients without communication."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tests.differences.programs import WORLD, Training

WIDTH = 5


class Model(torch.nn.Module):
    """Linear layers, of which each forward uses some; every rank has the same parameters."""

    def __init__(self, program: Training) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList()
        for layer in program.layers:
            linear = torch.nn.Linear(WIDTH, WIDTH, dtype=getattr(torch, layer.dtype))
            with torch.no_grad():
                for parameter in linear.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=random) / 2)
            if layer.shared is not None and program.layers[layer.shared].dtype == layer.dtype:
                linear.weight = self.layers[layer.shared].weight
            else:
                linear.weight.requires_grad_(not layer.frozen)
            linear.bias.requires_grad_(not layer.frozen)
            if layer.buffer:
                linear.register_buffer("seen", torch.zeros(2))
            self.layers.append(linear)

    def forward(self, inputs: torch.Tensor, mask: int) -> torch.Tensor:
        for place, linear in enumerate(self.layers):
            if mask >> place & 1:
                inputs = inputs + torch.tanh(linear(inputs.to(linear.weight.dtype))).to(inputs.dtype)
        return inputs


def _inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank * 100 + step))


def _has_gradients(program: Training, model: Model, mask: int) -> bool:
    return any(
        parameter.requires_grad
        for place, linear in enumerate(model.layers)
        if mask >> place & 1
        for parameter in linear.parameters()
    )


def steps_of(program: Training, model: Model, wrapped: Any, rank: int) -> list[Any]:
    """Run the steps of a rank; return the gradients after each backward or, without communication, those of each step."""
    found: list[Any] = []
    losses = []
    for number, masks in enumerate(program.uses):
        is_local = program.first_local and number == 0 and hasattr(wrapped, "no_sync")
        with wrapped.no_sync() if is_local else contextlib.nullcontext():
            loss = wrapped(_inputs(rank, number), masks[rank]).square().sum()
            losses.append(loss)
            if program.schedule == "in turn":
                _backward(losses.pop())
                found.append(gradients(model))
                if not program.first_local:
                    model.zero_grad()
    for loss in losses:
        _backward(loss)
        found.append(gradients(model))
    return found


def _backward(loss: torch.Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def gradients(model: Model) -> list[torch.Tensor | None]:
    """Return copies of the gradients of all parameters."""
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def expected(program: Training, rank: int) -> list[list[torch.Tensor | None]]:
    """Return what `steps_of` must return on a rank: backwards without synchronization add the rank's own gradients, the
    others add the average of what all ranks hold by then."""
    models = [Model(program) for _ in range(WORLD)]
    held: list[list[torch.Tensor | None]] = [[None for _ in models[0].parameters()] for _ in range(WORLD)]
    found = []
    for number, masks in enumerate(program.uses):
        for peer, model in enumerate(models):
            model.zero_grad()
            _backward(model(_inputs(peer, number), masks[peer]).square().sum())
            held[peer] = [_added(old, new) for old, new in zip(held[peer], gradients(model), strict=True)]
        if not (program.first_local and number == 0 and program.schedule == "in turn"):
            averaged = [_average(each) for each in zip(*held, strict=True)]
            held = [list(averaged) for _ in range(WORLD)]
        found.append(list(held[rank]))
        if program.schedule == "in turn" and not program.first_local:
            held = [[None] * len(each) for each in held]
    return found


def _added(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    if new is None or old is None:
        return new if old is None else old
    return old + new


def _average(each: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    there = [tensor for tensor in each if tensor is not None]
    return sum(there[1:], there[0]) / WORLD if there else None
