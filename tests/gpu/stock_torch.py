"""Train by torch's own DDP and FSDP2 on the back end "asyncdist", then alone, and compare the weights.

    torchrun --nproc-per-node=2 tests/gpu/stock_torch.py --device cuda

Started by `prove.py`. All ranks use the same device if there is only one. Rank 0 prints one line of JSON, and the program
exits with 1 if any weight differs by more than `TOLERANCE` from the weights of one process.
"""

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import asyncdist.torch_backend  # noqa: F401  # registers the back end "asyncdist"

TOLERANCE = 1e-4
BATCH = 64

Wrap = Callable[[nn.Module], nn.Module]


def network(width: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 10)).to(device)


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, device: torch.device, steps: int, rank: int = 0, ranks: int = 1) -> float:
    """Train on this rank's part of each batch; return the seconds of a step, without those of the first one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    random = torch.Generator().manual_seed(1)
    started = perf_counter()
    for step in range(steps):
        inputs = torch.randn(BATCH, model_width(model), generator=random)
        labels = torch.randint(10, (BATCH,), generator=random)
        output = model(inputs.chunk(ranks)[rank].to(device))
        loss = nn.functional.cross_entropy(output, labels.chunk(ranks)[rank].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            loss.item()  # waits for the device
            started = perf_counter()
    loss.item()
    return (perf_counter() - started) / max(1, steps - 1)


def model_width(model: nn.Module) -> int:
    return next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).in_features


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Return all weights on the host; the ranks gather those that are sharded."""
    full = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [each.detach().cpu() for each in full]


def largest_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def main() -> dict[str, Any]:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--width", type=int, default=512)
    options = arguments.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        arguments.error("--device cuda: torch sees no CUDA device")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.ones(1, device=device)  # a mesh selects a device of its own if CUDA has not been started
    dist.init_process_group("asyncdist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start = network(options.width, device)
    alone = copy.deepcopy(start)
    found: dict[str, Any] = {"ranks": ranks, "steps": options.steps, "width": options.width}
    found["alone"] = {"step_seconds": train(alone, device, options.steps)}
    expected = weights_of(alone)
    assert largest_difference(expected, weights_of(start)) > 10 * TOLERANCE, "the training does not change the weights"
    for wrap in (ddp, fsdp2):
        dist.barrier()
        model = wrap(copy.deepcopy(start))
        seconds = train(model, device, options.steps, rank, ranks)
        difference = largest_difference(weights_of(model), expected)
        found[wrap.__name__] = {"step_seconds": seconds, "largest_difference": difference}
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "rank": rank, "tolerance": TOLERANCE}


if __name__ == "__main__":
    figures = main()
    if figures.pop("rank") == 0:
        print(json.dumps(figures), flush=True)
    if not all(figures[name]["largest_difference"] <= TOLERANCE for name in ("ddp", "fsdp2")):
        sys.exit("the weights differ from those of one process")
