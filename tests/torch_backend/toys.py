"""Small models, data and losses for the programs in this folder, and what their ranks have in common."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

bindings = torch._C._distributed_c10d
"""torch's bindings of what only some versions export."""
operators = torch.ops._c10d_functional


def start(rank, world, meeting, backend="asyncdist", timeout=60.0):
    """Initialize the default group of a rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def failure_of(call):
    """Return the names of the classes of the exception that a call raises, and its message."""
    try:
        call()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return ["nothing"], ""


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
