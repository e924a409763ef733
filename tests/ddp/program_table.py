"""Run by test_table.py on each rank: arguments and methods of DistributedDataParallel, in one of three contenders.

"gloo" is torch's class over gloo, "backend" torch's class over the back end "asyncdist", "asyncdist" the class of this
package. A case records tensors after each step; the test compares what the contenders have recorded.
"""

import contextlib
import copy
import inspect
import io
import warnings

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localSGD_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD_hooks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step as zero_step_of
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
    as_functional_optim,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import asyncdist.torch_backend  # noqa: F401 - registers the back end
from asyncdist.ddp import DistributedDataParallel
from asyncdist.ddp.sharded_optimizer import ZeroRedundancyOptimizer as ShardedOptimizer

SMALL_MB = 1 / 1024


class Case:
    """What a case uses: the contender's class, data of this rank, and a record."""

    def __init__(self, contender):
        self.is_ours = contender == "asyncdist"
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.seen = []
        self.generator = torch.Generator().manual_seed(1)

    def wrap(self, module, **arguments):
        return (DistributedDataParallel if self.is_ours else TorchDDP)(module, **arguments)

    def data(self, *shape):
        """Return other numbers on each rank, and in each call."""
        return torch.randn(self.size, *shape, generator=self.generator)[self.rank].contiguous()

    def see(self, *modules):
        for module in modules:
            for name, parameter in module.named_parameters():
                gradient = None if parameter.grad is None else parameter.grad.to_dense().detach().clone()
                self.seen.append((name, parameter.detach().clone(), gradient))
            self.seen += [(name, buffer.detach().clone(), None) for name, buffer in module.named_buffers()]

    def step(self, model):
        model.zero_grad()
        self.backward(model)

    def backward(self, model):
        model(self.data(4, 6)).square().mean().backward()

    def see_values(self, model):
        self.seen += [(name, tensor.detach().clone(), None) for name, tensor in model.state_dict().items()]

    def train(self, module=None, steps=3, register=None, optimizer=None, zero=True, **arguments):
        model = self.wrap(network() if module is None else module, **arguments)
        if register is not None:
            register(model)
        step = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer).step
        for _ in range(steps):
            if zero:
                model.zero_grad()
            self.backward(model)
            self.see(model)
            step()
        return model


def seeded(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return module


def network():
    return seeded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)))


