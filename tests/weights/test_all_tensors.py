"""A subscriber without a model gets a dict of all tensors that are published."""

import pytest
import torch

LIMIT = 60.0


@pytest.mark.parametrize("host", ["trainer", "server"])
async def test_subscriber_without_a_model_gets_whatever_is_published(exchange, host):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}
    async with exchange(state, host) as (publisher, subscriber):
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as tensors:
            assert tensors.keys() == state.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())
        state.pop("b")
        state["c"] = torch.ones(4, dtype=torch.bfloat16)
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as tensors:
            assert tensors.keys() == {"a", "c"}
            assert tensors["c"].dtype == torch.bfloat16


async def test_subscriber_without_a_model_may_take_slices(exchange):
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
    async with exchange(state, slices={"a": slice(1, 2)}) as (publisher, subscriber):
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as tensors:
            assert tensors["a"].tolist() == [[3.0, 4.0, 5.0]]
            assert tensors["b"].tolist() == [0, 1, 2, 3]
