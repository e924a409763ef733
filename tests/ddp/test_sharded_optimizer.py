"""A sharded optimizer takes the steps of the same optimizer without shards, and its checkpoints are that optimizer's."""

import contextlib
import copy
import io

import pytest
import torch

from asyncdist.ddp.sharded_optimizer import ZeroRedundancyOptimizer
from asyncdist.errors import GroupAbortedError, UnsupportedError, UsageError
from asyncdist.testing.cluster import run_ranks
from tests.ddp import conftest as toy
from tests.support.pairs import each_pair
from tests.support.ranks import on_ranks

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def gradients_of(model, step):
    """Set the gradients that all ranks have in a step."""
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    toy.loss_of(model, torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)).backward()


def groups_of(model):
    return [
        {"params": list(model[0].parameters())},
        {"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.003},
    ]


def locally(kind, steps, first=1, state=None, model=None):
    """Return a model that was trained by one optimizer without shards, and the optimizer."""
    model = toy.network() if model is None else model
    factory, options = KINDS[kind]
    optimizer = factory(groups_of(model), **options)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(first, first + steps):
        gradients_of(model, step)
        optimizer.step()
    return model, optimizer


def sharded(model, group, kind, **options):
    factory, defaults = KINDS[kind]
    return ZeroRedundancyOptimizer(groups_of(model), factory, process_group=group, **defaults, **options)


@each_pair(kind=list(KINDS), size=[1, 2, 3], views=[False, True])
def test_parameters_equal_those_of_one_optimizer(kind, size, views):
    def program(group):
        model = toy.network()
        optimizer = sharded(model, group, kind, parameters_as_bucket_view=views)
        for step in range(1, 5):
            gradients_of(model, step)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()], len(optimizer.optim.state)

    expected, _ = locally(kind, 4)
    found = run_ranks(size, program)
    for parameters, _ in found:
        toy.assert_equal(parameters, expected.parameters())
    assert sum(states for _, states in found) == 6
    assert size == 1 or max(states for _, states in found) < 6


def swap(model):
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().clone()))


def set_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [swap, set_data, torch.nn.Module.double])
@pytest.mark.parametrize("views", [False, True])
@on_ranks(2)
def test_parameters_that_leave_their_memory_are_sent(group, views, change):
    model, other = toy.network(), toy.network()
    ours = sharded(model, group, "sgd", parameters_as_bucket_view=views)
    change(model)
    change(other)
    for module, optimizer in ((model, ours), (other, KINDS["sgd"][0](groups_of(other), **KINDS["sgd"][1]))):
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    toy.assert_equal(model.parameters(), other.parameters())


@on_ranks(3)
async def test_awaited_steps_equal_blocking_ones(group):
    model = toy.network()
    optimizer = sharded(model, group, "adamw")
    for step in range(1, 5):
        gradients_of(model, step)
        await optimizer.awaited_step()
    toy.assert_equal(model.parameters(), locally("adamw", 4)[0].parameters())


@on_ranks(2)
def test_closure_is_called_and_its_loss_returned(group):
    model = toy.network()
    optimizer = sharded(model, group, "sgd")

    def closure():
        gradients_of(model, 1)
        return 7.0

    assert optimizer.step(closure) == 7.0
    toy.assert_equal(model.parameters(), locally("sgd", 1)[0].parameters())


@on_ranks(2)
def test_scheduler_changes_the_steps_of_all_ranks(group):
    def train(model, optimizer):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(1, 4):
            gradients_of(model, step)
            optimizer.step()
            scheduler.step()
        return model

    model, other = toy.network(), toy.network()
    factory, options = KINDS["adamw"]
    expected = train(other, factory(groups_of(other), **options))
    toy.assert_equal(train(model, sharded(model, group, "adamw")).parameters(), expected.parameters())


