"""Copies and pickles of wrapped models average as they do."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import asyncdist.sync as dist
from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import UsageError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("as_view", [True, False])
def test_a_deep_copy_averages_over_the_same_group(together, as_view):
    def rank(group):
        model = toy.wrapped(group, gradient_as_bucket_view=as_view)
        data = toy.share(group, toy.samples())
        toy.loss_of(model, *data).backward()
        expected = toy.gradients(model)
        copied = copy.deepcopy(model)
        assert toy.gradients(copied) == [None] * 6
        assert len(copied.bucket_parameters) == 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for _ in range(2):
            copied.zero_grad()
            toy.loss_of(copied, *data).backward()
            toy.assert_equal(toy.gradients(copied), expected)
        toy.assert_equal(toy.gradients(model), expected)
        return expected

    ours, theirs = together(2, rank)
    toy.assert_equal(ours, theirs)


@on_ranks(2)
def test_one_rank_may_copy_and_evaluate_the_model_alone(group):
    model = DistributedDataParallel(toy.network(), process_group=group)
    data = toy.share(group, toy.samples())
    if group.rank() == 0:
        averaged = AveragedModel(model)
    for _ in range(2):
        toy.loss_of(model, *data).backward()
        if group.rank() == 0:
            averaged.update_parameters(model)
    if group.rank() == 0:
        with torch.no_grad():
            assert torch.equal(averaged(data[0]), model.module(data[0]))
        frozen = copy.deepcopy(averaged.requires_grad_(False))
        assert torch.equal(frozen(data[0]), model.module(data[0]))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [saved, lambda model: pickle.loads(pickle.dumps(model))], ids=["file", "pickle"])
def test_pickle_is_loaded_on_the_default_group(copied):
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(toy.network())
        toy.loss_of(model, *toy.samples()).backward()
        loaded = copied(model)
        loaded.zero_grad()
        assert loaded.process_group is model.process_group
        toy.loss_of(loaded, *toy.samples()).backward()
        assert loaded.last_step is not None
        toy.assert_equal(toy.gradients(loaded), toy.gradients(model))
        pickled = pickle.dumps(model)
    finally:
        dist.destroy_process_group()
    with pytest.raises(UsageError, match=r"call init_process_group\(\) first, or pickle its attribute `module`"):
        pickle.loads(pickled)
    with pytest.raises(UsageError, match="pickle its attribute `module`, and wrap that after loading"):
        pickle.dumps(model)


@on_ranks(1)
def test_model_on_another_group_than_the_default_one_is_not_pickled(group):
    model = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    with pytest.raises(UsageError, match="pickle its attribute `module`, and wrap that after loading"):
        pickle.dumps(model)