class Branches(nn.Module):
    """A forward uses the layers whose numbers are in `used`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.used = [0, 1, 2, 3]

    def forward(self, x):
        return sum(self.layers[index](x) for index in self.used)


class Checkpointed(nn.Module):
    def __init__(self, times, reentrant):
        super().__init__()
        self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.times, self.reentrant = times, reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def batch_norm():
    return seeded(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))


def branches(*used):
    module = seeded(Branches())
    module.used = used
    return module


def trained(*runs, module=network):
    """Make a case that trains a new module once with each of some arguments."""

    def case_of_arguments(case):
        for arguments in runs:
            case.train(module(), **arguments)

    return case_of_arguments


def hooked(*hooks, **arguments):
    """Make a case that trains a new network once with each of some functions that return a state and a hook of torch."""

    def case_of_hooks(case):
        for make in hooks:
            case.train(register=lambda model, made=make: model.register_comm_hook(*made()), steps=4, **arguments)

    return case_of_hooks


# -- arguments ----------------------------------------------------------------------------------------

defaults = trained({})
bucket_cap_mb = trained({"bucket_cap_mb": SMALL_MB})
bucket_cap_mb_list = trained({"bucket_cap_mb_list": [SMALL_MB, 1]})
gradient_as_bucket_view = trained(*({"gradient_as_bucket_view": value} for value in (False, True)))
gradient_as_bucket_view_without_zero_grad = trained(
    *({"gradient_as_bucket_view": value, "zero": False} for value in (False, True))
)
batched_grad_copy = trained({"batched_grad_copy": True})
lazy_bucket_allocation = trained({"lazy_bucket_allocation": True, "gradient_as_bucket_view": False})
broadcast_buffers = trained(*({"broadcast_buffers": value} for value in (False, True)), module=batch_norm)
forward_sync_buffers = trained(*({"forward_sync_buffers": value} for value in (False, True)), module=batch_norm)
skip_all_reduce_unused_params = trained(
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, module=lambda: branches(1, 3)
)
static_graph = trained({"static_graph": True, "bucket_cap_mb": SMALL_MB}, module=lambda: branches(1, 3))
static_graph_with_reentrant_checkpoints_of_one_layer = trained(
    {"static_graph": True}, module=lambda: seeded(Checkpointed(2, True))
)
checkpoints_without_reentry = trained({}, module=lambda: seeded(Checkpointed(2, False)))
reentrant_checkpoint = trained({}, module=lambda: seeded(Checkpointed(1, True)))
check_reduction_and_dim = trained({"check_reduction": True, "dim": 1})
_set_static_graph = trained({"register": lambda model: model._set_static_graph()}, module=lambda: branches(1, 3))


def init_sync(case):
    module = network()
    with torch.no_grad():
        module[0].weight.add_(case.rank)
    case.train(copy.deepcopy(module))
    case.train(network(), init_sync=False)


def find_unused_parameters(case):
    for used in ([0, 1, 2, 3], [0, 2], [0, 1 + case.rank % 2]):
        module = seeded(Branches())
        model = case.wrap(module, find_unused_parameters=True, bucket_cap_mb=SMALL_MB)
        for now in ([0, 1, 2, 3], used, used):
            module.used = now
            case.step(model)
            case.see(model)


def find_unused_parameters_with_no_sync(case):
    module = seeded(Branches())
    model = case.wrap(module, find_unused_parameters=True)
    for used in ([0, 1], [0, 2 + case.rank % 2]):
        module.used = used
        with model.no_sync():
            case.backward(model)
        module.used = [0]
        case.backward(model)
        case.see(model)


def delay_all_reduce_named_params(case):
    module = network()
    delayed = [(name, each) for name, each in module.named_parameters() if name.startswith("4.")]
    for _, parameter in delayed:
        parameter.grad = torch.zeros_like(parameter)
    model = case.wrap(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module[0].weight)
    for _ in range(2):
        case.step(model)
        torch.distributed.barrier()
        case.see(model)


def device_mesh(case):
    mesh = torch.distributed.init_device_mesh("cpu", (case.size,))
    case.train(device_mesh=mesh)


def process_group(case):
    group = torch.distributed.new_group(range(case.size))
    case.train(process_group=group)


def mixed_precision(case):
    case.train(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))


def parameters_of_several_dtypes(case):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6).double()

        def forward(self, x):
            return self.two(self.one(x).double())

    case.train(seeded(Mixed()))


def sparse_gradients(case):
    module = nn.Embedding(6, 4, sparse=True)
    model = case.wrap(seeded(module))
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([case.rank, 2])).sum().backward()
        case.see(model)


def ignored_parameters(case):
    module = network()
    with torch.no_grad():
        module[4].bias.add_(case.rank)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["4.bias"])
    case.train(module)


# -- methods ------------------------------------------------------------------------------------------


def no_sync(case):
    model = case.wrap(network())
    for _ in range(2):
        with model.no_sync():
            for _ in range(2):
                case.backward(model)
        case.backward(model)
        case.see(model)
        model.zero_grad()


def join(case):
    for divides in (True, False):
        model = case.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [case.data(4, 6) for _ in range(4)]
        with model.join(divide_by_initial_world_size=divides):
            for batch in data[: 2 + case.rank % 3]:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        case.see_values(model)


def torchs_join_with_buffers_and_no_sync(case):
    model = case.wrap(batch_norm())
    data = [case.data(4, 6) for _ in range(4)]
    with Join([model], divide_by_initial_world_size=True):
        for index, batch in enumerate(data[: 2 + case.rank % 2]):
            if index == 0:
                with model.no_sync():
                    model(batch).square().mean().backward()
            else:
                model(batch).square().mean().backward()
    case.see_values(model)
    with Join([model], enable=False):
        model(data[0]).square().mean().backward()


def torchs_join_with_zero(case):
    model = case.wrap(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    data = [case.data(4, 6) for _ in range(4)]
    with Join([model, optimizer]):
        for batch in data[: 2 + case.rank % 2]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    case.see_values(model)


def zero_redundancy_optimizer(case):
    module = network()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.1)
    case.train(module, optimizer=optimizer)


def sharded_optimizer(case):
    """Torch's class with torch's ZeRO, the class of this package with that of this package."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        module = network()
        optimizer = (ShardedOptimizer if case.is_ours else ZeroRedundancyOptimizer)(module.parameters(), kind, lr=0.1)
        case.train(module, optimizer=optimizer)


