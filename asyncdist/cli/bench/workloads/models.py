"""Training steps for the benchmark: models, batches, and how stock PyTorch parallelizes a model over a group's ranks.

`STEPS` has a `Step` for each name of `plan.STEPS`; `training` times them. The models do not depend on the number of ranks,
so that every contender, and one rank alone, can train the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from asyncdist.cli.bench.plan import HEADS

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and the class of each."""

_PIXELS, _CLASSES = 1024, 10
_CHARACTERS, _CONTEXT, _WIDTH, _LAYERS = 128, 64, 256, 4


def perceptron() -> nn.Module:
    """Return an MLP of 6.3 M parameters."""
    layers = [nn.Linear(_PIXELS, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, _CLASSES)]
    return nn.Sequential(*layers)


class TransformerBlock(nn.Module):
    """One layer of the transformer, on shape (sequences, positions, features).

    It computes the heads whose weights this rank holds: all of them, or this rank's share after `divided`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm_before_attention, self.norm_before_mlp = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.query_key_value, self.mix = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.widen, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.norm_before_attention(x)).unflatten(-1, (-1, 3, _WIDTH // HEADS))
        # Query, key and value have the shape (sequences, heads, positions, features).
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.narrow(nn.functional.gelu(self.widen(self.norm_before_mlp(x))))
        return out


class Transformer(nn.Module):
    """A transformer that predicts the next character at each position of each sequence: of 4 layers, 3.2 M parameters."""

    def __init__(self, layers: int = _LAYERS) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(_CHARACTERS, _WIDTH), nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.characters(characters) + self.places.weight
        for block in self.blocks:
            x = block(x)
        # Flattened before the last layer, because FSDP2 warns of outputs that are views.
        logits: torch.Tensor = self.head(self.norm(x).flatten(0, 1))
        return logits


def pictures() -> Batch:
    """Return a random batch for `perceptron`: 16 pictures and their classes."""
    return torch.randn(16, _PIXELS), torch.randint(_CLASSES, (16,))


def sentences(count: int = 2) -> Batch:
    """Return a random batch for `Transformer`: ``count`` sequences, and the following character at each position."""
    characters = torch.randint(_CHARACTERS, (count, _CONTEXT + 1))
    return characters[:, :-1], characters[:, 1:]


# -- parallelized by stock PyTorch ------------------------------------------------------------------


def replicated(model: nn.Module, group: Any) -> nn.Module:
    """Wrap a model in DDP, which averages the gradients during backward."""
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def sharded(model: nn.Module, group: Any) -> nn.Module:
    """Shard every parameter over the ranks with FSDP2, which gathers a block's parameters before it computes the block."""
    mesh = _mesh_of(group)
    assert isinstance(model, Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def divided(model: nn.Module, group: Any) -> nn.Module:
    """Divide the heads and features of every block among the ranks (tensor parallel), with two all-reduces per block."""
    mesh = _mesh_of(group)
    assert isinstance(model, Transformer)
    columns, rows = ("query_key_value", "widen"), ("mix", "narrow")
    plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def _mesh_of(group: Any) -> DeviceMesh:
    """Return a group's ranks as a mesh with a name of its own.

    DTensor caches results by mesh, and two meshes with the same ranks and names are equal. With equal names, DTensor
    would communicate over the first group for the mesh of a second group.
    """
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"of_{group.group_name}",))


class Step(NamedTuple):
    """How a model is trained.

    Attributes:
        model: Makes the model.
        batch: Makes a batch.
        parallelize: Spreads a model over the ranks of a torch.distributed group, and returns the model to train.
        own_batches: Whether each rank has its own batches. Otherwise all ranks have the same ones.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    parallelize: Callable[[nn.Module, Any], nn.Module]
    own_batches: bool


STEPS = {
    "ddp": Step(perceptron, pictures, replicated, own_batches=True),
    "fsdp2": Step(Transformer, sentences, sharded, own_batches=True),
    "tensor_parallel": Step(Transformer, sentences, divided, own_batches=False),
}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss of a model on a batch."""
    inputs, labels = batch
    return cross_entropy(model(inputs), labels.flatten())
