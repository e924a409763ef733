"""Pipelines of stock torch under every schedule; run by the teams of conftest.py."""

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


def _run(schedule, modules, indices, count):
    """Train for two steps; return outputs, losses and gradients. The first stage gets inputs, the last one targets."""
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


SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
"""Schedules with one stage per rank."""
MULTI = {
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "looped BFS": ScheduleLoopedBFS,
    "interleaved zero bubble": ScheduleInterleavedZeroBubble,
    "ZBV zero bubble": ScheduleZBVZeroBubble,
}
"""Schedules with two stages per rank. In ZBV rank 0 holds the first and the last stage."""


def trained(rank, world, name):
    per_rank = 1 if name in SINGLE else 2
    blocks = _blocks(per_rank * world)
    last = 2 * world - 1 - rank if name.startswith("ZBV") else rank + world
    indices = [rank, last][:per_rank]
    mine = [blocks[index] for index in indices]
    stages = [PipelineStage(blocks[index], index, len(blocks), DEVICE) for index in indices]
    if name in SINGLE:
        schedule = SINGLE[name](stages[0], n_microbatches=4, loss_fn=functional.mse_loss)
    else:
        schedule = MULTI[name](stages, n_microbatches=2 * world, loss_fn=functional.mse_loss)
    return _run(schedule, mine, indices, len(blocks))


def per_edge(rank, world):
    """Each pair of neighbours has a group of its own for either direction; the results are those without."""
    from torch.distributed import config

    names = ("1F1B", "interleaved 1F1B", "ZBV zero bubble")
    expected = [trained(rank, world, name) for name in names]
    with config.patch(pipeline_per_edge_p2p=True):
        found = [trained(rank, world, name) for name in names]
    return [(found, expected)]


def traced(rank, world):
    """torch divides the model into stages."""
    torch.manual_seed(0)
    model = nn.Sequential(*_blocks(world))
    cuts = {str(index): SplitPoint.BEGINNING for index in range(1, world)}
    parts = pipeline(model, mb_args=(torch.zeros(BATCH // 4, 8),), split_spec=cuts)
    stage = parts.build_stage(rank, DEVICE)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=functional.mse_loss)
    return _run(schedule, [stage.submod], [rank], world)


def evaluated(rank, world):
    block = _blocks(world)[rank]
    schedule = ScheduleGPipe(PipelineStage(block, rank, world, DEVICE), n_microbatches=2)
    with torch.no_grad():
        output = schedule.eval(*([_data(0)[0]] if rank == 0 else []))
    return [output]


def sharded_stages(rank, world):
    """One dimension of the mesh is the pipeline, the other one shards each stage."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pipeline", "data"))
    index = mesh.get_local_rank("pipeline")
    block = fully_shard(_blocks(2)[index], mesh=mesh["data"])
    stage = PipelineStage(block, index, 2, DEVICE, group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=functional.mse_loss)
    inputs, targets = _data(mesh.get_local_rank("data"))
    losses = []
    schedule.step(*([inputs] if index == 0 else []), **({} if index == 0 else {"target": targets, "losses": losses}))
    return [[loss.item() for loss in losses], [p.grad.full_tensor() for p in block.parameters()], dist.get_rank()]
