"""Device meshes, distributed tensors, tensor and loss parallelism; run by the teams of conftest.py."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from toys import Block, numbers


def line(world):
    return init_device_mesh("cpu", (world,), mesh_dim_names=("ranks",))


def grid(world):
    """Return a mesh of two dimensions: 2 × 1 of two ranks, 2 × 2 of four."""
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rows", "columns"))


def mesh_of_two_dimensions(rank, world):
    """Each row and each column is a group; a slice of the mesh is a mesh."""
    mesh, results = grid(world), []
    for name in mesh.mesh_dim_names:
        tensor = numbers(rank)
        dist.all_reduce(tensor, group=mesh.get_group(name))
        gathered = [None] * mesh[name].size()
        dist.all_gather_object(gathered, rank, group=mesh[name].get_group())
        results += [tensor, gathered, mesh.get_local_rank(name), mesh[name].mesh]
    flat = mesh._flatten("all")
    tensor = numbers(rank)
    dist.all_reduce(tensor, group=flat.get_group())
    return [*results, tensor, mesh.mesh]


def mesh_of_some_ranks(rank, world):
    """Ranks outside a mesh have no coordinate and no part of its tensors."""
    mesh = DeviceMesh("cpu", [0, world - 1])
    tensor = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    whole = tensor.full_tensor() if mesh.get_coordinate() else None
    return [mesh.get_coordinate(), tensor.to_local(), whole]


def mesh_from_a_group(rank, world):
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    return distribute_tensor(torch.arange(world * 2.0), mesh, [Shard(0)]).full_tensor()


def _placed(mesh, placements, rank):
    """Return a tensor of shape (5, 7) with the placements; to a partial one each rank contributes its number."""
    whole = torch.arange(35.0).view(5, 7)
    kept = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(whole, mesh, kept).to_local() + (rank if kept != list(placements) else 0)
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)


def redistribute(rank, world):
    """From every placement to every other; the dimensions are not multiples of the world size."""
    mesh = line(world)
    sources = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max"), Partial("min"), Partial("avg")]
    targets = [Replicate(), Shard(0), Shard(1)]
    results = {}
    for source, target in itertools.product(sources, targets):
        tensor = _placed(mesh, [source], rank).redistribute(placements=[target])
        results[f"{source} to {target}"] = [tensor.to_local(), tensor.full_tensor()]
    return results


def redistribute_asynchronously_and_backward(rank, world):
    mesh = line(world)
    local = numbers(rank, 6).view(2, 3).requires_grad_()
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    moved = tensor.redistribute(placements=[Shard(1)], async_op=True)
    (moved * moved).to_local().sum().backward()
    return [moved.to_local(), local.grad]


def distributed_from_rank_0(rank, world):
    """A distributed tensor has rank 0's values. By default torch does not send them."""
    every = ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)], [Replicate()] * 2)
    mesh, tensor = grid(world), numbers(rank, 35).view(5, 7)
    return [distribute_tensor(tensor, mesh, placements, src_data_rank=0).to_local() for placements in every]


def _whole_gradients(model):
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone())
        for name, p in model.named_parameters()
    }


def _steps(model, inputs, loss_of=lambda outputs: outputs.square().mean()):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, _whole_gradients(model)]


def sequence_parallel(rank, world):
    """Between the linear layers activations are sharded by sequence."""
    torch.manual_seed(0)
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    stack = nn.Sequential(Block(), Block())
    mesh = line(world)
    for block in stack:
        parallelize_module(block, mesh, plan)
        parallelize_module(block, mesh, PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)))
        parallelize_module(block, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1)))
    inputs = (torch.arange(2 * 8 * 8.0).view(2, 8, 8) % 5 / 4).chunk(world, 1)[rank]
    return _steps(stack, inputs)


def sharded_losses(rank, world):
    """Logits stay sharded by class in forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12))
    parallelize_module(model, line(world), {"2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    inputs, labels = torch.arange(40.0).view(5, 8) % 3, torch.tensor([0, 3, 11, 7, 5])
    with loss_parallel():
        return _steps(model, inputs, lambda logits: functional.cross_entropy(logits, labels))
