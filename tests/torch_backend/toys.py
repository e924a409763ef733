"""Small models, data and losses for the programs in this folder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def numbers(rank, count=5, dtype=torch.float32):
    """Return small integers that depend on rank and position; sums of them are exact."""
    return (torch.arange(count) % 3 + rank + 1).to(dtype)


def network(seed=0):
    """Return a network of six inputs and three outputs, equal on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3))


class Block(nn.Module):
    """A transformer's feed-forward block of width 8."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs):
        return inputs + self.down(functional.gelu(self.up(self.norm(inputs))))


class Tower(nn.Module):
    """Blocks between an embedding and a head; tests shard it block by block."""

    def __init__(self, seed=0, depth=2):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, inputs):
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def samples(rank, step, count=4):
    """Return a rank's inputs and targets for a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def train(model, rank, steps=3, optimizer=None):
    """Train on the rank's own samples and return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = samples(rank, step)
        loss = functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state(model):
    """Return a copy of every parameter and buffer by name; sharded ones are gathered."""
    whole = {}
    for name, value in model.state_dict().items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole[name] = value.detach().clone()
    return whole


def gradients(model):
    """Return a copy of every gradient, by name."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