def periodic_model_averager(case):
    _averaged(case, PeriodicModelAverager(period=2, warmup_steps=1))


def hierarchical_model_averager(case):
    sizes = {2: 2, 4: 4} if case.size == 4 else {2: 1, 4: case.size}
    _averaged(case, HierarchicalModelAverager(period_group_size_dict=sizes, warmup_steps=1))


def _averaged(case, averager):
    """Let each rank train alone, as post-local SGD does after its first steps, and average parameters now and then."""
    module = network()
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    model = case.wrap(module)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    for step in range(5):
        optimizer.zero_grad()
        with model.no_sync() if step else contextlib.nullcontext():
            case.backward(model)
        optimizer.step()
        case.see(model)


def optimizer_in_backward(case):
    for as_view in (False, True):
        module = network()
        _apply_optimizer_in_backward(torch.optim.SGD, module[2:].parameters(), {"lr": 0.1})
        case.train(module, gradient_as_bucket_view=as_view)


def fused_optimizer(case):
    model = case.wrap(network())
    model._register_fused_optim(torch.optim.SGD, 0.1)
    for _ in range(3):
        case.step(model)
        torch.distributed.barrier()
        case.see_values(model)


def fused_optimizer_of_some_parameters(case):
    """Steps that accumulate come before; torch's documentation does not support them, and both compute the same."""
    for kind, arguments in ((torch.optim.Adam, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1})):
        module = network()
        model = case.wrap(module)
        model._register_fused_optim(kind, optim_params=list(module[2].parameters()), **arguments)
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                case.backward(model)
            case.backward(model)
            torch.distributed.barrier()
            case.see(model)


def triple(parameter):
    parameter.grad.mul_(3)


def user_hooks_of_gradients(case):
    module = network()
    module[0].weight.register_hook(lambda gradient: 2 * gradient)
    module[2].weight.register_post_accumulate_grad_hook(triple)
    model = case.wrap(module)
    module[4].weight.register_post_accumulate_grad_hook(triple)
    for _ in range(3):
        case.step(model)
        case.see(model)


def buffer_hook(case):
    def average(state, buffers):
        for buffer in buffers.values():
            if buffer.is_floating_point():
                torch.distributed.all_reduce(buffer)

    case.train(
        batch_norm(),
        register=lambda model: model._register_buffer_comm_hook(None, average),
    )


def deepcopy_and_pickle(case):
    model = case.wrap(network())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model) if case.is_ours else model, torch.load(file, weights_only=False)):
        case.backward(each)
        case.see(each)


def state_dict(case):
    model = case.train(batch_norm())
    case.see_values(model)
    other = case.wrap(batch_norm())
    other.load_state_dict(model.state_dict())
    case.see(other)


def evaluation(case):
    model = case.wrap(seeded(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))))
    model.train()
    model.eval()
    with torch.no_grad():
        case.seen.append(("output", model(case.data(4, 6)), None))


def outputs_in_dictionaries(case):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = network()

        def forward(self, x, scale=1.0):
            return {"result": [scale * self.layer(x)], "input": x}

    model = case.wrap(Nested())
    for _ in range(2):
        model.zero_grad()
        model(case.data(4, 6), scale=2.0)["result"][0].square().mean().backward()
        case.see(model)


def _update_process_group(case):
    model = case.wrap(network())
    group = torch.distributed.new_group(range(case.size))
    for _ in range(2):
        case.step(model)
        case.see(model)
        model._update_process_group(group)


def require_manual_backward_finalization(case):
    model = case.wrap(network())
    model.require_manual_backward_finalization = True
    for _ in range(2):
        case.step(model)
        model.finalize_backward()
        case.see(model)


# -- communication hooks ------------------------------------------------------------------------------


def world():
    return torch.distributed.group.WORLD


def power_sgd(rank):
    return powerSGD_hooks.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)


