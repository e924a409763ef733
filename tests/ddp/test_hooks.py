"""Communication hooks: torch's interface, awaited hooks, and the hooks of asyncdist.ddp.hooks."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from asyncdist.base.ops import ReduceOp
from asyncdist.ddp import DistributedDataParallel, hooks
from asyncdist.errors import UnsupportedError, UsageError
from tests.ddp import conftest as toy
from tests.support.pairs import each_pair
from tests.support.ranks import on_ranks


def averaging(group, bucket):
    work = group.all_reduce(bucket.buffer(), ReduceOp.AVG)
    return work.get_future().then(lambda future: future.value())


async def awaited(bucket, group):
    await group.all_reduce(bucket.buffer(), ReduceOp.AVG)
    return bucket.buffer()


def train(group, register, steps=4, module=None, **how):
    model = DistributedDataParallel(module or toy.network(), process_group=group, bucket_cap_mb=toy.SMALL_MB, **how)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], toy.gradients(model)


REGISTER = {
    "torch's": lambda model: model.register_comm_hook(model.process_group, averaging),
    "awaited": lambda model: model.register_async_comm_hook(awaited),
    "built in": lambda model: model._register_builtin_comm_hook("ALLREDUCE"),
    "codec": lambda model: model.register_async_comm_hook(hooks.average),
}


@each_pair(kind=list(REGISTER), size=[1, 2, 3], as_view=[True, False])
def test_hook_that_averages_trains_like_a_model_without_a_hook(together, kind, size, as_view):
    def rank(group):
        found = train(group, REGISTER[kind], gradient_as_bucket_view=as_view)
        return found, train(group, lambda model: None)

    for (parameters, gradients), (expected, of_gradients) in together(size, rank):
        toy.assert_close(parameters, expected)
        toy.assert_close(gradients, of_gradients)


@pytest.mark.parametrize("interface", ["torch's", "awaited"])
@on_ranks(2)
def test_hooks_see_each_bucket_in_order_with_its_own_gradients(group, interface):
    seen = []

    def look(bucket):
        seen.append((bucket.index(), bucket.is_last(), threading.current_thread() is threading.main_thread()))
        gradients, parameters = bucket.gradients(), bucket.parameters()
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert torch.equal(torch.cat([g.flatten() for g in gradients]), bucket.buffer()), "without gaps"

    def of_torch(state, bucket):
        look(bucket)
        return averaging(group, bucket)

    async def of_ours(bucket, sibling):
        look(bucket)
        assert sibling is not group
        return await awaited(bucket, sibling)

    train(group, lambda model: (
        model.register_comm_hook(None, of_torch) if interface == "torch's" else model.register_async_comm_hook(of_ours)
    ), steps=2)  # fmt: skip
    assert [each[:2] for each in seen] == [(0, False), (1, True), (0, False), (1, False), (2, True)]


@on_ranks(2)
def test_result_may_be_another_tensor_of_another_dtype_or_a_list(group):
    def doubled(state, bucket):
        future = torch.futures.Future()
        future.set_result([2 * bucket.buffer().double()])
        return future

    model = DistributedDataParallel(toy.network(), process_group=group)
    model.register_comm_hook(None, doubled)
    reference = toy.network()
    for module in (model, reference):
        toy.loss_of(module, *toy.samples()).backward()
    toy.assert_close(toy.gradients(model), [2 * each for each in toy.gradients(reference)])
    assert model._get_ddp_logging_data()["comm_hook"].endswith("doubled")


@on_ranks(2)
def test_hook_may_replace_the_buffer_and_return_the_replacement(group):
    """As torch's fp16_compress_wrapper does."""

    def halved(state, bucket):
        bucket.set_buffer(bucket.buffer().half())
        return averaging(state, bucket)

    model = DistributedDataParallel(toy.network(), process_group=group)
    model.register_comm_hook(group, halved)
    toy.loss_of(model, *toy.share(group, toy.samples())).backward()
    found = toy.gradients(model)
    expected = train(group, lambda model: None, steps=1)[1]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def wrong_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...


def wrong_result(state, bucket) -> torch.Tensor: ...


