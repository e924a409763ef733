"""The toy that the programs train: its data, its model, and the weights and losses of training it in one process."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import TensorDataset

SAMPLES, FEATURES = 32, 4
BATCH = 4
"""Samples per step and rank."""
EPOCHS = 2
RATE = 0.05


def make_data() -> TensorDataset:
    """Return the same samples on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())


def make_model() -> nn.Module:
    """Return a model with the same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def train_alone(ranks: int = 2, rate: float = RATE, epochs: int = EPOCHS) -> tuple[nn.Module, list[float]]:
    """Train in this process on the batches of all ranks; return the model and the loss of each step."""
    model, losses = make_model(), []
    inputs, targets = make_data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        for batch in torch.arange(SAMPLES).split(BATCH * ranks):
            loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


def check_weights(state: dict[str, torch.Tensor], alone: nn.Module) -> None:
    """Assert that a state dict holds the weights of a model that was trained in one process."""
    torch.testing.assert_close([*state.values()], [*alone.state_dict().values()], rtol=1e-5, atol=1e-6)


def report(**results: Any) -> None:
    """Hand this rank's results and its back end to the runner, which compares them with those on the other back end."""
    plain = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in results.items()}
    group = type(dist.group.WORLD)
    plain["back end"] = dist.get_backend()
    plain["process group"] = f"{group.__module__}.{group.__name__}"
    path = Path(os.environ["ECOSYSTEM_RESULTS"]) / f"rank-{dist.get_rank()}.json"
    path.write_text(json.dumps(plain), encoding="utf-8")


def end_together() -> None:
    """Destroy the default group after every rank has called this: the last call of a program that torchrun starts.

    A thread of gloo holds the last operation a little longer than its caller, and aborts the process when it frees tensors
    while the interpreter ends. A rank that ends early can make the last operation of its peer fail: gloo reports the closed
    connection before the data. The store is that of torchrun, so it outlives the ranks.
    """
    store, ranks = distributed_c10d._get_default_store(), range(dist.get_world_size())
    store.set(f"ends-{dist.get_rank()}", "")
    store.wait([f"ends-{rank}" for rank in ranks])
    dist.destroy_process_group()
