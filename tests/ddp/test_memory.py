"""Where buckets lie, when they are sent, and how gradients are divided, with and without shared memory."""

import errno
import gc
import os

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel, direct_gradients
from asyncdist.ddp.backward import bucket_set
from asyncdist.kernel import torch_private
from asyncdist.kernel.memory.shared_arena import arena, unavailable
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks

without_memory = pytest.mark.skipif(unavailable() is not None, reason=f"no shared memory: {unavailable()}")


def is_registered(tensor):
    return arena().offset_of(tensor.data_ptr(), tensor.nbytes) is not None


def train(group, module, steps=2, **how):
    model = DistributedDataParallel(module, process_group=group, **how)
    for _ in range(steps):
        model.zero_grad()
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
    return model


def alone(module):
    module.zero_grad()
    toy.loss_of(module, *toy.samples()).backward()
    return toy.gradients(module)


@without_memory
@pytest.mark.parametrize("transport", ["shm", "inproc"])
def test_buckets_lie_in_shared_memory(together, transport):
    gc.collect()
    before = arena().used_nbytes

    def rank(group):
        model = train(group, toy.network(), bucket_cap_mb=0.0001)
        assert len(model.bucket_parameters) > 1
        toy.assert_close(toy.gradients(model), alone(toy.network()))
        return [is_registered(parameter.grad) for parameter in model.parameters()]

    for registered in together(2, rank, transport=transport):
        assert set(registered) == {transport == "shm"}
    gc.collect()
    assert arena().used_nbytes == before


@without_memory
def test_buckets_lie_in_ordinary_memory_if_shared_memory_is_full(together, monkeypatch):
    def rank(group):
        model = train(group, toy.network(), steps=0)
        group.barrier(background=False).wait()
        monkeypatch.setattr(bucket_set, "empty", full)
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
        toy.assert_close(toy.gradients(model), alone(toy.network()))
        return [is_registered(parameter.grad) for parameter in model.parameters()]

    def full(*_, **__):
        raise bucket_set.SharedMemoryError(os.strerror(errno.ENOSPC))

    for registered in together(2, rank, transport="shm"):
        assert set(registered) == {False}


@without_memory
@pytest.mark.parametrize(("cores", "overlaps"), [(2, False), (64, True)])
def test_buckets_wait_for_the_end_of_backward_unless_a_core_is_free(together, monkeypatch, cores, overlaps):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)

    def rank(group):
        step = train(group, toy.network(), bucket_cap_mb=0.0001).last_step
        return [bucket.started < step.backward_finished for bucket in step.buckets]

    for early in together(2, rank, transport="shm"):
        assert len(early) > 1
        assert early == [overlaps] * (len(early) - 1) + [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(4)
def test_gradients_that_accumulate_are_averaged_like_fresh_ones(group, dtype):
    """Three backwards: a fresh gradient, one added to the average in its bucket, one after a backward without sync."""
    module = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        module.weight.fill_(1)
    model = DistributedDataParallel(module, process_group=group)
    seen = []
    for factor in (1, 2):
        model(torch.full((1, 1), factor * 4.0 * (group.rank() + 1), dtype=dtype)).sum().backward()
        seen.append(module.weight.grad.item())
    with model.no_sync():
        model(torch.full((1, 1), 4.0 * group.rank(), dtype=dtype)).sum().backward()
    model(torch.full((1, 1), 4.0, dtype=dtype)).sum().backward()
    assert [*seen, module.weight.grad.item()] == [10.0, 30.0, 40.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(2)
def test_gradients_are_aligned_to_cache_lines(group, dtype):
    """A matrix product that is written across cache lines takes 1.5 times as long."""
    model = DistributedDataParallel(nn.Linear(3, 5).to(dtype), process_group=group)
    for _ in range(2):  # buckets are assigned again after the first
        model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    # One line for the bias, one or two for the weight, and one for the flags.
    assert model.module.bias.grad.untyped_storage().nbytes() in (192, 256)
    assert [parameter.grad.data_ptr() % 64 for parameter in model.parameters()] == [0, 0]


@on_ranks(1)
def test_gradients_of_a_single_rank_stay_where_they_are(group, monkeypatch):
    monkeypatch.setattr(direct_gradients, "LEAST_NBYTES", 1 << 30)

    module, seen = toy.network(), set()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.add(parameter.grad.data_ptr()))
    train(group, module, steps=1, bucket_cap_mb=0.0001)
    assert {parameter.grad.data_ptr() for parameter in module.parameters()} == seen
    toy.assert_close(toy.gradients(module), alone(toy.network()))


def test_many_small_gradients_are_copied_together(together, monkeypatch):
    calls, copy = [], torch_private.foreach_copy

    def counted(views, gradients):
        calls.append(len(views))
        copy(views, gradients)

    monkeypatch.setattr(torch_private, "foreach_copy", counted)

    def rank(group):
        model = DistributedDataParallel(nn.Sequential(*(nn.Conv1d(1, 1, 1) for _ in range(9))), process_group=group)
        model(torch.ones(1, 1, 1)).sum().backward()

    together(2, rank)
    assert calls == [18, 18]
