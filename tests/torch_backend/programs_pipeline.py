"""Pipelines of stock torch under every schedule; run by the teams of conftest.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.nn import functional
from toys import Block

BATCH = 8
DEVICE = torch.device("cpu")


def _blocks(count):
    torch.manual_seed(0)
    return [Block() for _ in range(count)]


def _data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 8, generator=generator)


def _run(schedule, modules, indices, count, group_rank, last_rank):
    """Train for two steps: inputs go in at the first stage, and losses come out at the last."""
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    results = []
    for step in range(2):
        inputs, targets = _data(step)
        losses = []
        optimizer.zero_grad()
        holds_first, holds_last = 0 in indices, count - 1 in indices
        output = schedule.step(
            *([inputs] if holds_first else []), **({"target": targets, "losses": losses} if holds_last else {})
        )
        results.append([output.detach() if holds_last else None, [loss.item() for loss in losses]])
        results.append([p.grad.clone() for module in modules for p in module.parameters()])
        optimizer.step()
    return results


def _single(kind, rank, world, **options):
    block = _blocks(world)[rank]
    stage = PipelineStage(block, rank, world, DEVICE)
    schedule = kind(stage, n_microbatches=4, loss_fn=functional.mse_loss, **options)
    return _run(schedule, [block], [rank], world, rank, world - 1)


def _multi(kind, rank, world, indices):
    blocks = _blocks(2 * world)
    mine = [blocks[index] for index in indices]
    stages = [PipelineStage(block, index, 2 * world, DEVICE) for block, index in zip(mine, indices, strict=True)]
    schedule = kind(stages, n_microbatches=2 * world, loss_fn=functional.mse_loss)
    return _run(schedule, mine, indices, 2 * world, rank, world - 1)


def all_forward_then_all_backward(rank, world):
    return _single(ScheduleGPipe, rank, world)


def one_forward_one_backward(rank, world):
    return _single(Schedule1F1B, rank, world)


def interleaved(rank, world):
    return _multi(ScheduleInterleaved1F1B, rank, world, [rank, rank + world])


def looped(rank, world):
    return _multi(ScheduleLoopedBFS, rank, world, [rank, rank + world])


def without_bubbles(rank, world):
    return _multi(ScheduleInterleavedZeroBubble, rank, world, [rank, rank + world])


def without_bubbles_in_a_v(rank, world):
    """The first rank holds the first stage and the last."""
    return _multi(ScheduleZBVZeroBubble, rank, world, [rank, 2 * world - 1 - rank])


def traced(rank, world):
    """torch cuts the model into stages by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(*_blocks(world))
    cuts = {str(index): SplitPoint.BEGINNING for index in range(1, world)}
    parts = pipeline(model, mb_args=(torch.zeros(BATCH // 4, 8),), split_spec=cuts)
    stage = parts.build_stage(rank, DEVICE)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=functional.mse_loss)
    return _run(schedule, [stage.submod], [rank], world, rank, world - 1)


def evaluated(rank, world):
    block = _blocks(world)[rank]
    schedule = ScheduleGPipe(PipelineStage(block, rank, world, DEVICE), n_microbatches=2)
    with torch.no_grad():
        output = schedule.eval(*([_data(0)[0]] if rank == 0 else []))
    return [output]


def beside_sharding(rank, world):
    """One dimension of the mesh is the pipeline, the other shards what each stage holds."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pipeline", "data"))
    index = mesh.get_local_rank("pipeline")
    block = fully_shard(_blocks(2)[index], mesh=mesh["data"])
    stage = PipelineStage(block, index, 2, DEVICE, group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=functional.mse_loss)
    inputs, targets = _data(mesh.get_local_rank("data"))
    losses = []
    schedule.step(*([inputs] if index == 0 else []), **({} if index == 0 else {"target": targets, "losses": losses}))
    return [[loss.item() for loss in losses], [p.grad.full_tensor() for p in block.parameters()], dist.get_rank()]
