"""What the warnings of torch's documentation of DistributedDataParallel forbid ends in an error, and not in a hang."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import GradientError, MismatchError, OperationTimeoutError, UsageError
from tests.support.pairs import each_pair
from tests.support.ranks import on_ranks

PROGRAM = Path(__file__).parent / "program_torch_warnings.py"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x)) if hasattr(self, "second") else self.first(x)


def wrapped(group, module=None, **arguments):
    return DistributedDataParallel(module or Two(), process_group=group, **arguments)


def test_torch_warns_of_what_these_tests_cover():
    """Synchronization points, later parameters, order, strides, `torch.autograd.grad`, forks, changed parameters, RPC."""
    assert TorchDDP.__doc__.count(".. warning::") == 8


def remove(module):
    del module.second


def freeze(module):
    module.second.requires_grad_(False)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("change", [remove, freeze])
@on_ranks(2)
def test_parameter_that_is_removed_or_frozen_after_wrapping_is_named_on_every_rank(group, change, everywhere):
    model = wrapped(group)
    model(torch.ones(1, 3)).sum().backward()
    if everywhere or group.rank():
        change(model.module)
    with pytest.raises(GradientError, match=r"no gradient to 'second\.weight', 'second\.bias' on"):
        model(torch.ones(1, 3)).sum().backward()


@on_ranks(2)
def test_buffer_that_only_one_rank_has_ends_in_an_error_on_every_rank(group):
    model = wrapped(group, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model(torch.ones(2, 3)).sum().backward()
    if group.rank():
        model.module.register_buffer("later", torch.ones(5))
    # The root of the broadcast may have sent its bytes before it hears of the mismatch, in backward.
    sentence = "this rank has registered 'later' since the model was wrapped" if group.rank() else "broadcast"
    with pytest.raises(MismatchError, match=sentence):
        model(torch.ones(2, 3)).sum().backward()


def test_module_that_replaces_the_wrapped_one_is_refused(together):
    def rank(group):
        model = wrapped(group)
        model.module = nn.Sequential(Two())
        with pytest.raises(UsageError, match=r"parameter '0\.first\.weight' was added or replaced after"):
            model(torch.ones(1, 3))
        # A module around the parameters that the ranks average, as a compiled one.
        model.module = nn.Sequential(wrapped_module := Two())
        model = wrapped(group, wrapped_module)
        model.module = nn.Sequential(wrapped_module)
        model(torch.full((1, 3), float(group.rank()))).sum().backward()
        return wrapped_module.first.weight.grad

    assert torch.equal(*together(2, rank))


@each_pair(
    arguments=[{}, {"gradient_as_bucket_view": False}, {"find_unused_parameters": True}],
    ranks=[{0, 1}, {1}],
    shape=[(1, 3), (5, 3)],
)
@on_ranks(2)
def test_parameter_that_is_resized_after_wrapping_is_named_on_every_rank(group, shape, ranks, arguments):
    model = wrapped(group, Two(), **arguments)
    model(torch.ones(1, 3)).sum().backward()
    if group.rank() in ranks:
        model.module.second.weight.data = torch.ones(shape)
        model.module.second.bias.data = torch.ones(shape[:1])
        model.module.second.weight.grad = model.module.second.bias.grad = None
    with pytest.raises(GradientError, match=r"gradient of 'second\.weight', 'second\.bias' on .* has not the shape"):
        model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_reentrant_checkpoint_of_a_model_with_unused_parameters_gives_averages(group, as_view):
    """torch's documentation excludes this case."""

    class Checkpointed(Two):
        def forward(self, x):
            return checkpoint(self.first, x, use_reentrant=True)

    model = wrapped(group, Checkpointed(), find_unused_parameters=True, gradient_as_bucket_view=as_view)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 3), float(group.rank()), requires_grad=True)).sum().backward()
    assert (model.module.first.weight.grad.tolist(), model.module.second.weight.grad) == ([[0.5] * 3] * 3, None)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"bucket_cap_mb": 1}, r"bucket_cap_mb' has value \(1.0, 25.0\) on rank 0, but \(1.0, 1.0\) on rank 1"),
        ({"bucket_cap_mb": "auto"}, r"bucket_cap_mb' has value \(1.0, 25.0\) on rank 0, but auto on rank 1"),
        ({"find_unused_parameters": True}, "find_unused_parameters' has value False on rank 0, but True on rank 1"),
        ({"static_graph": True}, "static_graph' has value False on rank 0, but True on rank 1"),
    ],
)
@on_ranks(2)
def test_arguments_that_differ_are_named_on_every_rank(group, arguments, name):
    with pytest.raises(MismatchError, match=f"argument '{name}"):
        wrapped(group, **(arguments if group.rank() else {}))


def test_rank_that_runs_backward_more_often_is_told_which_rank_did_not_come(together):
    told = threading.Event()

    def rank(group):
        model = wrapped(group)
        model(torch.ones(1, 3)).sum().backward()
        if group.rank():
            assert told.wait(60)
            return
        group.set_timeout(0.05)
        with pytest.raises(OperationTimeoutError, match="rank 1"):
            model(torch.ones(1, 3)).sum().backward()
        told.set()

    together(2, rank)


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_forked_loaders_disturb_no_step_and_a_forked_child_cannot_take_one(nursery, tmp_path, transport):
    ranks = [nursery.start(PROGRAM, "train", rank, f"file://{tmp_path}/world", transport) for rank in range(2)]
    assert [rank.hear() for rank in ranks] == [([[0.5, 0.5]], True)] * 2
    assert [rank.wait() for rank in ranks] == [0, 0]


@pytest.mark.processes
@pytest.mark.exhaustive
def test_gradients_inside_distributed_autograd_are_refused(nursery, tmp_path):
    """Torch calls remote calls beside a wrapped model experimental. Their backward accumulates no gradients."""
    rank = nursery.start(PROGRAM, "differentiate", f"file://{tmp_path}/world")
    assert "gradients of 'weight', 'bias' instead of accumulating them" in rank.hear()
    assert rank.hear() == [[1.0, 1.0]]
    assert rank.wait() == 0
