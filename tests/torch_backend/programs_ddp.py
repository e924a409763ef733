"""Data-parallel training with stock torch; the cases of tests/ddp/program_table.py are not repeated here."""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from toys import gradients, network, samples, state, train

SMALL = {"bucket_cap_mb": 0.0005}
"""Divides even a small model into several buckets."""


def _trained(rank, model=None, **options):
    model = DistributedDataParallel(model or network(), **{**SMALL, **options})
    losses = train(model, rank)
    return losses, state(model), gradients(model)


def starts_from_rank_0(rank, world):
    """Rank 0's parameters overwrite those of the other ranks."""
    return _trained(rank, network(seed=rank))


def in_a_subgroup(rank, world):
    """Two halves of the world train separately."""
    mine, _ = dist.new_subgroups(world // 2)
    return _trained(rank, process_group=mine)


# -- communication hooks -----------------------------------------------------------------------------


def _hooked(rank, hook):
    model = DistributedDataParallel(network(), **SMALL)
    model.register_comm_hook(dist.group.WORLD, hook)
    return train(model, rank), state(model), gradients(model)


def hooks_of_cpp(rank, world):
    results = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = DistributedDataParallel(network(), **SMALL)
        model._register_builtin_comm_hook(kind)
        results += [train(model, rank), state(model), model._get_ddp_logging_data().get("comm_hook")]
    return results


def custom_hook(rank, world):
    """Gathers the gradients, and averages them in a callback."""

    def hook(group, bucket):
        gathered = torch.zeros(dist.get_world_size() * bucket.buffer().numel())
        work = dist.all_gather_into_tensor(gathered, bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda _: gathered.view(dist.get_world_size(), -1).mean(0))

    return _hooked(rank, hook)


def hook_power_sgd_of_several_buckets(rank, world):
    """Callbacks of several buckets call collectives while backward does. Returns pairs of actual and expected results."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
    model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
    hook_state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    pairs = []
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(3, 64)).sum().backward()
        gradients = torch.cat([each.grad.view(-1) for each in model.parameters()])
        expected = gradients.clone()
        dist.broadcast(expected, 0)
        pairs.append((gradients, expected))
    return pairs


# -- uneven inputs, sharded optimizers ---------------------------------------------------------------


def join_throws_on_early_termination(rank, world):
    model = DistributedDataParallel(network(), **SMALL)
    seen = "all of its inputs"
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(2 if rank else 4):
                inputs, targets = samples(rank, step)
                functional.mse_loss(model(inputs), targets).backward()
    except RuntimeError as error:
        seen = str(error)
    return seen


def joined(rank, world):
    """Train with a step more on each rank than on the rank before it; return the number of steps and the state."""
    model = DistributedDataParallel(network(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(rank + 1):
            inputs, targets = samples(rank, step)
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return rank + 1, state(model)


class Counted(Joinable):
    """A minimal Joinable: counts the calls of all ranks."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __call__(self):
        Join.notify_join_context(self)
        once = torch.ones(1)
        dist.all_reduce(once)
        self.total += int(once.item())

    def join_hook(self, **options):
        counted = self

        class Hook(JoinHook):
            def main_hook(self):
                nothing = torch.zeros(1)
                dist.all_reduce(nothing)
                counted.total += int(nothing.item())

            def post_hook(self, is_last_joiner):
                last = torch.tensor(1.0 if is_last_joiner else 0.0)
                dist.all_reduce(last, dist.ReduceOp.MAX)
                counted.last = is_last_joiner

        return Hook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def joined_custom_joinable(rank, world):
    counted = Counted()
    with Join([counted]):
        for _ in range(2 * rank + 1):
            counted()
    return counted.total, counted.last


def zero_redundancy(rank, world):
    """Each rank keeps the optimizer state of its own share; rank 0 receives the whole state."""
    model = DistributedDataParallel(network(), **SMALL)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(model, rank, steps=4, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    whole = optimizer.state_dict()["state"] if rank == 0 else {}
    return losses, state(model), {key: sorted(value) for key, value in whole.items()}


# -- buckets -----------------------------------------------------------------------------------------


def where_buckets_lie(rank, world):
    """Large buckets lie in registered memory if the ranks share memory, also after the first step."""
    from asyncdist.kernel.memory.shared_arena import arena

    def noting(found, bucket):
        buffer = bucket.buffer()
        open_to_all = arena().offset_of(buffer.data_ptr(), buffer.nbytes) is not None
        found.append((open_to_all, dist.group.WORLD.group.shares_memory and buffer.nbytes >= 32 << 10))
        return default_hooks.allreduce_hook(None, bucket)

    used = arena().used_nbytes
    torch.manual_seed(0)
    pairs, layers = [], [nn.Linear(6, 40), nn.Linear(40, 3000), nn.ReLU(), nn.Linear(3000, 40), nn.Linear(40, 3)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.01)
    model.register_comm_hook(pairs, noting)
    train(model, rank, steps=3)
    kinds = len(set(pairs))
    del model, layers
    gc.collect()
    return [*pairs, (kinds, 2 if dist.group.WORLD.group.shares_memory else 1), (arena().used_nbytes, used)]


def exact_in_registered_buckets(rank, world):
    """Integers, so that the result does not depend on the order of summation."""
    model = nn.Linear(300, 100, bias=False)
    model = DistributedDataParallel(model)
    pairs = []
    for step in range(3):
        model.zero_grad()
        inputs = torch.full((1, 300), float(rank + step))
        model(inputs).sum().backward()
        mean = sum(peer + step for peer in range(world)) / world
        pairs.append((model.module.weight.grad, torch.full((100, 300), mean)))
    return pairs
