"""`SyncBatchNorm` computes, on every rank, what one process computes on the samples of all ranks."""

import copy
import pickle

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
from asyncdist.errors import UsageError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


def model_of(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), norm, nn.ReLU(), nn.Conv2d(4, 3, 2))


def images(count, generator=None):
    return torch.randn(count, 2, 6, 5, generator=torch.Generator().manual_seed(7))


def shares(counts):
    """Return each rank's part of the samples."""
    return images(sum(counts)).split(list(counts))


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ((4, 4), {}),
        ((5, 1, 2), {}),
        ((3, 0), {}),
        ((5, 1, 2), {"momentum": None, "eps": 1e-3}),
        ((3, 0), {"affine": False}),
        ((5, 1, 2), {"track_running_stats": False}),
    ],
)
def test_training_equals_a_single_process_on_the_global_batch(together, counts, options):
    """The loss is a sum over samples, so the gradients' averages times the ranks are those of the global batch."""

    def run(module, data, steps=3):
        losses = []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = module(data).square().sum()
            (loss * scale[0]).backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    scale = [1.0]
    base = toy.seeded(model_of(nn.BatchNorm2d(4, **options)))
    reference = copy.deepcopy(base)
    expected = run(reference, images(sum(counts)))
    scale[0] = float(len(counts))

    def rank(group):
        module = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(base), process_group=group)
        model = DistributedDataParallel(module, process_group=group, broadcast_buffers=False)
        return run(model, shares(counts)[group.rank()]), module.state_dict()

    results = together(len(counts), rank)
    totals = [sum(parts) for parts in zip(*[losses for losses, _ in results], strict=True)]
    torch.testing.assert_close(totals, expected, rtol=1e-5, atol=1e-5)
    for _, state in results:
        torch.testing.assert_close(dict(state), dict(reference.state_dict()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_input_gradients_equal_those_of_the_global_batch(together, dtype):
    data = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    factor = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    whole = data.double().clone().requires_grad_()
    (nn.BatchNorm1d(3).double()(whole) * factor).sum().backward()

    def rank(group):
        own = data[2 * group.rank() : 2 * group.rank() + 2].clone().requires_grad_()
        layer = SyncBatchNorm(3, process_group=group, dtype=dtype)
        (layer(own) * factor[2 * group.rank() : 2 * group.rank() + 2]).sum().backward()
        return own.grad

    found = torch.cat(together(3, rank)).double()
    tolerance = 1e-10 if dtype is torch.float64 else 0.05
    torch.testing.assert_close(found, whole.grad, rtol=tolerance, atol=tolerance)


def test_evaluation_and_one_rank_compute_what_torch_computes(together):
    def rank(group):
        norm = toy.seeded(nn.BatchNorm2d(4))
        norm.running_var.fill_(2)
        ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm), group)
        data = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(3))
        if group.size() == 1:
            assert torch.equal(ours(data), norm(data))
        ours.eval()
        norm.eval()
        assert torch.equal(ours(data), norm(data))

    together(1, rank)
    together(2, rank)


def test_conversion_keeps_parameters_buffers_keys_and_modes():
    shared = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(3, 4), shared, nn.Sequential(nn.SyncBatchNorm(4), nn.LazyBatchNorm2d()), shared)
    module[1].eval()
    before = dict(module.named_parameters()) | dict(module.named_buffers())
    converted = SyncBatchNorm.convert_sync_batchnorm(module)
    assert converted is module
    assert type(module[1]) is SyncBatchNorm
    assert module[3] is module[1]
    assert type(module[2][0]) is SyncBatchNorm
    assert type(module[2][1]) is nn.LazyBatchNorm2d
    assert not module[1].training
    after = dict(module.named_parameters()) | dict(module.named_buffers())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert type(SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2))) is SyncBatchNorm


@on_ranks(1)
def test_copies_keep_the_group_and_pickles_do_not(group):
    layer = SyncBatchNorm(2, process_group=group)
    assert copy.deepcopy(layer).process_group is group
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded.process_group is None
    assert loaded.state_dict().keys() == layer.state_dict().keys()


@on_ranks(2)
def test_one_value_per_channel_raises_on_every_rank(group):
    layer = SyncBatchNorm(2, process_group=group)
    with pytest.raises(UsageError, match="the 2 ranks together have 1: give the ranks larger batches"):
        layer(torch.ones(1 - group.rank(), 2))
    with pytest.raises(UsageError, match=r"shape \(N, C, ...\), not \(2,\)"):
        layer(torch.ones(2))
