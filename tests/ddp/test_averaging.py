"""The compressed average is the same on all ranks, close to the exact one, and exact over many calls."""

import asyncio

import pytest
import torch

from asyncdist.ddp import averaging
from asyncdist.ddp.averaging import average_of
from asyncdist.ddp.compression import ErrorFeedback, codec_of
from asyncdist.errors import GroupError
from asyncdist.testing.cluster import world_of
from tests.support.pairs import each_pair


@pytest.fixture(autouse=True)
def pieces_are_small(monkeypatch):
    monkeypatch.setattr(averaging, "PIECE_COUNT", 512)


def vectors(size, count):
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, generator=generator) for _ in range(size)]


async def averages(groups, values, *arguments):
    return await asyncio.gather(
        *[average_of(group, own, *arguments) for group, own in zip(groups, values, strict=True)]
    )


@each_pair(size=[1, 2, 3, 4], count=[1, 5, 1000, 4099], name=[None, "bf16", "int8", "int4"])
async def test_all_ranks_get_the_same_average(size, count, name):
    values = vectors(size, count)
    before = [own.clone() for own in values]
    async with world_of(size) as groups:
        results = await averages(groups, values, codec_of(name))
    exact = torch.stack(values).mean(dim=0)
    tolerance = {None: 1e-6, "bf16": 2**-6, "int8": 0.06, "int4": 1.0}[name]
    for result in results:
        assert torch.equal(result.values, results[0].values)
        assert (result.values - exact).abs().max() <= tolerance
    assert all(map(torch.equal, values, before))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
async def test_error_feedback_makes_the_sum_of_many_averages_exact(size, name):
    """The sum of the averages and the losses that are kept is the sum of what the ranks have sent."""
    codec, rounds = codec_of(name), 12
    feedbacks = [ErrorFeedback() for _ in range(size)]
    sent, arrived = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    values = vectors(size, 700)
    async with world_of(size) as groups:
        for _ in range(rounds):
            values = [own.roll(1) for own in values]
            results = await asyncio.gather(*map(average_of, groups, values, [codec] * size, feedbacks))
            for feedback, result in zip(feedbacks, results, strict=True):
                feedback.residual = result.lost
            sent += torch.stack(values).double().mean(dim=0)
            arrived += results[0].values
    kept = torch.stack([feedback.residual for feedback in feedbacks]).double().mean(dim=0)
    torch.testing.assert_close(arrived + kept, sent, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
async def test_bytes_sent_are_those_of_the_codes(size, monkeypatch):
    monkeypatch.setattr(averaging, "PIECE_COUNT", 6144)  # divisible by the sizes, in whole blocks
    codec, count = codec_of("int8"), 2 * 6144
    async with world_of(size) as groups:
        results = await averages(groups, vectors(size, count), codec)
    whole = codec.encoded_nbytes(count)
    assert [result.sent_nbytes for result in results] == [whole if size == 2 else 2 * whole * (size - 1) // size] * size


async def test_lost_member_leaves_values_and_feedback_alone():
    codec, feedback = codec_of("int8"), ErrorFeedback()
    values = vectors(1, 5000)[0]
    feedback.residual = torch.full_like(values, 0.25)
    async with world_of(3) as groups:
        calls = [asyncio.ensure_future(average_of(group, values, codec, feedback)) for group in groups[:2]]
        await asyncio.sleep(0)
        groups[2].abort("a test")
        for call in calls:
            with pytest.raises(GroupError):
                await call
    assert torch.equal(values, vectors(1, 5000)[0])
    assert torch.equal(feedback.residual, torch.full_like(values, 0.25))