@pytest.mark.parametrize(
    ("register", "sentence"),
    [
        (lambda m: m.register_comm_hook(None, 3), "is a function of"),
        (lambda m: m.register_comm_hook(None, awaited), r"register_async_comm_hook\(\)"),
        (lambda m: m.register_comm_hook(None, lambda bucket: None), "two arguments, state and bucket"),
        (lambda m: m.register_comm_hook(None, wrong_bucket), "GradBucket, but its annotation"),
        (lambda m: m.register_comm_hook(None, wrong_result), "but its annotation"),
        (
            lambda m: m.register_comm_hook(None, fp16_compress_hook),
            r"'fp16_compress_hook' communicates over torch.distributed.*asyncdist.ddp.hooks",
        ),
        (lambda m: m.register_async_comm_hook(None), "coroutine function of"),
        (lambda m: m._register_builtin_comm_hook("NOOP"), "pass ALLREDUCE or FP16_COMPRESS"),
        (lambda m: hooks.TopK(0), "share above 0"),
        (lambda m: hooks.PowerSGD(0), "at least 1"),
        (lambda m: hooks.Quantized(None), "needs a codec"),
    ],
)
@on_ranks(1)
def test_wrong_hooks_are_refused_when_they_are_registered(group, register, sentence):
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    with pytest.raises(UsageError, match=sentence):
        register(model)


@on_ranks(1)
def test_one_hook_is_registered_before_the_first_backward(group):
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    model.register_async_comm_hook(awaited)
    with pytest.raises(UsageError, match="has the communication hook 'awaited' already"):
        model.register_comm_hook(None, averaging)
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(UsageError, match="before the first"):
        model.register_async_comm_hook(awaited)


@pytest.mark.parametrize("interface", ["torch's", "awaited"])
@pytest.mark.parametrize(
    ("result", "error", "sentence"),
    [
        (
            lambda bucket: bucket.buffer()[1:],
            UsageError,
            "returned a tensor of 3 elements for bucket 0: return a tensor of 4",
        ),
        (lambda bucket: None, UsageError, "returned None"),
        (lambda bucket: 1 / 0, (ZeroDivisionError, RuntimeError), "division by zero"),
    ],
)
@on_ranks(1)
def test_error_of_a_hook_is_raised_by_backward(group, interface, result, error, sentence):
    def of_torch(state, bucket):
        future = torch.futures.Future()
        future.set_result(result(bucket))
        return future

    async def of_ours(bucket, group):
        return result(bucket)

    model = DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    if interface == "torch's":
        model.register_comm_hook(None, of_torch)
    else:
        model.register_async_comm_hook(of_ours)
    with pytest.raises(error, match=sentence):
        model(torch.ones(1, 3)).sum().backward()


def test_ranks_without_inputs_call_the_hook_with_zeros(together):
    def rank(group):
        model = DistributedDataParallel(toy.network(), process_group=group, bucket_cap_mb=toy.SMALL_MB)
        model.register_async_comm_hook(awaited)
        with model.join():
            for _ in range(1 + group.rank()):
                model.zero_grad()
                toy.loss_of(model, *toy.samples()).backward()
        return toy.gradients(model)

    reference = toy.network()
    toy.loss_of(reference, *toy.samples()).backward()
    short, long = together(2, rank)
    toy.assert_close(short, toy.gradients(reference))
    toy.assert_close(long, [each / 2 for each in toy.gradients(reference)])


@on_ranks(2)
def test_unused_parameters_and_faults_are_found_with_a_hook_too(group):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x, both):
            return self.one(x) + (self.two(x) if both else 0)

    model = DistributedDataParallel(Branch(), process_group=group, find_unused_parameters=True)
    model.register_async_comm_hook(awaited)
    model(torch.ones(1, 1), group.rank() == 0).sum().backward()
    assert [parameter.grad.item() for parameter in model.parameters()] == [1.0, 0.5]
    strict = DistributedDataParallel(Branch(), process_group=group)
    strict.register_async_comm_hook(awaited)
    with pytest.raises(RuntimeError, match=r"no gradient to 'two.weight' on (rank 1|this rank)"):
        strict(torch.ones(1, 1), group.rank() == 0).sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@on_ranks(2)
