"""Sharded training: FSDP2, hybrid sharding, FSDP1, and tensors parallel below them; run by the teams of conftest.py."""

import asyncio
import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from toys import Block, Tower, samples, state, train


def _sharded(model=None, **options):
    model = model or Tower()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _trained(model, rank):
    losses = train(model, rank, steps=4)
    local = {name: list(p.to_local().shape) for name, p in model.named_parameters()}
    return losses, state(model), local


def finalized_awaited(rank, world):
    """The loop goes on while the gradients are reduced, and the results are those of a usual backward."""
    results = []
    for awaits in (False, True):
        torch.manual_seed(0)
        model, ticks = _sharded(), 0
        model.set_manual_backward_finalization(awaits)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        async def step(number, model=model, awaits=awaits):
            nonlocal ticks
            inputs, targets = samples(rank, number)
            functional.mse_loss(model(inputs), targets).backward()
            if awaits:
                reduced = asyncio.ensure_future(asyncio.to_thread(model.finalize_backward(async_op=True).wait))
                while not reduced.done():
                    ticks += 1
                    await asyncio.sleep(0)
                await reduced

        for number in range(3):
            optimizer.zero_grad()
            asyncio.run(step(number))
            optimizer.step()
        results.append(state(model))
        assert awaits == bool(ticks)
    return [(results[1], results[0])]


def mean_of_shares(rank, world):
    """Return the mean that FSDP2 requests, and the expected one."""
    mean = torch.empty(3)
    dist.reduce_scatter_tensor(mean, torch.full((3 * world,), rank + 1.0), op=dist.ReduceOp.AVG)
    return [(mean, torch.full((3,), (world + 1) / 2))]


VARIANTS = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
    "resharded to smaller groups": {"reshard_after_forward": 2},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "bfloat16 sums": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def variant(rank, world, name):
    return _trained(_sharded(**VARIANTS[name]), rank)


def in_memory_of_the_group(rank, world):
    """Gathered and scattered tensors lie in memory that the back end allocates."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6000), nn.GELU(), nn.Linear(6000, 3)]  # some 100 KiB each
    model = nn.Sequential(*layers)
    for each in (layers[0], layers[2], model):
        fully_shard(each)
        if hasattr(each, "set_allocate_memory_from_process_group_for_comm"):
            each.set_allocate_memory_from_process_group_for_comm(dist.get_backend() != "gloo")
    return _trained(model, rank)


def hybrid(rank, world):
    """Sharded in one dimension of a mesh, replicated in the other."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return _trained(_sharded(mesh=mesh), rank)


def other_reductions(rank, world):
    """A gradient divide factor of 1 requests sums instead of averages."""
    model = _sharded()
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return _trained(model, rank)


def accumulated(rank, world):
    """Gradients accumulate without communication, then one reduce-scatter follows."""
    model = _sharded()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        inputs, targets = samples(rank, step)
        functional.mse_loss(model(inputs), targets).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def clipped_norm(rank, world):
    model = _sharded()
    inputs, targets = samples(rank, 0)
    functional.mse_loss(model(inputs), targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.full_tensor(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def whole_state(rank, world):
    """Rank 0 gathers the state of model and optimizer; a new model receives it."""
    model = _sharded()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = train(model, rank, optimizer=optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    whole, moments = (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optimizer, options=options),
    )
    other = _sharded(Tower(seed=1))
    optimizer_of_other = torch.optim.Adam(other.parameters(), lr=0.01)
    set_model_state_dict(other, whole if rank == 0 else {}, options=options)
    set_optimizer_state_dict(other, optimizer_of_other, moments if rank == 0 else {}, options=options)
    after = train(other, rank, steps=2, optimizer=optimizer_of_other)
    return before, sorted(whole), state(other), after


def above_tensor_parallel(rank, world):
    """Tensor parallel within the rows of a mesh, sharded between the rows."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    model = Tower()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return train(model, rank // 2, steps=4), state(model)


@contextlib.contextmanager
def _quietly():
    """Suppress the deprecation warnings of FSDP1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _wrapped(**options):
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(Tower(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def _trained_first_version(rank, **options):
    with _quietly():
        model = _wrapped(**options)
        losses = train(model, rank)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return losses, {name: value.clone() for name, value in model.state_dict().items()}


FIRST_VERSIONS = {
    "plain": {},
    "original parameters": {"use_orig_params": True},
    "gradients and optimizer": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "not sharded": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "mixed precision": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}


def first_version(rank, world, name):
    return _trained_first_version(rank, **FIRST_VERSIONS[name])


def first_version_hybrid(rank, world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return _trained_first_version(rank, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def first_version_sharded_state(rank, world):
    with _quietly():
        model = _wrapped(device_mesh=init_device_mesh("cpu", (world,)))
        train(model, rank)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {name: value.full_tensor() for name, value in model.state_dict().items()}


def first_version_clipped_norm(rank, world):
    with _quietly():
        model = _wrapped()
        inputs, targets = samples(rank, 0)
        functional.mse_loss(model(inputs), targets).backward()
        norm = model.clip_grad_norm_(0.1)
        with FullyShardedDataParallel.summon_full_params(model):
            return norm, [parameter.clone() for parameter in model.parameters()]
