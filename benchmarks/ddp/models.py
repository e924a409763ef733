"""The models of the benchmark of data-parallel training, by the names of `names.MODELS`. Used by `ranks`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.ddp.names import HEADS

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and the class of each."""

_CLASSES = 10
_INPUTS, _HIDDEN = 1024, 2048
_CHARACTERS, _CONTEXT, _WIDTH = 128, 64, 256


def perceptron() -> nn.Module:
    """Return an MLP of 6.3 M parameters."""
    layers = [nn.Linear(_INPUTS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_HIDDEN, _CLASSES))


def large_perceptron() -> nn.Module:
    """Return an MLP of 25.2 M parameters, all but 1 % of them in seven layers."""
    widths = [_INPUTS, *[_HIDDEN] * 6, _INPUTS]
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(_INPUTS, _CLASSES))


class ManySmall(nn.Module):
    """1,000 parameters of 1 or 64 elements: a scale and a shift for each of 500 layers without other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(500))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(500))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale, shift in zip(self.scales, self.shifts, strict=True):
            x = torch.addcmul(shift, x, scale)
        return x[:, :_CLASSES]


def convolutions() -> nn.Module:
    """Return a network of ten convolutions with 23.6 M parameters, whose gradients are copied into buckets."""
    layers = [each for _ in range(10) for each in (nn.Conv2d(512, 512, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * 16, _CLASSES))


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
    """A transformer that predicts the next character at each position of each sequence; 4 layers have 3.2 M parameters."""

    def __init__(self, layers: int = 4) -> None:
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


def sentences(count: int) -> Batch:
    """Return a random batch for `Transformer`: ``count`` sequences, and the following character at each position."""
    characters = torch.randint(_CHARACTERS, (count, _CONTEXT + 1))
    return characters[:, :-1], characters[:, 1:].flatten()


# -- how stock PyTorch spreads a model over the ranks of a group ------------------------------------


def replicated(model: nn.Module, group: Any) -> nn.Module:
    """Wrap a model in DDP, which averages the gradients during backward."""
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def sharded(model: nn.Module, group: Any) -> nn.Module:
    """Shard every parameter over the ranks with FSDP2, which gathers a block's parameters before it computes the block."""
    from torch.distributed.fsdp import fully_shard  # takes seconds

    mesh = _mesh_of(group)
    assert isinstance(model, Transformer)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def divided(model: nn.Module, group: Any) -> nn.Module:
    """Divide the heads and features of every block among the ranks (tensor parallel), with two all-reduces per block."""
    mesh = _mesh_of(group)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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


class Workload(NamedTuple):
    """A model and its batches.

    Attributes:
        model: Makes the model.
        batch: Makes a batch.
        spread: Spreads a model over the ranks of a torch.distributed group, and returns the model to train.
        own_batches: Whether each rank has its own batches. Otherwise all ranks have the same ones.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    spread: Callable[[nn.Module, Any], nn.Module] = replicated
    own_batches: bool = True


def _batch(*shape: int) -> Batch:
    return torch.randn(shape), torch.randint(_CLASSES, shape[:1])


WORKLOADS = {
    "mlp": Workload(perceptron, lambda: _batch(16, _INPUTS)),
    "large": Workload(large_perceptron, lambda: _batch(16, _INPUTS)),
    "small": Workload(ManySmall, lambda: _batch(16, 64)),
    "transformer": Workload(lambda: Transformer(layers=8), lambda: sentences(6)),
    "fsdp2": Workload(Transformer, lambda: sentences(2), sharded),
    "tensor_parallel": Workload(Transformer, lambda: sentences(2), divided, own_batches=False),
    "convolutions": Workload(convolutions, lambda: _batch(1, 512, 4, 4)),
}
"""What `names.MODELS` names."""