def test_fused_optimizer_steps_with_the_averages(group):
    module = toy.network()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=toy.SMALL_MB)
    register = model._register_fused_optim
    register(torch.optim.SGD, 0.1)
    for _ in range(4):
        model.zero_grad()
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
    toy.assert_close([p.detach() for p in module.parameters()], train(group, lambda model: None)[0])
    with pytest.raises(UsageError, match="LBFGS cannot step in backward"):
        register(torch.optim.LBFGS)


def gradients_of(group, hook, steps):
    """Return the sum of the averaged gradients of ``steps`` equal backwards."""
    model = DistributedDataParallel(wide(), process_group=group)
    model.register_async_comm_hook(hook)
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(steps):
        model.zero_grad()
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
        for total, parameter in zip(sums, model.parameters(), strict=True):
            total += parameter.grad
    return sums


def wide():
    return toy.seeded(nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3)))


def deviation(found, expected):
    whole, other = (torch.cat([each.flatten() for each in tensors]) for tensors in (found, expected))
    return ((whole - other).norm() / other.norm()).item()


@pytest.mark.parametrize(
    ("size", "make", "once", "mean"),
    [
        (2, lambda: hooks.fp16, 1e-3, 1e-3),
        (3, lambda: hooks.bf16, 1e-2, 1e-2),
        (2, lambda: hooks.Quantized("int8"), 2e-2, 2e-3),
        (3, lambda: hooks.Quantized("int4"), 0.4, 0.04),
        (3, lambda: hooks.TopK(0.25), 0.9, 0.15),
        (3, lambda: hooks.PowerSGD(2, start=1), 0.9, 0.1),
    ],
    ids=["fp16", "bf16", "int8", "int4", "top-k", "PowerSGD"],
)
def test_error_feedback_makes_the_mean_of_many_steps_exact(together, make, once, mean, size):
    def rank(group):
        exact = gradients_of(group, hooks.average, 1)
        first, many = (gradients_of(group, make(), steps) for steps in (2, 40))
        return exact, first, many

    results = together(size, rank)
    for exact, first, many in results:
        assert deviation([each / 2 for each in first], exact) < once
        assert deviation([each / 40 for each in many], exact) < mean
        toy.assert_equal(many, results[0][2])


@on_ranks(2)
def test_state_of_hooks_belongs_to_one_model(group):
    model = DistributedDataParallel(wide(), process_group=group)
    model.register_async_comm_hook(hooks.TopK(0.25))
    copied = copy.deepcopy(model)
    toy.loss_of(copied, *toy.share(group, toy.samples())).backward()
    toy.assert_close(toy.gradients(copied), gradients_of(group, hooks.average, 1))


class ComplexNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.full((16, 16), 1 + 2j))
        self.empty = nn.Parameter(torch.empty(0, 5))

    def forward(self, factor):
        return (self.weights * factor - 1).abs().square().sum() + self.empty.sum()


@pytest.mark.parametrize("hook", [hooks.fp16, hooks.bf16, hooks.Quantized("int8"), hooks.TopK()])
@on_ranks(2)
def test_hook_that_sends_fewer_bits_refuses_complex_gradients(group, hook):
    model = DistributedDataParallel(ComplexNetwork(), process_group=group)
    model.register_async_comm_hook(hook)
    with pytest.raises(UnsupportedError, match="cannot compress complex gradients"):
        model(1j).backward()


@pytest.mark.parametrize("make", [lambda: hooks.average, lambda: hooks.PowerSGD(start=1)])
@on_ranks(2)
def test_hook_averages_complex_gradients_as_they_are(group, make):
    model, reference = DistributedDataParallel(ComplexNetwork(), process_group=group), ComplexNetwork()
    model.register_async_comm_hook(make())
    for _ in range(3):
        model.zero_grad()
        model(1j + group.rank()).backward()
    (sum(reference(1j + each) for each in range(2)) / 2).backward()
    torch.testing.assert_close(model.module.weights.grad, reference.weights.grad)
    assert reference.weights.grad.imag.abs().min() > 0.1