@pytest.mark.parametrize(("kind", "before", "after"), [("sgd", 3, 2), ("adamw", 1, 3), ("adagrad", 3, 2)])
def test_checkpoint_is_resumed_on_another_number_of_ranks(kind, before, after):
    saved = io.BytesIO()

    def save(group):
        model = toy.network()
        optimizer = sharded(model, group, kind)
        for step in range(1, 4):
            gradients_of(model, step)
            optimizer.step()
        optimizer.consolidate_state_dict(to=group.size() - 1)
        if group.rank() == group.size() - 1:
            torch.save((model.state_dict(), optimizer.state_dict()), saved)
        else:
            with pytest.raises(UsageError, match=r"consolidate_state_dict\(to=0\)|to=1"):
                optimizer.state_dict()

    def resume(group):
        model = toy.network()
        weights, state = torch.load(io.BytesIO(saved.getvalue()))
        model.load_state_dict(weights)
        optimizer = sharded(model, group, kind)
        optimizer.load_state_dict(state)
        for step in range(4, 7):
            gradients_of(model, step)
            optimizer.step()
        return model

    run_ranks(before, save)
    expected, _ = locally(kind, 6)
    for model in run_ranks(after, resume):
        toy.assert_equal(model.parameters(), expected.parameters())
    # The same checkpoint serves the optimizer without shards.
    weights, state = torch.load(io.BytesIO(saved.getvalue()))
    model = toy.network()
    model.load_state_dict(weights)
    toy.assert_equal(locally(kind, 3, first=4, state=state, model=model)[0].parameters(), expected.parameters())


@kinds
def test_checkpoint_has_the_form_of_one_optimizer(kind):
    def program(group):
        model = toy.network()
        optimizer = sharded(model, group, kind)
        gradients_of(model, 1)
        optimizer.step()
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if group.rank() == 0 else None

    found, _ = run_ranks(2, program)
    _, optimizer = locally(kind, 1)
    expected = optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for place, state in expected["state"].items():
        assert found["state"][place].keys() == state.keys()
        toy.assert_equal(
            [torch.as_tensor(value) for value in found["state"][place].values() if value is not None],
            [torch.as_tensor(value) for value in state.values() if value is not None],
        )


@on_ranks(2)
def test_parameters_that_are_added_are_trained(group):
    def train(model, make):
        optimizer = make([{"params": list(model[0].parameters())}])
        for step in range(1, 5):
            if step == 3:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
            gradients_of(model, step)
            optimizer.step()
        return model

    options = {"lr": 0.1, "momentum": 0.9}
    expected = train(toy.network(), lambda groups: torch.optim.SGD(groups, **options))
    found = train(toy.network(), lambda groups: ZeroRedundancyOptimizer(groups, torch.optim.SGD, group, **options))
    toy.assert_equal(found.parameters(), expected.parameters())


def test_survivors_go_on_after_a_regroup():
    """The state of the lost rank begins anew, that of the others continues, and all hold the same parameters."""

    def program(group):
        model = toy.network()
        optimizer = sharded(model, group, "sgd")
        for step in range(1, 4):
            gradients_of(model, step)
            optimizer.step()
        with contextlib.suppress(GroupAbortedError):  # another rank is at regroup() already
            group.barrier(background=False).wait()
        if group.rank() == 1:
            group.close()
            return None
        if group.rank() == 2:  # it has not received a share that rank 1 has sent before its end
            with torch.no_grad():
                for parameter in optimizer._owned_by_rank()[1]:
                    parameter.zero_()
        before = copy.deepcopy(list(model.parameters()))
        state = {id(key): copy.deepcopy(value) for key, value in optimizer.optim.state.items()}
        lost = optimizer.set_group(group.regroup(background=False).result())
        everything = list(model.parameters())
        for parameter, kept in optimizer.optim.state.items():
            if id(parameter) in state:
                assert torch.equal(kept["momentum_buffer"], state[id(parameter)]["momentum_buffer"])
            assert not any(parameter is everything[place] for place in lost)
        gradients_of(model, 4)
        optimizer.step()
        return lost, before, everything

    first, _, third = run_ranks(3, program)
    assert first[0] == third[0] != []
    toy.assert_equal(first[2], third[2])
    assert not all(map(torch.equal, first[1], third[1]))  # before the regroup they differed
    assert len(first[0]) < 6


def test_overlap_with_ddp_is_refused():
    with pytest.raises(UnsupportedError, match=r"call step\(\) after backward"):
        ZeroRedundancyOptimizer(toy.network().parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)


@on_ranks(1)
def test_wrong_calls_are_refused(group):
    model = toy.network()
    optimizer = sharded(model, group, "sgd")
    with pytest.raises(UsageError, match="from 0 to 0"):
        optimizer.consolidate_state_dict(to=1)
    with pytest.raises(UsageError, match=r"groups of \[6\] parameters, and this optimizer of \[2, 4\]"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(UsageError, match="process group of torch"):
        optimizer.join_hook()
    with pytest.raises(UsageError, match="no parameters"):
        ZeroRedundancyOptimizer([], torch.optim.SGD, group, lr=0.1)