def all_reducing(model):
    model.register_comm_hook(None, default_hooks.allreduce_hook)


allreduce_hook = trained(*({"register": all_reducing, "bucket_cap_mb": cap, "steps": 4} for cap in (None, SMALL_MB)))
fp16_compress_hook = hooked(lambda: (world(), default_hooks.fp16_compress_hook))
fp16_compress_wrapper = hooked(lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)))
bf16_compress_hook = hooked(lambda: (None, default_hooks.bf16_compress_hook))
bf16_compress_wrapper = hooked(lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)))
fp16_compress_wrapper_of_powerSGD = hooked(
    lambda: (power_sgd(1), default_hooks.fp16_compress_wrapper(powerSGD_hooks.powerSGD_hook))
)
powerSGD_hook = hooked(*(lambda rank=rank: (power_sgd(rank), powerSGD_hooks.powerSGD_hook) for rank in (1, 2)))
batched_powerSGD_hook = hooked(
    lambda: (power_sgd(1), powerSGD_hooks.batched_powerSGD_hook), gradient_as_bucket_view=True
)
quantization_pertensor_hook = hooked(lambda: (world(), quantization_hooks.quantization_pertensor_hook))
quantization_perchannel_hook = hooked(lambda: (world(), quantization_hooks.quantization_perchannel_hook))
noop_hook = hooked(lambda: (None, debugging_hooks.noop_hook))
hooks_by_name = trained(
    *(
        {"register": lambda model, kind=kind: register_ddp_comm_hook(kind, model)}
        for kind in (DDPCommHookType.ALLREDUCE, DDPCommHookType.FP16_COMPRESS, DDPCommHookType.NOOP)
    )
)
built_in_hooks = trained(
    *(
        {"register": lambda model, kind=kind: model._register_builtin_comm_hook(kind)}
        for kind in (
            torch.distributed.BuiltinCommHookType.ALLREDUCE,
            torch.distributed.BuiltinCommHookType.FP16_COMPRESS,
        )
    )
)


def post_localSGD_hook(case):
    subgroup = torch.distributed.new_group([case.rank]) if case.size == 1 else None
    for rank in range(case.size if case.size > 1 else 0):
        made = torch.distributed.new_group([rank])
        subgroup = made if rank == case.rank else subgroup
    state = post_localSGD_hooks.PostLocalSGDState(None, subgroup, start_localSGD_iter=2)
    hooked(lambda: (state, post_localSGD_hooks.post_localSGD_hook))(case)


def optimizer_overlap_hook(case):
    state = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.1))
    model = case.wrap(network())
    model.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    for _ in range(3):
        case.step(model)
        torch.distributed.barrier()
        case.see_values(model)


def hook_with_zero_step(case):
    """Gloo is refused, so the steps are compared with those of an optimizer after backward.

    The interleaved hook is no case: it broadcasts in callbacks of futures, whose order on processors differs by rank.
    """
    for shards in (False, True):
        module, expected = network(), case.wrap(network())
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        model = case.wrap(module, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True)
        model.register_comm_hook(None, zero_step_of(default_hooks.allreduce_hook, model, zero, shard_buckets=shards))
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        for step in range(5):
            batch = case.data(4, 6)
            for each in (model, expected):
                each.zero_grad()
                each(batch).square().mean().backward()
            zero.step()
            # The first two steps only find the buckets.
            if step > 1:
                optimizer.step()
            for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(parameter, other)
            case.see_values(model)


CASES = [
    name
    for name, value in list(globals().items())
    if inspect.isfunction(value) and [*inspect.signature(value).parameters] == ["case"]
]


def run(test, contender, rank, world_size, where):
    """Run the cases that the test names, and send what each has recorded, or the error that it raised."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    back_end = "gloo" if contender == "gloo" else "asyncdist"
    torch.distributed.init_process_group(back_end, init_method=where, rank=rank, world_size=world_size)
    for name in test.recv():
        case = Case(contender)
        try:
            globals()[name](case)
            file = io.BytesIO()
            torch.save(case.seen, file)
            outcome = file.getvalue()
        except Exception as error:
            outcome = f"{type(error).__name__}: {(str(error) or 'without a text').splitlines()[0]}"
        test.send(outcome)
    torch.distributed.destroy_process_group()
