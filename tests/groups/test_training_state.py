"""`asyncdist.groups.members.training_state`: which members receive a state, and what a transfer keeps."""

import asyncio

import pytest
import torch

from asyncdist.errors import UsageError
from asyncdist.groups.members.training_state import State, adopt
from asyncdist.testing.cluster import world_of


def trained(seed, steps, size=8):
    """Return a state whose optimizer has made a number of steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size), torch.nn.Linear(size, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, size)).sum().backward()
        optimizer.step()
    return State(model=model, optimizer=optimizer, losses=[float(seed)] * steps, step=steps)


def content(state):
    return {
        "model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), "losses": state.losses,
        "step": state.step,
    }  # fmt: skip


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


async def adopt_all(groups, states):
    return await asyncio.gather(*map(adopt, groups, states))


async def test_first_adoption_makes_all_states_equal_to_that_of_rank_0():
    async with world_of(3) as groups:
        states = [trained(seed, 0) for seed in range(3)]
        first = content(states[0])
        assert await adopt_all(groups, states) == [False, True, True]
        assert all(equal(content(state), first) for state in states)


async def test_newcomer_receives_the_state_with_the_highest_step():
    async with world_of(3) as groups:
        states = [trained(0, 0) for _ in range(3)]
        await adopt_all(groups, states)
        history = states[0]._history
        states[1] = trained(1, 5)
        states[1]._history = history
        assert await adopt_all(groups, states) == [True, False, True]
        assert all(equal(content(state), content(states[1])) for state in states)
        assert states[0].step == 5


async def test_equal_states_transfer_nothing_and_a_newcomer_with_more_steps_receives():
    async with world_of(2) as groups:
        states = [trained(0, 2), trained(0, 2)]
        await adopt_all(groups, states)
        assert await adopt_all(groups, states) == [False, False]
        stranger = trained(7, 9)
        assert await adopt_all(groups, [states[0], stranger]) == [False, True]
        assert stranger.step == 2
        assert equal(content(stranger), content(states[0]))


async def test_large_tensors_arrive_in_the_memory_of_the_receiver():
    async with world_of(2) as groups:
        states = [trained(seed, 1, size=256) for seed in range(2)]
        weight = states[1].model[0].weight
        address = weight.data_ptr()
        await adopt_all(groups, states)
        assert states[1].model[0].weight is weight
        assert weight.data_ptr() == address
        assert equal(content(states[1]), content(states[0]))


async def test_receiver_does_not_wait_for_a_source_whose_group_has_failed_before():
    """The source has not seen the versions of all members, and does not come to the group of the transfer."""
    async with world_of(3, timeout=300.0) as groups, asyncio.timeout(60.0):
        states = [trained(0, 1) for _ in groups]
        await adopt_all(groups, states)
        receiving = asyncio.create_task(adopt(groups[2], trained(1, 0)))
        versions = [None] * 3
        version = [states[0]._history, states[0].step, sorted(states[0].parts())]
        bystander = asyncio.create_task(adopt(groups[1], states[1]))
        await groups[0].all_gather_object(versions, version)
        assert not await bystander
        groups[0].abort("test")
        assert not await receiving
        assert groups[2].changed


async def test_different_parts_are_refused_on_every_member():
    async with world_of(2) as groups:
        results = await asyncio.gather(
            adopt(groups[0], State(epoch=1)), adopt(groups[1], State(round=1)), return_exceptions=True
        )
    assert all(isinstance(result, UsageError) and "epoch" in str(result) for result in results)


def test_a_missing_part_is_named():
    with pytest.raises(AttributeError, match=r"model=\.\.\."):
        _ = State(step=1).model


async def test_part_that_is_not_plain_data_is_named():
    async with world_of(2) as groups:
        states = [State(weights=torch.zeros(4), thing=object()) for _ in groups]
        waiting = asyncio.create_task(adopt(groups[1], states[1]))
        with pytest.raises(UsageError, match=r"cannot be passed on: .*thing \(object\)"):
            await adopt(groups[0], states[0])
        groups[1].abort("the state does not come")
        assert await waiting is False
