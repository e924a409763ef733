import copy

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel, hooks
from asyncdist.errors import MismatchError
from tests.ddp import conftest as toy
from tests.support.ranks import on_ranks


class Buffered(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.large = nn.Parameter(torch.full((600, 500), value))  # more than a pack
        self.register_buffer("flags", torch.tensor([value > 0, False]))
        self.register_buffer("phase", torch.tensor(complex(value, 1.0)))
        self.register_buffer("quarter", torch.full((3,), value).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.tensor(int(value)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x):
        return self.norm(x)


def octets(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_all_ranks_start_from_rank_0s_parameters_and_buffers(together):
    def rank(group):
        module = Buffered(1.0 + group.rank())
        model = DistributedDataParallel(module, process_group=group)
        assert list(model.state_dict()) == [f"module.{name}" for name in module.state_dict()]
        return module.state_dict()

    expected = Buffered(1.0).state_dict()
    for state in together(3, rank):
        for name, tensor in state.items():
            assert torch.equal(octets(tensor), octets(expected[name])), name
        assert state["conv.weight"].stride() == expected["conv.weight"].stride()


@on_ranks(2)
def test_a_lone_element_whose_stride_is_not_one(group):
    module = nn.Linear(2, 1)
    module.scale = nn.Parameter(torch.full((2,), 1.0 + group.rank())[:1].as_strided((1,), (2,)))
    DistributedDataParallel(module, process_group=group)
    assert module.scale.item() == 1.0


@pytest.mark.parametrize("arguments", [{"broadcast_buffers": False}, {"forward_sync_buffers": False}, {}])
def test_buffers_are_broadcast_before_forward_if_requested(together, arguments):
    def rank(group):
        module = nn.BatchNorm1d(2)
        model = DistributedDataParallel(module, process_group=group, **arguments)
        means = []
        for step in range(3):
            model(torch.full((2, 2), 10.0 * group.rank() + step) + torch.tensor([[-1.0], [1.0]])).sum().backward()
            means.append(module.running_mean[0].item())
        with torch.no_grad():
            model.eval()
            model(torch.ones(2, 2))
        means.append(module.running_mean[0].item())
        return means

    ours, theirs = together(2, rank)
    assert ours == pytest.approx([0.0, 0.1, 0.29, 0.29])
    if arguments:  # the statistics of each rank's own samples
        assert theirs == pytest.approx([1.0, 2.0, 3.0, 3.0], abs=0.5)
    else:  # rank 0's statistics plus the rank's own sample; in evaluation rank 0's
        assert theirs == pytest.approx([1.0, 1.1, 1.29, 0.29])


class Running(nn.Module):
    """Replaces its buffers in each forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("own", torch.zeros(()))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def forward(self, x):
        self.mean = self.mean / 2 + x.detach().mean()
        self.own = self.own + x.detach().mean()
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@on_ranks(2)
def test_replaced_buffers_are_broadcast(group, dtype):
    module = Running()
    model = DistributedDataParallel(module, process_group=group).to(dtype)
    for _ in range(3):
        model(torch.full((1, 1), 1.0 + group.rank(), dtype=dtype)).sum().backward()
    before = module.mean.item()
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=dtype))
    assert (before, module.mean.item(), module.own.item()) == [(1.75, 0.875, 3.0), (2.75, 0.875, 6.0)][group.rank()]


@on_ranks(2)
def test_replaced_buffers_are_broadcast_when_join_ends(group):
    module = Running()
    model = DistributedDataParallel(module, process_group=group)
    with model.join():
        for _ in range(group.rank() + 1):
            model(torch.full((1, 1), 1.0 + group.rank())).sum().backward()
    assert module.mean.item() == 3.0


def test_buffers_are_broadcast_between_two_forwards_of_one_backward(together):
    def rank(group):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        model = DistributedDataParallel(module, process_group=group)
        inputs = torch.eye(2)
        model(inputs).sum().backward()
        (model(inputs).square().sum() + model(inputs).square().sum()).backward()
        return module[0].weight.grad

    assert torch.equal(*together(2, rank))


@on_ranks(2)
def test_init_sync_false_leaves_values_alone(group):
    counting = toy.Counting(group)
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, group.rank())
    DistributedDataParallel(module, process_group=counting, init_sync=False)
    assert counting.issued == []
    assert module.weight.item() == group.rank()


def test_ignored_parameters_are_left_alone(together):
    def rank(group):
        module = toy.network(seed=group.rank())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        model = DistributedDataParallel(module, process_group=group)
        assert len(list(model._get_data_parallel_params(module))) == 5
        assert "0.weight" not in {name for names in model.bucket_parameters for name in names}
        toy.loss_of(model, *toy.share(group, toy.samples())).backward()
        return [p.grad for p in module.parameters()], [p.detach() for p in module.parameters()]

    (ours, values), (theirs, other_values) = together(2, rank)
    assert not torch.equal(ours[0], theirs[0])
    assert not torch.equal(values[0], other_values[0])
    toy.assert_equal(ours[1:], theirs[1:])
    toy.assert_equal(values[1:], other_values[1:])


def with_other_strides():
    module = nn.Linear(3, 2)
    module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())
    return module


def in_another_order():
    swapped, module = nn.Module(), nn.Linear(3, 2)
    swapped.bias, swapped.weight = module.bias, module.weight
    return swapped


def with_another_parameter():
    module = nn.Linear(3, 2)
    module.third = nn.Parameter(torch.ones(1))
    return module


DIFFERENT = pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (lambda: nn.Linear(4, 3), r"parameter 'weight' has shape \(2, 3\) on rank 0, but \(3, 4\) on rank 2"),
        (lambda: nn.Linear(3, 2).double(), r"parameter 'weight' has dtype float32 on rank 0, but float64 on rank 2"),
        (lambda: nn.Linear(3, 2, bias=False), r"parameter 'bias' exists on rank 0 only"),
        (
            lambda: nn.ModuleDict({"a": nn.Linear(3, 2)}),
            r"rank 0 has parameter 'weight', rank 2 has parameter 'a.weight'",
        ),
        (with_other_strides, r"parameter 'weight' has strides \(3, 1\) on rank 0, but \(1, 2\) on rank 2"),
        (in_another_order, "rank 0 has parameter 'weight', rank 2 has parameter 'bias'"),
        (with_another_parameter, "parameter 'third' exists on rank 2 only"),
    ],
)


@DIFFERENT
@on_ranks(3)
def test_different_models_raise_on_every_rank(group, odd, sentence):
    with pytest.raises(MismatchError, match=sentence) as caught:
        DistributedDataParallel(odd() if group.rank() == 2 else nn.Linear(3, 2), process_group=group)
    assert caught.value.peer == 2


@DIFFERENT
@pytest.mark.parametrize("hook", [None, hooks.average])
@on_ranks(3)
def test_different_models_raise_in_the_first_step_on_every_rank_without_init_sync(group, odd, sentence, hook):
    module = odd() if group.rank() == 2 else nn.Linear(3, 2)
    model = DistributedDataParallel(module, process_group=group, init_sync=False)
    if hook is not None:
        model.register_async_comm_hook(hook)
    # Each parameter gets a gradient, whatever the module computes.
    model.module.forward = lambda: sum(parameter.sum() for parameter in module.parameters())
    with pytest.raises(MismatchError, match=sentence) as caught:
        model().backward()
    assert caught.value.peer == 2


@on_ranks(2)
def test_models_are_compared_once_without_init_sync(group):
    counting = toy.Counting(group)
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=counting, init_sync=False)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    copied = copy.deepcopy(model)
    first = counting.issued[:]
    counting.issued.clear()
    copied(torch.ones(1, 3)).sum().backward()
    # The digests, the bucket with its flags, and the order of the gradients.
    first_step = ["all_gather_object", "all_reduce", "broadcast"]
    assert [name for name, _ in first] == [*first_step, "all_reduce"]
    assert [name for name, _ in counting.issued] == first_step


@on_ranks(2)
def test_buffers_that_differ_raise_in_the_first_step_on_every_rank_without_init_sync(group):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=group.rank() == 0))
    model = DistributedDataParallel(module, process_group=group, init_sync=False)
    with pytest.raises(MismatchError, match=r"buffer '1.running_mean' exists on rank 0 only"):
        model(torch.eye(3)).sum().backward()


@on_ranks(2)
def test_models_that_differ_raise_in_the_first_step_of_ranks_with_and_without_inputs(group):
    module = nn.Linear(3, 2 + group.rank())
    model = DistributedDataParallel(module, process_group=group, init_sync=False)

    def train():
        with model.join():
            for _ in range(1 - group.rank()):
                model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(MismatchError, match=r"'weight' has shape \(2, 3\) on rank 0, but \(3, 3\) on rank 1"):
        train()
